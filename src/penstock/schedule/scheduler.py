"""Decides what each step computes. The only place where a Sequence changes; sees no tensor."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache, chain_hash, root_hash
from penstock.errors import PromptTooLong
from penstock.plan.chunks import Stops, chunk_end
from penstock.request import Chunk, Request, Sequence, Status, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    block_size: int
    max_context: int
    max_running: int
    chunk_size: int  # prompt tokens of one step; 0: prompts are read whole
    overlap: int = 0


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A step while it is being put together; an older sequence may still take a younger one's place."""

    chunk_by_sequence: dict[int, Chunk] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    num_decodes: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunk_by_sequence.values())


# (first token of the step's largest chunk, resident tokens, wanted tokens) -> tokens that fit the memory budget
ChunkLimit = Callable[[int, int, int], int]
PeakEstimate = Callable[[int, int, int], int]


class Scheduler:
    """First come, first served: a step carries every decode and, within the chunk size, the oldest prompts' chunks."""

    def __init__(
        self,
        *,
        limits: Limits,
        pool: BlockPool,
        prefix: PrefixCache | None,
        model_identity: str,
        chunk_limit: ChunkLimit,
        peak_estimate: PeakEstimate,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.prefix = prefix
        self.model_identity = model_identity
        self.chunk_limit = chunk_limit
        self.peak_estimate = peak_estimate
        self.sequences: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # oldest first
        self.aborted: list[int] = []  # left since they were last collected
        self._plan: StepPlan | None = None
        self._num_steps = 0

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may hold."""
        return min(self.limits.max_context, self.pool.num_blocks * self.limits.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def submit(self, request: Request) -> Sequence:
        self.refuse_too_long(len(request.prompt))
        sequence = Sequence(
            request=request,
            tokens=list(request.prompt),
            num_prompt_tokens=len(request.prompt),
            prompt_is_complete=request.prompt_is_complete,
        )
        self.sequences[sequence.id] = sequence
        self.waiting.append(sequence)
        return sequence

    def extend_prompt(self, sequence_id: int, tokens: Tokens[int], *, is_last: bool) -> None:
        """More of a streamed prompt has been read."""
        sequence = self.sequences[sequence_id]
        assert not sequence.prompt_is_complete
        self.refuse_too_long(len(sequence.tokens) + len(tokens))
        sequence.tokens.extend(tokens)
        sequence.num_prompt_tokens = len(sequence.tokens)
        sequence.prompt_is_complete = is_last

    def abort(self, sequence_id: int) -> None:
        """Takes effect now, or when the chunk in flight is done. What was computed stays in the prefix cache."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return
        sequence.abort_requested = True
        if sequence.num_in_flight == 0:
            self._leave(sequence)
            self.aborted.append(sequence_id)

    def next_step(self) -> StepPlan | None:
        """The chunks of the next step, in flight from now on; None when nothing can run."""
        assert self._plan is None, "the last step was neither applied nor failed"
        draft = _Draft()
        for sequence in [s for s in self.running if not s.is_prefilling]:
            if sequence.status is Status.RUNNING:
                self._schedule(sequence, sequence.num_computed, sequence.num_computed + 1, draft)
        draft.num_decodes = len(draft.chunk_by_sequence)
        if not draft.preempted:
            draft.admitted = self._admit()
        for sequence in [s for s in self.running if s.is_prefilling]:
            if sequence.status is Status.RUNNING and (budget := self._prefill_budget(sequence, draft)) >= 1:
                self._schedule_prompt(sequence, budget, draft)
        if not draft.chunk_by_sequence:
            return None
        self._num_steps += 1
        chunks = tuple(draft.chunk_by_sequence.values())
        self._plan = StepPlan(
            step=self._num_steps,
            chunks=chunks,
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            waiting=len(self.waiting),
            token_budget=self.limits.chunk_size,
            predicted_bytes=self.peak_estimate(
                draft.num_tokens, max(chunk.end for chunk in chunks), self.resident_tokens
            ),
            reason="first come, first served",
        )
        return self._plan

    def apply(self, result: StepResult) -> None:
        """In-flight tokens become computed ones; sampled tokens are appended; ended sequences leave."""
        plan = self._take_plan(result.step)
        for chunk in plan.chunks:
            sequence = self.sequences[chunk.sequence_id]
            sequence.num_computed = chunk.end
            sequence.num_in_flight = 0
            self._remember_blocks(sequence)
            if sequence.abort_requested:
                self._leave(sequence)
                self.aborted.append(sequence.id)
                continue
            if sequence.id in result.token_by_sequence:
                sequence.tokens.append(result.token_by_sequence[sequence.id])
            if sequence.id in result.finished:
                self._leave(sequence)

    def fail(self, step: int) -> None:
        """The step did not happen: every sequence stands where it stood, and its chunk is handed out again."""
        for chunk in self._take_plan(step).chunks:
            sequence = self.sequences[chunk.sequence_id]
            sequence.num_in_flight = 0
            if sequence.abort_requested:
                self._leave(sequence)
                self.aborted.append(sequence.id)

    def take_aborted(self) -> list[int]:
        aborted, self.aborted = self.aborted, []
        return aborted

    @property
    def resident_tokens(self) -> int:
        return self.pool.high_water * self.limits.block_size

    def check(self) -> None:
        """Integrity of the pool: every block is owned exactly as often as it is counted."""
        self.pool.check(block for sequence in self.sequences.values() for block in sequence.block_ids)

    def refuse_too_long(self, num_tokens: int) -> None:
        if num_tokens >= self.limits.max_context:
            raise PromptTooLong(
                f"The prompt has {num_tokens} tokens or more; the context holds {self.limits.max_context} with the "
                "answer. Shorten it or, to go past what the model was trained for, raise --context."
            )
        if num_tokens >= self.capacity:
            raise PromptTooLong(
                f"The prompt has {num_tokens} tokens or more; the memory budget holds the keys and values of "
                f"{self.capacity}. Shorten it or raise --memory."
            )

    def _admit(self) -> list[int]:
        admitted: list[int] = []
        while self.waiting and len(self.running) < self.limits.max_running and self.pool.num_available > 0:
            sequence = self.waiting[0]
            if sequence.num_known == 0:
                break
            del self.waiting[0]
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.id)
            admitted.append(sequence.id)
        return admitted

    def _prefill_budget(self, sequence: Sequence, draft: _Draft) -> int:
        """Tokens left for this prompt by the chunk size and by the memory budget."""
        num_prefill = draft.num_tokens - draft.num_decodes
        wanted = sequence.num_known if self.limits.chunk_size == 0 else self.limits.chunk_size - num_prefill
        if wanted < 1:
            return 0
        allowed = self.chunk_limit(sequence.num_computed, self.resident_tokens, wanted + draft.num_tokens)
        # One token always advances: the pool was sized so that the smallest chunk fits.
        return max(allowed - draft.num_tokens, 0 if draft.chunk_by_sequence else 1)

    def _schedule_prompt(self, sequence: Sequence, budget: int, draft: _Draft) -> None:
        self._take_prefix_hits(sequence)
        if sequence.num_computed >= sequence.num_known:
            return
        start = self._overlapped_start(sequence)
        # The overlap is part of the chunk, but a chunk always reaches new tokens.
        budget = max(budget, sequence.num_computed - start + 1)
        end = chunk_end(start, budget, Stops(end=sequence.num_known)).position
        self._schedule(sequence, start, end, draft)

    def _schedule(self, sequence: Sequence, start: int, end: int, draft: _Draft) -> None:
        if not self._allocate(sequence, end, draft):
            return
        sequence.num_in_flight = end - sequence.num_computed
        wants_logits = sequence.prompt_is_complete and end == len(sequence.tokens)
        draft.chunk_by_sequence[sequence.id] = Chunk(
            sequence_id=sequence.id,
            start=start,
            end=end,
            wants_logits=wants_logits,
            num_cached=sequence.num_cached,
            num_prompt_tokens=sequence.num_prompt_tokens if sequence.prompt_is_complete else None,
        )

    def _overlapped_start(self, sequence: Sequence) -> int:
        """Goes back over tokens this sequence computed itself, never into a block that another shares."""
        start = max(0, sequence.num_cached, sequence.num_computed - self.limits.overlap)
        for index in range(sequence.num_computed // self.limits.block_size, start // self.limits.block_size - 1, -1):
            if index < len(sequence.block_ids) and self.pool.holders(sequence.block_ids[index]) > 1:
                return max(start, (index + 1) * self.limits.block_size)
        return min(start, sequence.num_computed)

    def _take_prefix_hits(self, sequence: Sequence) -> None:
        """While the sequence stands on a block border and somebody computed its next block, takes that block."""
        if self.prefix is None or sequence.request.sampling.prompt_logprobs is not None:
            return
        block_size = self.limits.block_size
        # At least one prompt token is computed, because its logits are wanted.
        last = (sequence.num_known - 1 if sequence.prompt_is_complete else sequence.num_known) // block_size
        while sequence.num_computed == len(sequence.block_ids) * block_size and len(sequence.block_ids) < last:
            index = len(sequence.block_ids)
            block = self.prefix.take(self._block_hash(sequence, index))
            if block is None:
                return
            sequence.block_ids.append(block)
            sequence.num_computed += block_size
            sequence.num_cached += block_size
            self.prefix.num_hit_tokens += block_size

    def _remember_blocks(self, sequence: Sequence) -> None:
        if self.prefix is None:
            return
        for index in range(len(sequence.block_hashes), sequence.num_computed // self.limits.block_size):
            self._block_hash(sequence, index)
        first_new = sequence.num_cached // self.limits.block_size
        for index in range(first_new, sequence.num_computed // self.limits.block_size):
            self.prefix.put(sequence.block_hashes[index], sequence.block_ids[index])

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """The chained hash of block `index`, extending the sequence's own list of them."""
        hashes, block_size = sequence.block_hashes, self.limits.block_size
        while len(hashes) <= index:
            previous = hashes[-1] if hashes else root_hash(self.model_identity, sequence.request.rotary)
            start = len(hashes) * block_size
            hashes.append(chain_hash(previous, sequence.tokens[start : start + block_size]))
        return hashes[index]

    def _allocate(self, sequence: Sequence, num_tokens: int, draft: _Draft) -> bool:
        """Blocks for `num_tokens`, taken from the youngest when none is left. False: this one was the youngest."""
        while len(sequence.block_ids) * self.limits.block_size < num_tokens:
            after = sequence.block_ids[-1] if sequence.block_ids else None
            block = self.pool.allocate(after=after)
            if block is not None:
                sequence.block_ids.append(block)
                continue
            victim = max(self.running, key=lambda s: s.id)
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        """Back to the queue; its computed blocks stay in the prefix cache as long as nobody needs them."""
        draft.chunk_by_sequence.pop(sequence.id, None)
        draft.preempted.append(sequence.id)
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = sequence.num_in_flight = sequence.num_cached = 0
        sequence.status = Status.WAITING
        self.running.remove(sequence)
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.id)

    def _leave(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.status = Status.FINISHED
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        del self.sequences[sequence.id]

    def _take_plan(self, step: int) -> StepPlan:
        plan, self._plan = self._plan, None
        assert plan is not None, "no step is in flight"
        assert plan.step == step, f"step {step} is not the one in flight ({plan.step})"
        return plan
