"""Sequences that keep the model's own cache object: recurrent and hybrid models, and all that does not join exactly.

One sequence per call. The tokens are kept beside the cache, so that a step that failed midway can be made good.
"""

# n tokens of the chunk

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.foreign.forward import Cached, CachedForward
from penstock.foreign.images import MediaPrompt
from penstock.foreign.pages import attending, one_by_one

# Tokens of two probes, far enough apart that the difference shows what a token costs.
PROBE_LENGTHS = (16, 48)


@dataclass(slots=True, kw_only=True)
class _Kept:
    prompt: MediaPrompt | None = None  # None: text alone, which its tokens say
    cached: Cached = field(default_factory=Cached)
    tokens: list[int] = field(default_factory=list)


class OwnCaches:
    """`passes_mask`, `passes_positions`: whether calls over text are given a mask of ones, and positions from 0 on;
    some models need them, others are wrong with them.

    `recomputes`: the model keeps no cache that could be handed over, so every call reads the sequence from its start.
    """

    def __init__(
        self,
        forward: CachedForward,
        *,
        passes_mask: bool = False,
        passes_positions: bool = True,
        recomputes: bool = False,
    ) -> None:
        self._forward = forward
        self._accepts = forward.signature.accepts
        self._passes_mask = passes_mask and self._accepts("attention_mask")
        self._passes_positions = passes_positions and self._accepts("position_ids")
        self._recomputes = recomputes or forward.signature.cache_name is None
        self._kept: dict[int, _Kept] = {}

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def expect(self, sequence_id: int, prompt: MediaPrompt | None) -> None:
        """The prompt with images of a sequence that will be read from its start."""
        self._kept[sequence_id] = _Kept(prompt=prompt)

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
        kept = self._kept.setdefault(sequence_id, _Kept())
        assert start <= len(kept.tokens), f"sequence {sequence_id} was read to {len(kept.tokens)}, not {start}"
        kept.tokens[start:] = ids_n.tolist()
        if start and (self._recomputes or kept.cached.num_read != start):
            ids_n = torch.tensor(kept.tokens, device=ids_n.device)
            rows, start = rows + start, 0
        if start == 0:
            kept.cached = Cached()
        num_prompt = 0 if kept.prompt is None else max(0, kept.prompt.num_tokens - start)
        if not 0 < num_prompt < len(ids_n):
            return self._call(kept, ids_n, start, rows)
        # Read again after a preemption: what is past the prompt was written, and is a call of its own.
        is_prompt = rows < num_prompt
        logits = [self._call(kept, ids_n[:num_prompt], start, rows[is_prompt])]
        logits.append(self._call(kept, ids_n[num_prompt:], start + num_prompt, rows[~is_prompt] - num_prompt))
        return torch.cat(logits)

    def release(self, sequence_id: int) -> None:
        self._kept.pop(sequence_id, None)

    def num_bytes(self, sequence_id: int) -> int:
        kept = self._kept.get(sequence_id)
        return 0 if kept is None else tensor_bytes(kept.cached.cache)

    def keeps_cache(self, sequence_id: int) -> bool:
        kept = self._kept.get(sequence_id)
        return kept is not None and kept.cached.cache is not None

    def cache_bytes(self, prompt: Callable[[int], MediaPrompt] | None = None) -> tuple[int, int]:
        """Measures (bytes of a sequence whatever its length, bytes per token) of the model's own cache.

        `prompt`: makes one of a length, where the model's inputs come of such.
        """
        sizes = []
        for length in PROBE_LENGTHS:
            ids = torch.zeros(length, dtype=torch.long, device=self._forward.model.device)
            self.expect(0, None if prompt is None else prompt(length))
            self.read(0, ids, start=0, rows=ids[:1])
            sizes.append(self.num_bytes(0))
        self.release(0)
        per_token = max(0, sizes[1] - sizes[0]) // (PROBE_LENGTHS[1] - PROBE_LENGTHS[0])
        return max(0, sizes[0] - per_token * PROBE_LENGTHS[0]), per_token

    def _call(self, kept: _Kept, ids_n: torch.Tensor, start: int, rows: torch.Tensor) -> torch.Tensor:
        """Tokens of a prompt with images, or text and what was written, each by themselves."""
        cached = None if self._recomputes else kept.cached
        prompt = kept.prompt
        if prompt is None:
            return self._forward.logits(self._text_inputs(ids_n, start), rows, cached)
        if start < prompt.num_tokens:
            with self._forward.reading(prompt):
                return self._forward.logits(self._accepted(prompt.chunk(start, start + len(ids_n))), rows, cached)
        positions = prompt.positions_after(start, len(ids_n))
        return self._forward.logits(self._accepted({"input_ids": ids_n[None], "position_ids": positions}), rows, cached)

    def _text_inputs(self, ids_n: torch.Tensor, start: int) -> dict[str, Any]:
        end = start + len(ids_n)
        positions_n = torch.arange(start, end, device=ids_n.device)
        inputs: dict[str, Any] = {"input_ids": ids_n[None]}
        if self._passes_positions:
            inputs["position_ids"] = positions_n[None]
        if self._accepts("cache_position"):
            inputs["cache_position"] = positions_n
        if self._passes_mask:
            inputs["attention_mask"] = torch.ones(1, end, dtype=torch.long, device=ids_n.device)
        return inputs

    def _accepted(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in inputs.items() if self._accepts(name)}


class PagedPrompts(OwnCaches):
    """Reads such prompts over our pages, which keep the keys and values of any prefix; nothing else is kept."""

    def __init__(self, forward: CachedForward, attention: AttentionBackend, num_calls: int) -> None:
        super().__init__(forward, recomputes=True)
        self._attention = attention
        self._num_calls = num_calls

    @torch.inference_mode()
    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        logits = []
        for index, (offset, start, end) in enumerate(inputs.chunks()):
            kept, num_rows = self._kept[inputs.sequence_ids[index]], end - start
            assert kept.prompt is not None
            # Read again after a preemption: what is past the prompt was written, and is a call of its own.
            border = min(max(0, kept.prompt.num_tokens - start), num_rows)
            for first, last in ((0, border), (border, num_rows)):
                if first < last:
                    part = inputs.cut([(index, offset + first, offset + last)])
                    self._attention.begin_step(part)
                    with attending(self._attention, self._num_calls):
                        logits.append(self._call(kept, part.ids_T, start + first, part.logit_rows))
        return torch.cat(logits)


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
