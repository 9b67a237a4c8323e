"""Decides what each step computes. The only place where a Sequence changes; sees no tensor."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.cache.states import StatePool
from penstock.config import PrefillPriority
from penstock.errors import PromptTooLong, QueueFull
from penstock.plan.chunks import Stops, chunk_end, uncut_end
from penstock.request import Chunk, FinishReason, Request, Sequence, Span, Status, StepPlan, StepResult
from penstock.schedule.budget import POLICIES, STRETCH_WITHOUT_DECODES, StepLoad, TokenBudget
from penstock.schedule.holdings import Holdings

# A prompt is served before a shorter one once this many times its length was read of others while it waited.
AGEING = 4
# The rate behind a retry hint until prompts have been read.
FIRST_GUESS_TOKENS_PER_S = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    block_size: int
    max_context: int
    max_running: int
    overlap: int = 0
    priority: PrefillPriority = PrefillPriority.INTERLEAVED
    max_waiting: int | None = None  # requests in the queue; None: no limit
    max_waiting_tokens: int | None = None
    reads_whole: bool = False  # the lane cannot continue a prompt: it is one chunk, whatever the budget says


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A step while it is being put together; an older sequence may still take a younger one's place."""

    chunk_by_sequence: dict[int, Chunk] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    claimed: set[bytes] = field(default_factory=set)  # hashes of the blocks that the step computes
    num_streams: int = 0  # running sequences that have been read, whether or not they get a token
    num_decodes: int = 0
    num_prompt_tokens: int = 0
    token_contexts: int = 0
    decode_contexts: int = 0

    @property
    def load(self) -> StepLoad:
        return StepLoad(
            num_tokens=self.num_decodes + self.num_prompt_tokens,
            token_contexts=self.token_contexts,
            decode_contexts=self.decode_contexts,
        )

    def add(self, chunk: Chunk) -> None:
        self._count(chunk, 1)
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
        else:
            self.num_decodes += sign
            self.decode_contexts += sign * (chunk.num_before + 1)


# (first token of the step's largest chunk, resident tokens, wanted tokens) -> tokens that fit the memory budget
ChunkLimit = Callable[[int, int, int], int]
# (tokens of the step, longest context, resident tokens) -> bytes of the whole process
PeakEstimate = Callable[[int, int, int], int]


class Scheduler:
    """Mixed steps of decodes and prompt chunks under one token budget, shared as the priority says.

    Prompts are read shortest remaining first, and age: what was read of others while one waits shortens it.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        budget: TokenBudget,
        pool: BlockPool,
        prefix: PrefixCache | None,
        model_identity: str,
        chunk_limit: ChunkLimit,
        peak_estimate: PeakEstimate,
        states: StatePool | None = None,
    ) -> None:
        self.limits = limits
        self.policy = POLICIES[limits.priority]
        self.budget = budget
        self.pool = pool
        self.prefix = prefix
        self.holdings = Holdings(
            block_size=limits.block_size, pool=pool, prefix=prefix, states=states, model_identity=model_identity
        )
        self.chunk_limit = chunk_limit
        self.peak_estimate = peak_estimate
        self.sequences: dict[int, Sequence] = {}
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._ended: list[tuple[int, FinishReason]] = []
        self._plan: StepPlan | None = None
        self._load = StepLoad()
        self._num_steps = 0
        self._num_read = 0  # prompt tokens computed so far, of all sequences
        self._tokens_per_s = FIRST_GUESS_TOKENS_PER_S
        self._steps_without_decode = 0
        self._steps_without_prefill = 0

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may hold."""
        return min(self.limits.max_context, self.pool.num_blocks * self.limits.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    @property
    def _boundary(self) -> int:
        """Chunks of models with recurrent state prefer to end with a block, where the state can be saved."""
        states = self.holdings.states
        return 1 if states is None or not states.num_checkpoints else self.limits.block_size

    @property
    def resident_tokens(self) -> int:
        return self.pool.high_water * self.limits.block_size

    # --- what may happen between steps ---

    def submit(self, request: Request) -> Sequence:
        self.refuse_too_long(request.num_slots(len(request.prompt)))
        self._refuse_full_queue(request.num_slots(len(request.prompt)))
        sequence = Sequence(
            request=request,
            tokens=list(request.prompt),
            num_prompt_tokens=len(request.prompt),
            prompt_is_complete=request.prompt_is_complete,
            joined_at=self._num_read,
        )
        self.sequences[sequence.id] = self.waiting[sequence.id] = sequence
        return sequence

    def extend_prompt(self, sequence_id: int, tokens: Tokens[int], *, is_last: bool) -> None:
        """More of a streamed prompt has been read."""
        sequence = self.sequences[sequence_id]
        assert not sequence.prompt_is_complete
        self.refuse_too_long(len(sequence.tokens) + len(tokens))
        sequence.tokens.extend(tokens)
        sequence.num_prompt_tokens = len(sequence.tokens)
        sequence.prompt_is_complete = is_last

    def abort(self, sequence_id: int, reason: FinishReason = "abort") -> None:
        """Takes effect now, or when the chunk in flight is done. What was computed stays in the prefix cache."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return
        sequence.abort_reason = reason
        if sequence.num_in_flight == 0:
            self._leave(sequence)

    def expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        for sequence in list(self.sequences.values()):
            deadline = sequence.request.deadline_at
            if deadline is not None and now >= deadline:
                self.abort(sequence.id, "deadline")

    def pause(self, sequence_id: int, *, is_paused: bool) -> None:
        """A paused sequence gets no chunks; it keeps its blocks until somebody needs them."""
        if sequence := self.sequences.get(sequence_id):
            sequence.is_paused = is_paused

    def set_priority(self, priority: PrefillPriority) -> None:
        self.limits = replace(self.limits, priority=priority)
        self.policy = POLICIES[priority]

    def take_ended(self) -> list[tuple[int, FinishReason]]:
        """Requests that left without a last token since this was last asked, and why."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Integrity of the pools: everything is owned exactly as often as it is counted."""
        self.holdings.check(self.sequences.values())

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

    # --- a step: plan, run, commit ---

    def next_step(self) -> StepPlan | None:
        """The chunks of the next step, in flight from now on; None when nothing can run."""
        assert self._plan is None, "the last step was neither applied nor failed"
        streams, reading = self._split_running()
        draft = _Draft(num_streams=len(streams))
        decodes = [s for s in streams if not s.is_paused]
        prompts = self._prompts_in_order(reading)
        policy = self.policy
        is_overdue = self._steps_without_decode >= policy.most_steps_without_decode
        if policy.decodes_beside_prompts or not prompts or is_overdue:
            self._schedule_decodes(decodes, draft)
        if prompts and not draft.preempted:
            self._schedule_prompts(prompts, bool(decodes), draft)
        if decodes and not draft.chunk_by_sequence:
            self._schedule_decodes(decodes, draft)  # every prompt waits for something else
        if prompts and draft.preempted and not draft.chunk_by_sequence:
            self._schedule_prompts(prompts, False, draft)  # every decode lost its place
        if prompts and not draft.chunk_by_sequence:
            self._schedule_oldest(prompts, draft)
        self._steps_without_decode = self._steps_without_decode + 1 if decodes and not draft.num_decodes else 0
        self._steps_without_prefill = self._steps_without_prefill + 1 if prompts and not draft.num_prompt_tokens else 0
        self._num_steps += 1
        return self._commit_to(draft) if draft.chunk_by_sequence else None

    def apply(self, result: StepResult) -> None:
        """In-flight tokens become computed ones; sampled tokens are appended; ended sequences leave."""
        plan = self._take_plan(result.step)
        block_size = self.limits.block_size
        self._observe(plan, result.elapsed_s)
        for chunk in plan.chunks:
            sequence = self.sequences[chunk.sequence_id]
            if chunk.is_prompt:
                num_new = chunk.end - sequence.num_computed
                sequence.num_read += num_new
                self._num_read += num_new
            sequence.num_computed = chunk.end
            sequence.num_in_flight = 0
            if chunk.end // block_size > sequence.num_remembered:
                self.holdings.remember(sequence)
            if chunk.state is not None:
                self.holdings.commit_state(sequence, chunk)
            if sequence.abort_reason is not None:
                self._leave(sequence)
                continue
            token = result.token_by_sequence.get(sequence.id)
            if token is not None:
                sequence.tokens.append(token)
            if sequence.id in result.finished:
                self._leave(sequence)

    def fail(self, step: int) -> None:
        """The step did not happen: every sequence stands where it stood, and its chunk is handed out again.

        Recurrent state may have advanced in some layers, so such a sequence goes back to its last checkpoint.
        """
        for chunk in self._take_plan(step).chunks:
            sequence = self.sequences[chunk.sequence_id]
            sequence.num_in_flight = 0
            if chunk.state is not None:
                self.holdings.forgo_state(chunk)
                self.holdings.start_over(sequence)
            if sequence.abort_reason is not None:
                self._leave(sequence)

    def _commit_to(self, draft: _Draft) -> StepPlan:
        self._load = draft.load
        chunks = tuple(draft.chunk_by_sequence.values())
        self._plan = StepPlan(
            step=self._num_steps,
            chunks=chunks,
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            waiting=len(self.waiting),
            token_budget=self.budget.ceiling,
            predicted_s=self.budget.predict(self._load),
            predicted_bytes=self.peak_estimate(
                self._load.num_tokens,
                max(self._num_slots(chunk) for chunk in chunks),
                self.resident_tokens,
            ),
            reason=f"{self.limits.priority.value}: {draft.num_decodes} decodes, {draft.num_prompt_tokens} of prompts",
        )
        return self._plan

    def _num_slots(self, chunk: Chunk) -> int:
        if chunk.num_slots_before is None:
            return chunk.end
        return self.sequences[chunk.sequence_id].request.num_slots(chunk.end)

    # --- who is served ---

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """(those that write, those that are still being read)."""
        streams: list[Sequence] = []
        reading: list[Sequence] = []
        for sequence in self.running.values():
            (reading if sequence.is_prefilling else streams).append(sequence)
        return streams, reading

    def _prompts_in_order(self, reading: list[Sequence]) -> list[Sequence]:
        """Prompts with tokens to compute: by priority, then shortest remaining, aged by what others were given."""
        prompts = (*reading, *self.waiting.values())
        ready = [s for s in prompts if not s.is_paused and s.num_computed < s.num_known]
        if self.limits.reads_whole:
            ready = [s for s in ready if s.prompt_is_complete]
        return sorted(ready, key=self._rank) if len(ready) > 1 else ready

    def _rank(self, sequence: Sequence) -> tuple[int, float, int]:
        # The length of a stream is unknown: it counts as long as it may become.
        length = sequence.num_prompt_tokens if sequence.prompt_is_complete else self.capacity
        num_read_of_others = self._num_read - sequence.joined_at - sequence.num_read
        return (sequence.request.priority, length - sequence.num_computed - AGEING * num_read_of_others, sequence.id)

    def _schedule_decodes(self, decodes: list[Sequence], draft: _Draft) -> None:
        for sequence in decodes:
            if sequence.status is Status.RUNNING and sequence.num_in_flight == 0:
                self._schedule(sequence, sequence.num_computed, sequence.num_computed + 1, draft)

    def _schedule_prompts(self, prompts: list[Sequence], has_decodes: bool, draft: _Draft) -> None:
        for sequence in prompts:
            if sequence.status is Status.FINISHED or sequence.id in draft.preempted:
                continue
            if sequence.status is Status.WAITING:
                # Only what runs holds blocks, so that what holds blocks can be preempted.
                if self._prompt_budget(sequence, has_decodes, draft) < 1:
                    break
                if not self._admit(sequence, draft):
                    continue
            self.holdings.take_hits(sequence)
            if draft.claimed and self.holdings.next_block(sequence) in draft.claimed:
                continue  # a chunk of this step computes it: it will be a hit next time
            num_tokens = self._prompt_budget(sequence, has_decodes, draft)
            if num_tokens < 1:
                break
            start = self.holdings.overlapped_start(sequence, self.limits.overlap)
            # The overlap is part of the chunk, but a chunk always reaches new tokens.
            num_tokens = max(num_tokens, sequence.num_computed - start + 1)
            stops = self._stops(sequence)
            end = chunk_end(start, num_tokens, stops).position
            if end - start > num_tokens and draft.num_prompt_tokens:
                continue  # a span over the budget has a step to itself, beside decodes at most
            end = uncut_end(min(end, self._end_without_preemption(sequence, draft)), stops)
            if end > sequence.num_computed:
                self._schedule(sequence, start, end, draft)

    def _stops(self, sequence: Sequence) -> Stops:
        atomic = sequence.request.atomic_spans
        if self.limits.reads_whole:
            atomic = (Span(start=0, end=sequence.num_known),)
        return Stops(end=sequence.num_known, boundary=self._boundary, atomic=atomic)

    def _schedule_oldest(self, prompts: list[Sequence], draft: _Draft) -> None:
        """Prompts hold all blocks and none can go on: the first in rank takes them from the others."""
        oldest = min(prompts, key=lambda s: (s.request.priority, s.id))
        if oldest.status is Status.WAITING:
            self._preempt_last(draft)
            if not self._admit(oldest, draft):
                return
        self.holdings.take_hits(oldest)
        if oldest.num_computed == oldest.num_known:
            return
        stops = replace(self._stops(oldest), boundary=1)
        end = chunk_end(oldest.num_computed, self.limits.block_size, stops).position
        self._schedule(oldest, oldest.num_computed, end, draft)

    def _end_without_preemption(self, sequence: Sequence, draft: _Draft) -> int:
        """How far the blocks reach that nobody holds, less one for each running stream's next token."""
        num_reserved = draft.num_streams - draft.num_decodes
        num_blocks = len(sequence.block_ids) + max(0, self.pool.num_available - max(0, num_reserved))
        return sequence.request.num_reached(num_blocks * self.limits.block_size)

    def _prompt_budget(self, sequence: Sequence, has_decodes: bool, draft: _Draft) -> int:
        """Tokens left for this prompt by the token budget, the latency target and the memory."""
        wanted = sequence.num_known - sequence.num_computed + self.limits.overlap
        num_slots = sequence.request.num_slots(sequence.num_computed)
        own = sequence.request.chunk_size
        if own:
            wanted = min(wanted, own)
        if ceiling := self.budget.ceiling_of(own):
            wanted = min(wanted, ceiling - draft.num_prompt_tokens)
        if has_decodes and self.policy.decodes_beside_prompts:
            wanted = self._shared_with_decodes(sequence, wanted, draft)
        elif self.policy.decodes_beside_prompts and not draft.num_prompt_tokens:
            allowed = self.budget.allowance(draft.load, num_slots, wanted, STRETCH_WITHOUT_DECODES, chunk_size=own)
            wanted = max(allowed, min(wanted, self.budget.floor))
        if wanted < 1:
            return 0
        num_scheduled = draft.num_decodes + draft.num_prompt_tokens
        allowed = self.chunk_limit(num_slots, self.resident_tokens, wanted + num_scheduled)
        # One token always advances: the pool was sized so that the smallest chunk fits.
        return max(allowed - num_scheduled, 0 if draft.chunk_by_sequence else 1)

    def _shared_with_decodes(self, sequence: Sequence, wanted: int, draft: _Draft) -> int:
        policy, budget = self.policy, self.budget
        allowed = 0
        if budget.target_s is not None or policy.fills_without_target:
            num_slots = sequence.request.num_slots(sequence.num_computed)
            allowed = budget.allowance(draft.load, num_slots, wanted, chunk_size=sequence.request.chunk_size)
        is_overdue = self._steps_without_prefill >= policy.most_steps_without_prefill
        is_first = draft.num_prompt_tokens == 0
        if is_first and policy.has_floor:
            return max(allowed, min(wanted, budget.floor))
        if is_first and is_overdue:
            return max(allowed, min(wanted, budget.overdue))
        return allowed

    def _admit(self, sequence: Sequence, draft: _Draft) -> bool:
        if len(self.running) >= self.limits.max_running or self.pool.num_available == 0:
            return False
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        self.holdings.admit(sequence)
        sequence.status = Status.RUNNING
        draft.admitted.append(sequence.id)
        return True

    def _schedule(self, sequence: Sequence, start: int, end: int, draft: _Draft) -> None:
        request = sequence.request
        num_slots = end if request.source is None else request.num_slots(end)
        is_held = len(sequence.block_ids) * self.limits.block_size >= num_slots
        if not is_held and not self._allocate(sequence, num_slots, draft):
            return
        sequence.num_in_flight = end - sequence.num_computed
        chunk = Chunk(
            sequence_id=request.id,
            start=start,
            end=end,
            wants_logits=sequence.prompt_is_complete and end == len(sequence.tokens),
            num_cached=sequence.num_cached,
            num_prompt_tokens=sequence.num_prompt_tokens if sequence.prompt_is_complete else None,
            state=None if self.holdings.states is None else self.holdings.state_use(sequence, end),
            num_slots_before=None if request.source is None else request.num_slots(start),
        )
        draft.add(chunk)
        if chunk.is_prompt:
            draft.claimed.update(self.holdings.blocks_between(sequence, start, end))

    # --- blocks ---

    def _allocate(self, sequence: Sequence, num_tokens: int, draft: _Draft) -> bool:
        """Blocks for `num_tokens`, taken from the last in rank when none is left. False: this one was the last."""
        while not self.holdings.grow(sequence, num_tokens):
            if self._preempt_last(draft) is sequence:
                return False
        return True

    def _preempt_last(self, draft: _Draft) -> Sequence | None:
        if not self.running:
            return None
        victim = max(self.running.values(), key=lambda s: (s.is_paused, s.request.priority, s.id))
        self._preempt(victim, draft)
        return victim

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        """Back to the queue; its computed blocks stay in the prefix cache as long as nobody needs them."""
        if chunk := draft.remove(sequence.id):
            self.holdings.forgo_state(chunk)
        draft.preempted.append(sequence.id)
        self.num_preemptions += 1
        self.holdings.start_over(sequence)
        self.holdings.release(sequence)
        sequence.num_in_flight = 0
        sequence.status = Status.WAITING
        del self.running[sequence.id]
        self.waiting[sequence.id] = sequence

    def _leave(self, sequence: Sequence) -> None:
        self.holdings.release(sequence)
        sequence.status = Status.FINISHED
        (self.running if sequence.id in self.running else self.waiting).pop(sequence.id)
        del self.sequences[sequence.id]
        if sequence.abort_reason is not None:
            self._ended.append((sequence.id, sequence.abort_reason))

    # --- limits and costs ---

    def _refuse_full_queue(self, num_tokens: int) -> None:
        limits = self.limits
        queued = sum(s.request.num_slots(s.num_prompt_tokens) for s in self.waiting.values())
        unread = sum(max(0, s.num_prompt_tokens - s.num_computed) for s in self.sequences.values())
        retry_after_s = max(1.0, unread / self._tokens_per_s)
        if limits.max_waiting is not None and len(self.waiting) >= limits.max_waiting:
            raise QueueFull(
                f"{len(self.waiting)} requests wait, the limit is {limits.max_waiting}. "
                f"Try again in {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            )
        if limits.max_waiting_tokens is not None and self.waiting and queued + num_tokens > limits.max_waiting_tokens:
            raise QueueFull(
                f"{queued} prompt tokens wait and this prompt has {num_tokens}, the limit is "
                f"{limits.max_waiting_tokens}. Try again in {retry_after_s:.0f} s.",
                retry_after_s=retry_after_s,
            )

    def _observe(self, plan: StepPlan, elapsed_s: float) -> None:
        self.budget.observe(self._load, elapsed_s)
        num_prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks if chunk.is_prompt)
        if num_prompt_tokens and elapsed_s > 0:
            self._tokens_per_s += 0.1 * (num_prompt_tokens / elapsed_s - self._tokens_per_s)

    def _take_plan(self, step: int) -> StepPlan:
        plan, self._plan = self._plan, None
        assert plan is not None, "no step is in flight"
        assert plan.step == step, f"step {step} is not the one in flight ({plan.step})"
        return plan
