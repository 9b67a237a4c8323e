"""The lane `transformers-generic-text`: any causal transformers model, run in the way that its self-check allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.attention.pick import attention_backend, attention_on_card
from penstock.cache.storage import KvStorage
from penstock.foreign.forward import CachedForward
from penstock.foreign.own_cache import OwnCaches
from penstock.foreign.pages import CallSizes, JoinedModel, attention_calls, pages_of, use_paged_attention
from penstock.foreign.pretrained import causal_class, load_causal, quiet_library
from penstock.foreign.signature import ForwardSignature, read_signature
from penstock.lanes.generic_text_kind import price
from penstock.lanes.lane import Lane, LaneFacts
from penstock.lanes.loading import LoadedLane, Loading
from penstock.models.files import ModelFiles
from penstock.models.generic_spec import generic_spec
from penstock.plan.memory import ModelShape
from penstock.proof.text import check_real_text
from penstock.proof.verdict import Verdict, Way


class GenericTextLane(Lane):
    """`ways` is what runs the steps: joined calls over our pages, or the model's own caches."""

    def __init__(self, ways: JoinedModel | OwnCaches, *, shape: ModelShape, facts: LaneFacts) -> None:
        self.ways = ways
        self.shape = shape
        self.facts = facts

    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        return self.ways.run(inputs)

    def capture(self) -> None:
        """Captures steps ahead of time, so that no request waits for it."""
        if isinstance(self.ways, JoinedModel):
            self.ways.capture()

    @property
    def recorded_bytes(self) -> int:
        graphs = self.ways.graphs if isinstance(self.ways, JoinedModel) else None
        return 0 if graphs is None else graphs.kept_bytes

    def release(self, sequence_id: int) -> None:
        if isinstance(self.ways, OwnCaches):
            self.ways.release(sequence_id)


class EnteringModel:
    """A model where it enters: its forward is read once, and what its sequences cost is measured once."""

    def __init__(self, model: Any, verdict: Verdict) -> None:
        self.model = model
        self.verdict = verdict
        self.signature: ForwardSignature = read_signature(model)
        self.calls: tuple[CallSizes, ...] = ()
        if verdict.way in (Way.PACKED, Way.PAGED):
            use_paged_attention(model)
            self.calls = attention_calls(model, self.signature)

    def caches(self) -> OwnCaches:
        return OwnCaches(
            CachedForward(self.model, self.signature),
            passes_mask=self.verdict.passes_mask,
            passes_positions=self.verdict.passes_positions,
            recomputes=self.verdict.way is Way.RECOMPUTED,
        )

    def pages(self, num_slots: int) -> KvStorage:
        return pages_of(self.model, self.calls, num_slots)

    def joined(self, attention: AttentionBackend) -> JoinedModel:
        joins = self.verdict.way is Way.PACKED
        return JoinedModel(self.model, self.signature, attention, num_calls=len(self.calls), joins=joins)


class GenericTextLoader:
    library_class = staticmethod(causal_class)

    def __init__(self, files: ModelFiles) -> None:
        self.model_class, self.model_config = self.library_class(files)
        self.spec = generic_spec(files.config)

    @quiet_library()
    def load(self, loading: Loading) -> LoadedLane:
        place, checks = loading.place, loading.checks
        model = load_causal(place.files, self.model_class, self.model_config, loading.dtype, loading.device)
        checks = checks.with_real_weights(model, lambda: check_real_text(model, checks.verdict, attention_backend))
        facts = checks.facts(model)
        entering = EnteringModel(model, checks.verdict)
        fixed, per_token = (0, 0) if entering.calls else entering.caches().cache_bytes()
        num_kv_layers = len(entering.calls) or self.spec.num_kv_layers
        # What the model really calls and keeps, in place of the estimates from its config.
        sizes = (dataclasses.asdict(entering.calls[0]) if entering.calls else {}) | {"state_bytes": fixed}
        memory = price(place, checks.verdict)
        memory = loading.measured(
            memory,
            model,
            state_bytes_per_token=max(0, per_token - memory.shape.kv_bytes_per_token),
            num_layers=num_kv_layers,
            attends_through_scores=not entering.calls and model.config._attn_implementation == "eager",
            **sizes,
        )
        num_tokens = loading.num_tokens(memory, memory.num_running_states)
        ways: JoinedModel | OwnCaches = entering.caches()
        if entering.calls:
            block_size = place.config.block_size
            storage = entering.pages(-(-num_tokens // block_size) * block_size)
            ways = entering.joined(attention_backend(storage, block_size, entering.calls[0].num_heads))
            if (on_card := attention_on_card(ways.attention)) is not None:
                rows = memory.num_logit_rows
                ways.capture_decodes(on_card.for_decodes(max_rows=rows, max_context=loading.max_context))
        return LoadedLane(
            lane=GenericTextLane(ways, shape=memory.shape, facts=facts),
            spec=dataclasses.replace(self.spec, num_kv_layers=num_kv_layers, **sizes),
            memory=memory,
            num_tokens=num_tokens,
            attention=ways.attention if isinstance(ways, JoinedModel) else None,
        )
