"""Sequences that keep the model's own cache object: recurrent and hybrid models, and all that does not pack exactly.

One sequence per call. The tokens are kept beside the cache, so that a step that failed midway can be made good.
"""

# n tokens of the chunk

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.attention.backend import ForwardInputs
from penstock.lanes.packed import one_by_one
from penstock.lanes.signature import ForwardSignature, WantedRows


@dataclass(slots=True, kw_only=True)
class _Kept:
    cache: Any = None
    tokens: list[int] = field(default_factory=list)
    num_read: int = 0  # tokens that the cache holds; 0 while a call runs, so that a broken one is not believed


class OwnCaches:
    """`passes_mask`: whether the call is given a mask of ones; some models need it, others are wrong with it.

    `recomputes`: the model keeps no cache that could be handed over, so every call reads the sequence from its start.
    """

    def __init__(
        self, model: Any, signature: ForwardSignature, *, passes_mask: bool = False, recomputes: bool = False
    ) -> None:
        self.model = model
        self._signature = signature
        self._passes_mask = passes_mask and signature.accepts("attention_mask")
        self._recomputes = recomputes or signature.cache_name is None
        self._head = WantedRows(model, signature)
        self._kept: dict[int, _Kept] = {}

    @torch.inference_mode()
    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        """Float32 logits of the wanted rows, in the order of the step."""
        logits = [
            self.read(
                alone.sequence_ids[0],
                alone.ids_T,
                start=alone.context_lens[0] - len(alone.ids_T),
                rows=alone.logit_rows,
            )
            for alone in one_by_one(inputs)
        ]
        return torch.cat(logits)

    @torch.inference_mode()
    def read(self, sequence_id: int, ids_n: torch.Tensor, *, start: int, rows: torch.Tensor) -> torch.Tensor:
        """Tokens [start, start + n) of a sequence whose first `start` tokens were read before."""
        if start == 0:
            self._kept.pop(sequence_id, None)
        kept = self._kept.setdefault(sequence_id, _Kept())
        assert start <= len(kept.tokens), f"sequence {sequence_id} was read to {len(kept.tokens)}, not {start}"
        kept.tokens[start:] = ids_n.tolist()
        if start and (self._recomputes or kept.num_read != start):
            kept.cache, kept.num_read = None, 0
            ids_n = torch.tensor(kept.tokens, device=ids_n.device)
            rows, start = rows + start, 0
        return self._call(kept, ids_n, start, rows)

    def release(self, sequence_id: int) -> None:
        self._kept.pop(sequence_id, None)

    def num_bytes(self, sequence_id: int) -> int:
        kept = self._kept.get(sequence_id)
        return 0 if kept is None else tensor_bytes(kept.cache)

    def keeps_cache(self, sequence_id: int) -> bool:
        kept = self._kept.get(sequence_id)
        return kept is not None and kept.cache is not None

    def _call(self, kept: _Kept, ids_n: torch.Tensor, start: int, rows: torch.Tensor) -> torch.Tensor:
        signature, end = self._signature, start + len(ids_n)
        positions_n = torch.arange(start, end, device=ids_n.device)
        inputs: dict[str, Any] = {"input_ids": ids_n[None]}
        if signature.accepts("position_ids"):
            inputs["position_ids"] = positions_n[None]
        if signature.accepts("cache_position"):
            inputs["cache_position"] = positions_n
        if self._passes_mask:
            inputs["attention_mask"] = torch.ones(1, end, dtype=torch.long, device=ids_n.device)
        if signature.accepts_use_cache:
            inputs["use_cache"] = not self._recomputes
        if kept.cache is not None:
            assert signature.cache_name is not None
            inputs[signature.cache_name] = kept.cache
        kept.num_read = 0
        logits, output = self._head.call(rows, **inputs)
        if not self._recomputes:
            kept.cache = getattr(output, str(signature.cache_name), None)
        kept.num_read = end
        return logits


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors inside any object, shared ones counted once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif hasattr(item, "__dict__") and not isinstance(item, (type, torch.nn.Module)):
            waiting += vars(item).values()
    return sum(storages.values())
