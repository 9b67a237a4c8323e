"""A step while it is being put together, and once it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.request import Chunk, StepPlan
from penstock.schedule.budget import StepLoad


@dataclass(slots=True, kw_only=True)
class Draft:
    """A step while it is being put together; an older sequence may still take a younger one's place."""

    chunk_by_sequence: dict[int, Chunk] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    claimed: set[bytes] = field(default_factory=set)  # hashes of the blocks that the step computes
    claimed_before: frozenset[bytes] = frozenset()  # of those that the step in flight computes
    num_streams: int = 0  # running sequences that have been read, whether or not they get a token
    load: StepLoad = field(default_factory=StepLoad)
    longest_before: int = 0  # tokens before a chunk of it, or of one that was removed
    num_swept: int = 0  # tokens that are between two layers, whether or not the step takes them further

    def is_claimed(self, block_hash: bytes | None) -> bool:
        return block_hash in self.claimed or block_hash in self.claimed_before

    @property
    def num_rows(self) -> int:
        """Counts the tokens whose hidden states are there at once."""
        return self.num_swept + sum(c.num_tokens for c in self.chunk_by_sequence.values() if c.layers is None)

    def add(self, chunk: Chunk) -> None:
        self.load.count(chunk)
        self.num_swept = chunk.num_tokens if chunk.layers is not None else self.num_swept
        self.longest_before = max(self.longest_before, chunk.num_before)
        self.chunk_by_sequence[chunk.sequence_id] = chunk

    def remove(self, sequence_id: int) -> Chunk | None:
        chunk = self.chunk_by_sequence.pop(sequence_id, None)
        if chunk is not None:
            self.load.count(chunk, -1)
        return chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that runs: its plan, and what the next one must know of it."""

    plan: StepPlan
    load: StepLoad
    claimed: frozenset[bytes]
