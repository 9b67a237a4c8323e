"""Decides where a chunk may end: one pure function over stops, and the single-prompt vocabulary built on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.config import PrefillPriority
from penstock.errors import InvalidSetting
from penstock.request import Span

StopReason = Literal["end", "budget", "boundary", "before-span", "whole-span"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """What limits a chunk besides the budget. Build `atomic` with `merge_spans`."""

    end: int  # of the tokens known so far
    is_open: bool = False  # more will follow them, so that their end is no reason to end between boundaries
    boundary: int = 1  # preferred: end on a multiple of this (blocks, state checkpoints)
    forks: tuple[int, ...] = ()  # places where a state is to be saved, in order
    atomic: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEnd:
    position: int
    reason: StopReason


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Transitively overlapping spans become one; touching ones stay apart."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if merged and span.start < merged[-1].end:
            merged[-1] = Span(start=merged[-1].start, end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return tuple(merged)


def chunk_end(start: int, budget: int, stops: Stops) -> ChunkEnd:
    """The earliest mandatory stop after `start`. Always advances: a span over the budget is taken whole."""
    assert budget >= 1, f"a chunk needs a budget of at least 1, got {budget}"
    assert start < stops.end, f"nothing to compute at {start} of {stops.end}"
    end = min(start + budget, stops.end)
    reason: StopReason = "end" if end == stops.end and not stops.is_open else "budget"
    if reason == "budget" and (aligned := end // stops.boundary * stops.boundary) > start and aligned != end:
        end, reason = aligned, "boundary"
    if fork := next((fork for fork in stops.forks if start < fork < end), 0):
        end, reason = fork, "boundary"
    for span in stops.atomic:
        if not span.start < end < span.end:
            continue
        if span.start > start:
            return ChunkEnd(position=span.start, reason="before-span")
        return ChunkEnd(position=min(span.end, stops.end), reason="whole-span")
    return ChunkEnd(position=end, reason=reason)


def uncut_end(end: int, stops: Stops) -> int:
    """`end`, or the start of the span that it would cut."""
    return next((span.start for span in stops.atomic if span.start < end < span.end), end)


@dataclass(frozen=True, slots=True)
class ChunkedPrefillConfig:
    """How one prompt is cut. `with_overlap` and `with_priority` return a changed copy."""

    chunk_size: int = 512  # 0: the prompt is read whole
    overlap: int = 0
    priority: PrefillPriority = PrefillPriority.PREFILL_FIRST

    def __post_init__(self) -> None:
        if self.chunk_size < 0:
            raise InvalidSetting(f"Chunk size is {self.chunk_size}; it must be 0 (whole prompt), 1 or more.")
        if self.overlap < 0 or (self.chunk_size and self.overlap >= self.chunk_size):
            raise InvalidSetting(
                f"Overlap is {self.overlap}, chunk size {self.chunk_size}; the overlap must be 0 to chunk size - 1."
            )

    def with_overlap(self, overlap: int) -> ChunkedPrefillConfig:
        return replace(self, overlap=overlap)

    def with_priority(self, priority: PrefillPriority) -> ChunkedPrefillConfig:
        return replace(self, priority=priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens [start_pos, end_pos) of the prompt; the first `overlap` of a later chunk are computed again in place."""

    tokens: tuple[int, ...]
    start_pos: int
    end_pos: int
    chunk_index: int
    is_last: bool


def create_prefill_chunks(tokens: Sequence[int], config: ChunkedPrefillConfig) -> list[PrefillChunk]:
    """All chunks of a prompt; none for an empty one."""
    chunks: list[PrefillChunk] = []
    num_computed, stops = 0, Stops(end=len(tokens))
    while num_computed < len(tokens):
        start = max(0, num_computed - config.overlap)
        end = chunk_end(start, config.chunk_size or len(tokens), stops).position
        chunks.append(
            PrefillChunk(
                tokens=tuple(tokens[start:end]),
                start_pos=start,
                end_pos=end,
                chunk_index=len(chunks),
                is_last=end == len(tokens),
            )
        )
        num_computed = end
    return chunks


def last_chunks(num_tokens: int, chunk_size: int) -> list[tuple[int, int]]:
    """Lists (size, end) of the last full chunk and of what is left behind it: one of them has the prompt's peak."""
    num_left = num_tokens % chunk_size
    chunks = (chunk_size, num_tokens - num_left), (num_left, num_tokens)
    return [(size, end) for size, end in chunks if size and end]


def num_chunks(num_tokens: int, config: ChunkedPrefillConfig) -> int:
    if num_tokens == 0:
        return 0
    if config.chunk_size == 0 or num_tokens <= config.chunk_size:
        return 1
    return 1 + -(-(num_tokens - config.chunk_size) // (config.chunk_size - config.overlap))
