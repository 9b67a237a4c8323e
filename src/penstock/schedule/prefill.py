"""One prompt read step by step beside decodes that somebody else runs: the scheduler's rules for a single prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import PrefillPriority
from penstock.plan.chunks import ChunkedPrefillConfig, PrefillChunk, next_chunk, num_chunks
from penstock.schedule.budget import POLICIES


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute this chunk, then `commit`."""

    chunk: PrefillChunk


@dataclass(frozen=True, slots=True)
class YieldToDecode:
    """Run one decode step of the caller's."""


@dataclass(frozen=True, slots=True)
class StartDecode:
    """The whole prompt is read."""


Action = Prefill | YieldToDecode | StartDecode


class PrefillScheduler:
    """Hands out chunks with `next_action` and counts them with `commit`: a chunk not committed is handed out again.

    `decode_available` is the caller's: whether a decode waits for a turn now.
    """

    def __init__(self, tokens: Sequence[int], config: ChunkedPrefillConfig) -> None:
        self.config = config
        self.decode_available = False
        self._most_yields = POLICIES[config.priority].decode_turns_between_chunks
        self._tokens = tuple(tokens)
        self._num_computed = 0
        self._num_committed_chunks = 0
        self._num_yields = 0
        self._in_flight: PrefillChunk | None = None

    def next_action(self) -> Action:
        if self.is_complete:
            return StartDecode()
        # Interleaving begins with a chunk: the prompt is never behind the decodes.
        begins = self.config.priority is PrefillPriority.INTERLEAVED and not self._num_committed_chunks
        if self.decode_available and not begins and self._num_yields < self._most_yields:
            self._num_yields += 1
            return YieldToDecode()
        start, end = next_chunk(self._num_computed, len(self._tokens), self.config)
        self._in_flight = PrefillChunk(
            tokens=self._tokens[start:end],
            start_pos=start,
            end_pos=end,
            chunk_index=self._num_committed_chunks,
            is_last=end == len(self._tokens),
        )
        return Prefill(self._in_flight)

    def commit(self) -> None:
        """The chunk last handed out was computed."""
        assert self._in_flight is not None, "no chunk was handed out"
        self._num_computed = self._in_flight.end_pos
        self._num_committed_chunks += 1
        self._num_yields = 0
        self._in_flight = None

    @property
    def is_complete(self) -> bool:
        return self._num_computed == len(self._tokens)

    @property
    def progress(self) -> float:
        """Share of the tokens that were committed; 1.0 when there are none."""
        return self._num_computed / len(self._tokens) if self._tokens else 1.0

    @property
    def total_chunks(self) -> int:
        return num_chunks(len(self._tokens), self.config)

    @property
    def memory_savings(self) -> float:
        """Share of the activation memory that is saved: it grows with the chunk, not with the prompt."""
        if not self._tokens or self.config.chunk_size == 0:
            return 0.0
        return 1 - min(self.config.chunk_size, len(self._tokens)) / len(self._tokens)
