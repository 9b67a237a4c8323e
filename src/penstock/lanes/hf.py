"""The lane `transformers-generic-text`: any causal transformers model, run in the way that its self-check allows."""

from __future__ import annotations

from typing import Any

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.cache.storage import KvStorage
from penstock.lanes.lane import LaneFacts
from penstock.lanes.own_cache import OwnCaches
from penstock.lanes.packed import AttentionCall, PackedModel, attention_calls, use_paged_attention
from penstock.lanes.signature import ForwardSignature, read_signature
from penstock.lanes.verdicts import Verdict, Way
from penstock.plan.memory import ModelShape

# Tokens of two probes, far enough apart that the difference shows what a token costs.
PROBE_LENGTHS = (16, 48)


class GenericTextLane:
    """`ways` is what runs the steps: packed calls over our pages, or the model's own caches."""

    def __init__(self, ways: PackedModel | OwnCaches, *, shape: ModelShape, facts: LaneFacts) -> None:
        self.ways = ways
        self.shape = shape
        self.facts = facts

    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        return self.ways.run(inputs)

    def record(self) -> None:
        """Ahead of time, so that no request waits for it."""
        if isinstance(self.ways, PackedModel):
            self.ways.record()

    def release(self, sequence_id: int) -> None:
        if isinstance(self.ways, OwnCaches):
            self.ways.release(sequence_id)


class EnteringModel:
    """A model where it enters: its forward is read once, and what its sequences cost is measured once."""

    def __init__(self, model: Any, verdict: Verdict) -> None:
        self.model = model
        self.verdict = verdict
        self.signature: ForwardSignature = read_signature(model)
        self.calls: tuple[AttentionCall, ...] = ()
        if verdict.way in (Way.PACKED, Way.PAGED):
            use_paged_attention(model)
            self.calls = attention_calls(model, self.signature)

    def caches(self) -> OwnCaches:
        return OwnCaches(
            self.model,
            self.signature,
            passes_mask=self.verdict.passes_mask,
            recomputes=self.verdict.way is Way.RECOMPUTED,
        )

    def cache_bytes(self) -> tuple[int, int]:
        """(bytes of a sequence whatever its length, bytes per token) of the model's own cache."""
        caches = self.caches()
        sizes = []
        for length in PROBE_LENGTHS:
            ids = torch.zeros(length, dtype=torch.long, device=self.model.device)
            caches.read(0, ids, start=0, rows=ids[:1])
            sizes.append(caches.num_bytes(0))
        per_token = max(0, sizes[1] - sizes[0]) // (PROBE_LENGTHS[1] - PROBE_LENGTHS[0])
        return max(0, sizes[0] - per_token * PROBE_LENGTHS[0]), per_token

    def pages(self, num_slots: int) -> KvStorage:
        return KvStorage(
            num_layers=len(self.calls),
            num_slots=num_slots,
            num_kv_heads=self.calls[0].num_kv_heads,
            head_size=self.calls[0].head_size,
            dtype=self.model.dtype,
            device=self.model.device,
        )

    def packed(self, attention: AttentionBackend) -> PackedModel:
        joins = self.verdict.way is Way.PACKED
        return PackedModel(self.model, self.signature, attention, num_calls=len(self.calls), joins=joins)
