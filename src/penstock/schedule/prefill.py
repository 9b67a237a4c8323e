"""One prompt read step by step beside decodes that somebody else runs: the scheduler's rules for a single prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import PrefillPriority
from penstock.plan.chunks import ChunkedPrefillConfig, PrefillChunk, create_prefill_chunks
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
        self._chunks = create_prefill_chunks(tokens, config)
        self._num_tokens = len(tokens)
        self._num_committed_chunks = 0
        self._num_yields = 0
        self._is_in_flight = False

    def next_action(self) -> Action:
        if self.is_complete:
            return StartDecode()
        # Interleaving begins with a chunk: the prompt is never behind the decodes.
        begins = self.config.priority is PrefillPriority.INTERLEAVED and not self._num_committed_chunks
        if self.decode_available and not begins and self._num_yields < self._most_yields:
            self._num_yields += 1
            return YieldToDecode()
        self._is_in_flight = True
        return Prefill(self._chunks[self._num_committed_chunks])

    def commit(self) -> None:
        """The chunk last handed out was computed."""
        assert self._is_in_flight, "no chunk was handed out"
        self._num_committed_chunks += 1
        self._num_yields = 0
        self._is_in_flight = False

    @property
    def is_complete(self) -> bool:
        return self._num_committed_chunks == len(self._chunks)

    @property
    def progress(self) -> float:
        """Share of the tokens that were committed; 1.0 when there are none."""
        committed = self._chunks[: self._num_committed_chunks]
        return 1.0 if self.is_complete else (committed[-1].end_pos if committed else 0) / self._num_tokens

    @property
    def total_chunks(self) -> int:
        return len(self._chunks)

    @property
    def memory_savings(self) -> float:
        """Share of the activation memory that is saved: it grows with the chunk, not with the prompt."""
        if not self._num_tokens or self.config.chunk_size == 0:
            return 0.0
        return 1 - min(self.config.chunk_size, self._num_tokens) / self._num_tokens
