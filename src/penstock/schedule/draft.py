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
    num_decodes: int = 0
    num_prompt_tokens: int = 0
    token_contexts: int = 0
    decode_contexts: int = 0
    chunk_contexts: int = 0
    longest_before: int = 0  # tokens before a chunk of it, or of one that was removed

    @property
    def load(self) -> StepLoad:
        return StepLoad(
            num_tokens=self.num_decodes + self.num_prompt_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            token_contexts=self.token_contexts,
            decode_contexts=self.decode_contexts,
            chunk_contexts=self.chunk_contexts,
        )

    def is_claimed(self, block_hash: bytes | None) -> bool:
        return block_hash in self.claimed or block_hash in self.claimed_before

    def add(self, chunk: Chunk) -> None:
        self._count(chunk, 1)
        self.longest_before = max(self.longest_before, chunk.num_before)
        self.chunk_by_sequence[chunk.sequence_id] = chunk

    def remove(self, sequence_id: int) -> Chunk | None:
        chunk = self.chunk_by_sequence.pop(sequence_id, None)
        if chunk is not None:
            self._count(chunk, -1)
        return chunk

    def _count(self, chunk: Chunk, sign: int) -> None:
        num_tokens = chunk.end - chunk.start
        if chunk.is_prompt or num_tokens > 1:
            self.num_prompt_tokens += sign * num_tokens
            self.token_contexts += sign * (num_tokens * chunk.num_before + num_tokens * num_tokens // 2)
            self.chunk_contexts += sign * chunk.num_before
        else:
            self.num_decodes += sign
            self.decode_contexts += sign * (chunk.num_before + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that runs: its plan, and what the next one must know of it."""

    plan: StepPlan
    load: StepLoad
    num_prompt_tokens: int
    claimed: frozenset[bytes]
