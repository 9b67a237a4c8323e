"""One prompt on its way through an attached model: where its chunks end, and what is told about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import InvalidSetting
from penstock.lanes.forward_call import CACHE_NAMES, ForwardPrompt, num_tokens
from penstock.lanes.forward_memory import ForwardMemory, held_bytes
from penstock.request import ChunkRecord, PrefillProgress

OnProgress = Callable[[PrefillProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the last prompt was read. `chunks` is empty where it was read whole, and `reason` says why."""

    num_tokens: int
    num_cached: int  # tokens that a cache held already; not counted where the prompt was read whole
    chunks: tuple[ChunkRecord, ...]
    applied: bool
    reason: str
    adjustments: tuple[str, ...] = ()

    @classmethod
    def whole(cls, num_tokens: int, reason: str) -> Reading:
        return cls(num_tokens=num_tokens, num_cached=0, chunks=(), applied=False, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a chunk."""

    chunk_size: int
    budget_bytes: int | None  # None: the chunk size alone
    memory: ForwardMemory
    device: torch.device


class PromptReading:
    """One prompt on its way through the model: where its chunks end, and what is told about them."""

    def __init__(
        self,
        prompt: ForwardPrompt,
        inputs: Mapping[str, Any],
        limits: Limits,
        *,
        request_id: int,
        on_progress: OnProgress | None,
    ) -> None:
        self.prompt = prompt
        self.limits = limits
        self.request_id = request_id
        self.on_progress = on_progress
        self.cache = _cache_of(inputs)
        self.num_cached = num_cached_tokens(inputs, self.cache[1])
        self.batch = _batch_size(inputs)
        self.chunks: list[ChunkRecord] = []
        self.adjustments: list[str] = []
        self.predicted_bytes = 0
        self.base_bytes = 0  # held when the first chunk begins
        self.started = self.chunk_started = time.perf_counter()

    def reading(self) -> Reading:
        return Reading(
            num_tokens=self.prompt.num_tokens,
            num_cached=self.num_cached,
            chunks=tuple(self.chunks),
            applied=len(self.chunks) > 1,
            reason=f"read in {len(self.chunks)} chunk(s)",
            adjustments=tuple(self.adjustments),
        )

    def chunk_limit(self, start: int) -> int:
        """Freed memory stays with the process and is used again, so what is held is measured once and then summed."""
        limits, memory = self.limits, self.limits.memory
        if start == 0:
            self.base_bytes = held_bytes(limits.device)
        held = self.base_bytes + self.batch * start * memory.shape.kv_bytes_per_token
        position, end = self.num_cached + start, self.num_cached + self.prompt.num_tokens
        upper = limit = min(limits.chunk_size, self.prompt.num_tokens - start)
        if limits.budget_bytes is not None:
            room = {"batch": self.batch, "start": position}
            memory.require_room(**room, end=end, held_bytes=held, budget_bytes=limits.budget_bytes)
            limit = max(1, memory.largest_chunk(**room, free_bytes=limits.budget_bytes - held, upper=upper))
        if limit < upper:
            self.adjustments.append(
                f"the chunk at token {start} has {limit} tokens instead of {upper}, to stay within memory"
            )
        added = memory.added_bytes(batch=self.batch, chunk=limit, context=position + limit)
        self.predicted_bytes = held + added
        return limit

    def on_chunk(self, start: int, end: int, reason: str) -> None:
        now = time.perf_counter()
        self.chunks.append(ChunkRecord(start=start, end=end, ms=(now - self.chunk_started) * 1e3))
        self.chunk_started = now
        if reason == "whole-span" and end - start > self.limits.chunk_size:
            self.adjustments.append(f"tokens {start} to {end} belong together and were read in one chunk")
        if self.on_progress is not None:
            self.on_progress(self._progress(start, end, now - self.started))

    def _progress(self, start: int, end: int, elapsed_s: float) -> PrefillProgress:
        total = self.prompt.num_tokens
        per_s = end / elapsed_s if elapsed_s > 0 else 0.0
        return PrefillProgress(
            request_id=self.request_id,
            num_computed=self.num_cached + end,
            num_cached=self.num_cached,
            num_total=self.num_cached + total,
            num_total_estimate=self.num_cached + total,
            chunk_start=self.num_cached + start,
            chunk_end=self.num_cached + end,
            elapsed_s=elapsed_s,
            tokens_per_s=per_s,
            eta_s=(total - end) / per_s if per_s else 0.0,
            memory_bytes=held_bytes(self.limits.device),
            predicted_peak_bytes=self.predicted_bytes,
        )


def _cache_of(inputs: Mapping[str, Any]) -> tuple[str, Any]:
    """(its name, the object); None: the model makes one in its first chunk."""
    for name in CACHE_NAMES:
        if inputs.get(name) is not None:
            return name, inputs[name]
    if not inputs.get("use_cache", True):
        raise InvalidSetting(
            "generate was called with use_cache=False, and chunks need a cache. Leave it out, or detach the model."
        )
    return next((name for name in CACHE_NAMES if name in inputs), CACHE_NAMES[0]), None


def num_cached_tokens(inputs: Mapping[str, Any], cache: Any) -> int:
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask.shape[1] - num_tokens(inputs)
    try:
        return int(cache.get_seq_length()) if cache is not None else 0
    except ValueError:  # a cache of states alone does not count tokens
        return 0


def _batch_size(inputs: Mapping[str, Any]) -> int:
    tokens = inputs.get("input_ids")
    return (tokens if tokens is not None else inputs["inputs_embeds"]).shape[0]
