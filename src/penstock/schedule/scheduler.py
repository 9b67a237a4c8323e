"""Decides what each step computes. A Sequence changes in this room and nowhere else; no tensor is seen here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.cache.states import StatePool
from penstock.cache.tiers import Tiers
from penstock.config import PrefillPriority
from penstock.errors import PenstockError, PromptTooLong, counted
from penstock.plan.chunks import Stops, chunk_end, uncut_end
from penstock.plan.prompt_plan import ANSWER_TOKENS
from penstock.request import Chunk, FinishReason, MediaKey, Request, Sequence, Span, Status, StepPlan, StepResult
from penstock.schedule.budget import POLICIES, STRETCH_WITHOUT_DECODES, StepCost, StepLoad, TokenBudget
from penstock.schedule.draft import Draft, Flight
from penstock.schedule.holdings import Holdings
from penstock.schedule.moves import FIRST_OBSERVATIONS, Moves
from penstock.schedule.queue_limit import QueueLimit
from penstock.schedule.sweeps import Sweeps

# A prompt is served before a shorter one once this many times its length was read of others while it waited.
AGEING = 4
# Steps that run or are planned to run after them.
MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    block_size: int
    max_context: int
    max_running: int
    overlap: int = 0
    priority: PrefillPriority = PrefillPriority.INTERLEAVED
    max_waiting: int | None = None  # requests in the queue for which no place is free; None: no limit
    max_waiting_tokens: int | None = None
    restarts_after_failure: bool = False  # the lane keeps what a broken step may have changed
    reads_whole: bool = False  # the lane cannot continue a prompt: it is one chunk, whatever the budget says
    sweeps: Sweeps | None = None  # None: the lane does not stop between layers


class ChunkRefused(Exception):
    """No chunk of this sequence may be computed as things are; the others can go on without it."""

    def __init__(self, sequence_id: int, error: PenstockError) -> None:
        super().__init__(str(error))
        self.sequence_id = sequence_id
        self.error = error


# (tokens before the step's longest context, resident tokens, wanted tokens) -> tokens that fit the memory budget;
# refuses with a PenstockError where fewer than wanted are not an answer
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
        memory_for: Callable[[int], str] | None = None,
    ) -> None:
        """`memory_for`: the budget, as one writes it, that would hold so many tokens."""
        self.limits = limits
        self.memory_for = memory_for
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
        self._flights: deque[Flight] = deque()
        # Since the last plan, in drafts that came to nothing: the next plan tells of them.
        self._untold_admitted: list[int] = []
        self._untold_preempted: list[int] = []
        self._num_steps = 0
        self._num_read = 0  # prompt tokens computed so far, of all sequences
        self._queue_limit = QueueLimit(max_waiting=limits.max_waiting, max_waiting_tokens=limits.max_waiting_tokens)
        self._steps_without_decode = 0
        self._steps_without_prefill = 0

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may hold."""
        return min(self.limits.max_context, self.pool.num_blocks * self.limits.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def use_disk(self, tiers: Tiers, cost: StepCost, num_observed: int) -> None:
        """Stores from now on what is computed, and loads what lies there. `cost`: of as many steps as were seen."""
        assert self.prefix is not None, "only shared prefixes outlive their requests"
        self.holdings.moves = Moves(
            tiers=tiers,
            pool=self.pool,
            prefix=self.prefix,
            states=self.holdings.states,
            hash_before=self.holdings.hash_before,
            cost=self.budget.cost or cost,
            num_observed=num_observed if self.budget.cost is None else FIRST_OBSERVATIONS,
        )

    @property
    def moves(self) -> Moves | None:
        return self.holdings.moves

    @property
    def _boundary(self) -> int:
        """Chunks of models with recurrent state prefer to end with a block, where the state can be saved."""
        states = self.holdings.states
        return 1 if states is None or not states.num_checkpoints else self.limits.block_size

    @property
    def _num_free(self) -> int:
        """Requests that may begin to run with the next step: each takes a place, and a block at least."""
        return min(self.limits.max_running - len(self.running), self.pool.num_available)

    @property
    def resident_tokens(self) -> int:
        return self.pool.high_water * self.limits.block_size

    # --- what may happen between steps ---

    def submit(self, request: Request) -> Sequence:
        num_tokens = max(request.num_slots(len(request.prompt)), request.num_announced)
        self.refuse_too_long(num_tokens)
        self._queue_limit.refuse_if_full(
            num_tokens, waiting=self.waiting.values(), present=self.sequences.values(), num_free=self._num_free
        )
        sequence = Sequence(
            request=request,
            tokens=list(request.prompt),
            num_prompt_tokens=len(request.prompt),
            prompt_is_complete=request.prompt_is_complete,
            joined_at=self._num_read,
        )
        self.sequences[sequence.id] = self.waiting[sequence.id] = sequence
        return sequence

    def extend_prompt(
        self, sequence_id: int, tokens: Tokens[int], *, is_last: bool, media_keys: tuple[MediaKey, ...] = ()
    ) -> None:
        """More of a streamed prompt has been read, or the images of one are encoded."""
        sequence = self.sequences[sequence_id]
        sequence.media_keys += media_keys
        assert not sequence.prompt_is_complete
        self.refuse_too_long(len(sequence.tokens) + len(tokens), is_all=is_last)
        sequence.tokens.extend(tokens)
        sequence.num_prompt_tokens = len(sequence.tokens)
        sequence.prompt_is_complete = is_last

    def abort(self, sequence_id: int, reason: FinishReason = "abort") -> None:
        """Takes effect now, or when the chunk in flight is done. What was computed stays in the prefix cache."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None or sequence.is_leaving:
            return
        sequence.abort_reason = reason
        sequence.is_leaving = True
        self._leave_if_it_may(sequence)

    def expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed, and pins whose time is over."""
        self.holdings.expire(now)
        for sequence in list(self.sequences.values()):
            deadline = sequence.request.deadline_at
            if deadline is not None and now >= deadline:
                self.abort(sequence.id, "deadline")

    def skip(self, sequence_id: int, position: int) -> None:
        """Counts tokens before `position` as computed, which nobody did: for measurements whose answer nobody reads.

        The time of a step depends on how many keys are there, not on what they hold.
        """
        sequence = self.sequences[sequence_id]
        assert self.holdings.states is None, "recurrent state cannot be skipped"
        assert not sequence.num_steps, "a step of it is in flight"
        has_room = self.holdings.grow(sequence, position)
        assert has_room, "a measurement takes no more than there is"
        sequence.num_computed = sequence.num_scheduled = position
        sequence.num_remembered = len(sequence.tokens)  # more than it has blocks: nobody shall find them

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

    def check_idle(self) -> None:
        """Checks what is held when nobody is there, as far as it takes no time: somebody waits for the last token."""
        if not self.sequences and not self.holdings.are_moving:
            assert not self.pool.num_held, "blocks are held by nobody"
            assert self.holdings.states is None or self.holdings.states.is_idle, "a state is held by nobody"

    def refuse_too_long(self, num_tokens: int, *, is_all: bool = True) -> None:
        """Refuses a prompt that cannot be held. `is_all`: it was counted to its end."""
        has = f"The prompt has {counted(num_tokens, is_all=is_all)}"
        if num_tokens >= self.limits.max_context:
            enough = f" to {num_tokens + ANSWER_TOKENS}" if is_all else ""
            raise PromptTooLong(
                f"{has}; the context holds {self.limits.max_context} with the answer. Shorten it or, to go past what "
                f"the model was trained for, raise --context{enough}."
            )
        if num_tokens >= self.capacity:
            enough = f" to {self.memory_for(num_tokens)}" if self.memory_for is not None and is_all else ""
            raise PromptTooLong(
                f"{has}; the memory budget holds the keys and values of {self.capacity}. Shorten it or raise "
                f"--memory{enough}."
            )

    # --- a step: plan, run, commit ---

    def next_step(self) -> StepPlan | None:
        """The chunks of the next step, in flight from now on; None when nothing can run.

        It may be planned while the step before it runs: then streams go on from tokens that are not known yet, and
        nobody loses a place. None then means that the step in flight has to land first. Raises ChunkRefused.
        """
        assert len(self._flights) < MAX_IN_FLIGHT, "the steps in flight were neither applied nor failed"
        if self._flights and not self._may_plan_ahead():
            return None
        if self.holdings.moves is not None:  # before chunks are cut: none is computed again in what is being stored
            self.holdings.moves.plan_stores(is_idle=not self.sequences)
        streams, reading = self._split_running()
        before = self._flights[0].claimed if self._flights else frozenset()
        draft = Draft(num_streams=len(streams), claimed_before=before, num_swept=self._num_swept)
        decodes = [s for s in streams if not s.is_paused]
        prompts = self._prompts_in_order(reading)
        try:
            self._fill(draft, decodes, prompts)
        except BaseException:  # of the memory's limit, say: nobody stands in a step that does not come
            self._give_up(draft)
            raise
        if not draft.chunk_by_sequence:
            self._give_up(draft)
            return self._moves_alone()
        self._steps_without_decode = self._steps_without_decode + 1 if decodes and not draft.load.num_decodes else 0
        is_behind = prompts and not draft.load.num_prompt_tokens
        self._steps_without_prefill = self._steps_without_prefill + 1 if is_behind else 0
        self._num_steps += 1
        return self._commit_to(draft)

    def _moves_alone(self) -> StepPlan | None:
        """A step that only begins moves, or waits for some; None where there are none."""
        moves = self.holdings.moves
        if moves is None or self._flights or not (moves.are_under_way or moves.are_ordered):
            return None
        plan = StepPlan(
            step=self._num_steps + 1,
            chunks=(),
            admitted=(),
            preempted=(),
            waiting=len(self.waiting),
            token_budget=self.budget.ceiling,
            predicted_s=0.0,
            predicted_bytes=self.peak_estimate(0, 0, self.resident_tokens),
            reason="moves alone",
            moves=moves.take_planned(),
        )
        self._num_steps += 1
        self._flights.append(Flight(plan=plan, load=StepLoad(), claimed=frozenset()))
        return plan

    def _fill(self, draft: Draft, decodes: list[Sequence], prompts: list[Sequence]) -> None:
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
        if prompts and not draft.chunk_by_sequence and not self._flights and not self.holdings.are_moving:
            self._schedule_oldest(prompts, draft)

    def _give_up(self, draft: Draft) -> None:
        """The draft becomes no step: its chunks are taken back, and the next plan tells who came and who went."""
        for chunk in draft.chunk_by_sequence.values():
            self._take_back(chunk)
        self._untold_admitted += draft.admitted
        self._untold_preempted += draft.preempted

    def apply(self, result: StepResult) -> None:
        """In-flight tokens become computed ones; sampled tokens are appended; ended sequences leave."""
        assert self._flights, "no step is in flight"
        flight = self._flights.popleft()
        assert flight.plan.step == result.step, f"step {result.step} is not the first in flight ({flight.plan.step})"
        if flight.plan.chunks:
            self.budget.observe(flight.load, result.elapsed_s)
            self._queue_limit.observe(flight.load.num_prompt_tokens, result.elapsed_s)
        if (moves := self.holdings.moves) is not None:
            moves.land(result.moved)
            if flight.plan.chunks and moves.cost is not self.budget.cost:
                moves.observe(flight.load, result.elapsed_s)
        for chunk in flight.plan.chunks:
            sequence = self.sequences[chunk.sequence_id]
            sequence.num_steps -= 1
            sequence.num_pending -= chunk.wants_logits
            sequence.cursor = None if chunk.is_through else chunk
            if not chunk.is_through:
                sequence.num_scheduled = sequence.num_computed
            elif chunk.end <= len(sequence.tokens):  # else the answer ended before this token was computed
                self._commit(sequence, chunk)
            if not sequence.is_leaving:
                if (token := result.token_by_sequence.get(sequence.id)) is not None:
                    sequence.tokens.append(token)
                sequence.is_leaving = sequence.id in result.finished
            self._leave_if_it_may(sequence)

    def fail(self, step: int) -> None:
        """The step did not happen, nor any after it: every sequence stands where it stood, and goes on from there.

        Recurrent state may have advanced in some layers, so such a sequence goes back to its last checkpoint; what a
        lane keeps itself begins again.
        """
        assert any(flight.plan.step == step for flight in self._flights), f"step {step} is not in flight"
        while self._flights and self._flights[-1].plan.step >= step:
            plan = self._flights.pop().plan
            self._untold_admitted += plan.admitted
            self._untold_preempted += plan.preempted
            for chunk in plan.chunks:
                self._take_back(chunk)
                sequence = self.sequences[chunk.sequence_id]
                sequence.cursor = None  # what it had in these layers may have changed
                if chunk.state is not None or self.limits.restarts_after_failure:
                    self.holdings.start_over(sequence)
                self._leave_if_it_may(sequence)

    def _take_back(self, chunk: Chunk) -> None:
        sequence = self.sequences[chunk.sequence_id]
        sequence.num_scheduled = max(sequence.num_computed, chunk.start)
        sequence.num_steps -= 1
        sequence.num_pending -= chunk.wants_logits
        self.holdings.forgo_state(chunk)

    def _may_plan_ahead(self) -> bool:
        """Whether what the step in flight will change is known, but for tokens that the device chooses itself."""
        limits = self.limits
        if limits.overlap or limits.reads_whole or limits.sweeps or self.holdings.states is not None:
            return False
        if limits.restarts_after_failure:  # a step that fails gives back the blocks of the one before it
            return False
        chosen = (self.sequences[c.sequence_id].request for c in self._flights[0].plan.chunks if c.wants_logits)
        # A grammar is told of each token on the host before it says what may follow.
        return all(request.sampling.grammar is None and request.source is None for request in chosen)

    def _commit(self, sequence: Sequence, chunk: Chunk) -> None:
        if chunk.is_prompt:
            num_new = chunk.end - sequence.num_computed
            sequence.num_read += num_new
            self._num_read += num_new
        sequence.num_computed = chunk.end
        if chunk.end // self.limits.block_size > sequence.num_remembered:
            self.holdings.remember(sequence)
        if chunk.state is not None:
            self.holdings.commit_state(sequence, chunk)

    def _commit_to(self, draft: Draft) -> StepPlan:
        load = draft.load
        chunks = tuple(draft.chunk_by_sequence.values())
        admitted = [*self._untold_admitted, *draft.admitted]
        preempted = [*self._untold_preempted, *draft.preempted]
        self._untold_admitted, self._untold_preempted = [], []
        plan = StepPlan(
            step=self._num_steps,
            chunks=chunks,
            admitted=tuple(dict.fromkeys(i for i in admitted if i in self.running)),
            preempted=tuple(dict.fromkeys(i for i in preempted if i in self.sequences)),
            waiting=len(self.waiting),
            token_budget=self.budget.ceiling,
            predicted_s=self.budget.predict(load),
            predicted_bytes=self.peak_estimate(
                draft.num_rows, max([self._num_slots(chunk) for chunk in chunks]), self.resident_tokens
            ),
            reason=f"{self.limits.priority.value}: {load.num_decodes} decodes, {load.num_prompt_tokens} of prompts",
            moves=() if self.holdings.moves is None else self.holdings.moves.take_planned(),
        )
        self._flights.append(Flight(plan=plan, load=load, claimed=frozenset(draft.claimed)))
        return plan

    def _num_slots(self, chunk: Chunk) -> int:
        if chunk.num_slots_before is None:
            return chunk.end
        return self.sequences[chunk.sequence_id].request.num_slots(chunk.end)

    # --- who is served ---

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Splits the running into (those that write, those that are still being read)."""
        streams: list[Sequence] = []
        reading: list[Sequence] = []
        for sequence in self.running.values():
            if not sequence.is_leaving:
                (reading if sequence.is_prefilling else streams).append(sequence)
        return streams, reading

    def _prompts_in_order(self, reading: list[Sequence]) -> list[Sequence]:
        """Prompts with tokens to compute: by priority, then shortest remaining, aged by what others were given."""
        prompts = (*reading, *self.waiting.values())
        ready = [s for s in prompts if not s.is_paused and s.num_scheduled < s.num_known]
        if self.limits.reads_whole:
            ready = [s for s in ready if s.prompt_is_complete]
        return sorted(ready, key=self._rank) if len(ready) > 1 else ready

    def _rank(self, sequence: Sequence) -> tuple[int, float, int]:
        # The length of a stream is unknown: it counts as long as it may become.
        length = sequence.num_prompt_tokens if sequence.prompt_is_complete else self.capacity
        num_read_of_others = self._num_read - sequence.joined_at - sequence.num_read
        return (sequence.request.priority, length - sequence.num_computed - AGEING * num_read_of_others, sequence.id)

    def _schedule_decodes(self, decodes: list[Sequence], draft: Draft) -> None:
        for sequence in decodes:
            if sequence.status is Status.RUNNING and (sequence.num_pending == 0 or self._goes_on(sequence)):
                self._schedule(sequence, sequence.num_scheduled, sequence.num_scheduled + 1, draft)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether an answer is not at its end with the token that is pending, as far as its length says."""
        num_generated = sequence.num_generated + sequence.num_pending
        return num_generated < sequence.request.sampling.max_tokens and sequence.num_expected < self.capacity

    def _schedule_prompts(self, prompts: list[Sequence], has_decodes: bool, draft: Draft) -> None:
        may_join = True  # until a prompt that cannot be cut lacks blocks: those who run end and leave it theirs
        for sequence in prompts:
            if sequence.status is Status.FINISHED or sequence.id in draft.preempted:
                continue
            if sequence.status is Status.WAITING:
                # Only what runs holds blocks, so that what holds blocks can be preempted.
                if not may_join:
                    continue
                if self._prompt_budget(sequence, has_decodes, draft) < 1:
                    break
                if not self._admit(sequence, draft):
                    continue
            if sequence.cursor is not None:
                self._go_on(sequence, sequence.cursor, has_decodes, draft)
                continue
            self.holdings.take_hits(sequence)
            if self.holdings.awaits(sequence):
                continue
            if (draft.claimed or draft.claimed_before) and draft.is_claimed(self.holdings.next_block(sequence)):
                continue  # a chunk of this step, or of the one in flight, computes it: it will be a hit
            num_tokens = self._prompt_budget(sequence, has_decodes, draft)
            if num_tokens < 1:
                break
            start = sequence.num_scheduled
            if self.limits.overlap:
                # Where little fits, half of it is new.
                overlap = self.limits.overlap if self.limits.overlap < num_tokens else num_tokens // 2
                start = self.holdings.overlapped_start(sequence, overlap)
            # The overlap is part of the chunk, but a chunk always reaches new tokens.
            num_tokens = max(num_tokens, sequence.num_scheduled - start + 1)
            stops = self._stops(sequence)
            end = chunk_end(start, num_tokens, stops).position
            if end - start > num_tokens and draft.load.num_prompt_tokens:
                continue  # a span over the budget has a step to itself, beside decodes at most
            end = uncut_end(min(end, self._end_without_preemption(sequence, draft)), stops)
            if end > sequence.num_scheduled:
                self._schedule(sequence, start, end, draft, self._sweep(sequence, start, end, has_decodes, draft))
            elif self._needs_blocks_at_once(sequence, stops):
                may_join = False

    def _sweep(self, sequence: Sequence, start: int, end: int, has_decodes: bool, draft: Draft) -> Chunk | None:
        """A wider chunk that stops between layers; None where the one that ends at `end` is better or has to be."""
        sweeps, budget, request, sampling = self.limits.sweeps, self.budget, sequence.request, sequence.request.sampling
        if sweeps is None or budget.cost is None or budget.target_s is None or draft.num_swept:
            return None
        is_plain = request.chunk_size is None and request.source is None and not request.atomic_spans
        wants_all = sampling.pooling is not None or sampling.prompt_logprobs is not None
        if not is_plain or wants_all or not sequence.prompt_is_complete or not self.policy.decodes_beside_prompts:
            return None
        last = min(sequence.num_known, self._end_without_preemption(sequence, draft), start + sweeps.most_tokens)
        most = self._num_fitting(sequence, start, last - start, draft)
        chunk = Chunk(sequence_id=request.id, start=start, end=end, wants_logits=False)
        limit_s = budget.aim_s(1.0 if has_decodes else STRETCH_WITHOUT_DECODES)
        return sweeps.begun(budget.cost, draft.load, chunk, most, limit_s)

    def _go_on(self, sequence: Sequence, cursor: Chunk, has_decodes: bool, draft: Draft) -> None:
        """Takes a chunk through as many more layers as the step has time for: one at least where prompts advance."""
        sweeps, cost = self.limits.sweeps, self.budget.cost
        assert sweeps is not None
        assert cost is not None, "a measurement borrows the limits of an engine that nobody uses"
        is_due = self.policy.has_floor or self._steps_without_prefill >= self.policy.most_steps_without_prefill
        least = int(not draft.load.num_prompt_tokens and (is_due or not has_decodes))
        limit_s = self.budget.aim_s(1.0 if has_decodes else STRETCH_WITHOUT_DECODES)
        chunk = sweeps.taken_on(cost, draft.load, cursor, limit_s, least=least)
        if chunk is not None:
            self._schedule(sequence, chunk.start, chunk.end, draft, chunk)

    @property
    def _num_swept(self) -> int:
        """Counts the tokens that stand between two layers; they are of one sequence."""
        if self.limits.sweeps is None:
            return 0
        return next((s.cursor.num_tokens for s in self.running.values() if s.cursor is not None), 0)

    def _needs_blocks_at_once(self, sequence: Sequence, stops: Stops) -> bool:
        """Whether its next token takes several: with the rest of what is read in one piece, or with its source."""
        end = chunk_end(sequence.num_scheduled, 1, stops).position
        num_held = len(sequence.block_ids) * self.limits.block_size
        return sequence.request.num_slots(end) > num_held + self.limits.block_size

    def _stops(self, sequence: Sequence) -> Stops:
        atomic = sequence.request.atomic_spans
        if self.limits.reads_whole:
            atomic = (Span(start=0, end=sequence.num_known),)
        is_open = not sequence.prompt_is_complete
        forks = sequence.forks if self._boundary > 1 else ()
        if self._boundary > 1 and self.holdings.moves is not None:
            forks = tuple(sorted({*forks, *self.holdings.moves.last_fork(sequence)}))
        return Stops(end=sequence.num_known, is_open=is_open, boundary=self._boundary, forks=forks, atomic=atomic)

    def _schedule_oldest(self, prompts: list[Sequence], draft: Draft) -> None:
        """Prompts hold all blocks and none can go on: the first in rank takes them from the others."""
        oldest = min(prompts, key=lambda s: (s.request.priority, s.id))
        if oldest.status is Status.WAITING:
            self._preempt_last(draft)
            while not self._admit(oldest, draft):  # the one that lost its place held nothing
                if self._preempt_last(draft) is None:
                    return
        oldest.cursor = None
        self.holdings.take_hits(oldest)
        if self.holdings.awaits(oldest):
            return
        stops = replace(self._stops(oldest), boundary=1)
        end = chunk_end(oldest.num_computed, self.limits.block_size, stops).position
        self._schedule(oldest, oldest.num_computed, end, draft)

    def _end_without_preemption(self, sequence: Sequence, draft: Draft) -> int:
        """How far the blocks reach that nobody holds, less one for each running stream's next token."""
        num_reserved = draft.num_streams - draft.load.num_decodes
        num_blocks = len(sequence.block_ids) + max(0, self.pool.num_available - max(0, num_reserved))
        return sequence.request.num_reached(num_blocks * self.limits.block_size)

    def _prompt_budget(self, sequence: Sequence, has_decodes: bool, draft: Draft) -> int:
        """Tokens left for this prompt by the token budget, the latency target and the memory."""
        wanted = sequence.num_known - sequence.num_scheduled + self.limits.overlap
        num_slots = sequence.request.num_slots(sequence.num_scheduled)
        own = sequence.request.chunk_size
        if own:
            wanted = min(wanted, own)
        if ceiling := self.budget.ceiling_of(own):
            wanted = min(wanted, ceiling - draft.load.num_prompt_tokens)
        if has_decodes and self.policy.decodes_beside_prompts:
            wanted = self._shared_with_decodes(sequence, wanted, draft)
        elif self.policy.decodes_beside_prompts:
            allowed = self.budget.allowance(draft.load, num_slots, wanted, STRETCH_WITHOUT_DECODES, chunk_size=own)
            wanted = allowed if draft.load.num_prompt_tokens else max(allowed, min(wanted, self.budget.floor))
        if wanted < 1:
            return 0
        # One token always advances: the pool was sized so that the smallest chunk fits.
        return max(self._num_fitting(sequence, num_slots, wanted, draft), 0 if draft.chunk_by_sequence else 1)

    def _num_fitting(self, sequence: Sequence, num_slots: int, wanted: int, draft: Draft) -> int:
        """Counts the tokens that fit the memory beside those of the draft."""
        num_rows = draft.num_rows if self.limits.sweeps else draft.load.num_tokens
        try:
            longest = max(num_slots, draft.longest_before)
            return self.chunk_limit(longest, self.resident_tokens, wanted + num_rows) - num_rows
        except PenstockError as error:
            raise ChunkRefused(sequence.id, error) from error

    def _shared_with_decodes(self, sequence: Sequence, wanted: int, draft: Draft) -> int:
        policy, budget = self.policy, self.budget
        allowed = 0
        if budget.target_s is not None or policy.has_floor:
            num_slots = sequence.request.num_slots(sequence.num_scheduled)
            allowed = budget.allowance(draft.load, num_slots, wanted, chunk_size=sequence.request.chunk_size)
        is_overdue = self._steps_without_prefill >= policy.most_steps_without_prefill
        is_first = draft.load.num_prompt_tokens == 0
        if is_first and policy.has_floor:
            return max(allowed, min(wanted, budget.floor))
        if is_first and is_overdue:
            return max(allowed, min(wanted, budget.overdue))
        return allowed

    def _admit(self, sequence: Sequence, draft: Draft) -> bool:
        if len(self.running) >= self.limits.max_running or self.pool.num_available == 0:
            return False
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        self.holdings.admit(sequence)
        sequence.status = Status.RUNNING
        draft.admitted.append(sequence.id)
        return True

    def _schedule(self, sequence: Sequence, start: int, end: int, draft: Draft, swept: Chunk | None = None) -> None:
        """Puts a chunk into the draft: the one that ends at `end`, or one that stops between layers instead."""
        end = end if swept is None else swept.end
        request = sequence.request
        num_slots = end if request.source is None else request.num_slots(end)
        is_held = len(sequence.block_ids) * self.limits.block_size >= num_slots
        if not is_held and not self._allocate(sequence, num_slots, draft):
            return
        sequence.num_scheduled = end
        chunk = Chunk(
            sequence_id=request.id,
            start=start,
            end=end,
            wants_logits=sequence.prompt_is_complete
            and end == sequence.num_expected
            and (swept is None or swept.is_through),
            num_cached=sequence.num_cached,
            hits=sequence.hits,
            num_prompt_tokens=sequence.num_prompt_tokens if sequence.prompt_is_complete else None,
            state=None if self.holdings.states is None else self.holdings.state_use(sequence, end),
            num_slots_before=None if request.source is None else request.num_slots(start),
            layers=None if swept is None else swept.layers,
        )
        sequence.num_steps += 1
        sequence.num_pending += chunk.wants_logits
        draft.add(chunk)
        if chunk.is_prompt:
            draft.claimed.update(self.holdings.blocks_between(sequence, start, end))

    # --- blocks ---

    def _allocate(self, sequence: Sequence, num_tokens: int, draft: Draft) -> bool:
        """Blocks for `num_tokens`, taken from the last in rank when none is left. False: this one was the last."""
        while not self.holdings.grow(sequence, num_tokens):
            if self._preempt_last(draft) in (sequence, None):
                return False
        return True

    def _preempt_last(self, draft: Draft) -> Sequence | None:
        """Preempts whose turn is last, but nobody while a step is in flight: what it writes to is not given away."""
        if not self.running or self._flights or self.holdings.are_moving:
            return None  # blocks that moves hold come back
        victim = max(self.running.values(), key=lambda s: (s.is_paused, s.request.priority, s.id))
        self._preempt(victim, draft)
        return victim

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Puts a sequence back to the queue; its computed blocks stay in the prefix cache while nobody needs them."""
        if chunk := draft.remove(sequence.id):
            self.holdings.forgo_state(chunk)
        draft.preempted.append(sequence.id)
        self.num_preemptions += 1
        sequence.cursor = None
        self.holdings.start_over(sequence)
        self.holdings.release(sequence)
        sequence.num_steps = sequence.num_pending = 0
        sequence.status = Status.WAITING
        del self.running[sequence.id]
        self.waiting[sequence.id] = sequence

    def _leave_if_it_may(self, sequence: Sequence) -> None:
        if not sequence.is_leaving or sequence.num_steps:
            return
        if self.holdings.moves is not None:
            self.holdings.moves.order_last_state(sequence)
        self.holdings.release(sequence)
        sequence.status = Status.FINISHED
        (self.running if sequence.id in self.running else self.waiting).pop(sequence.id)
        del self.sequences[sequence.id]
        if sequence.abort_reason is not None:
            self._ended.append((sequence.id, sequence.abort_reason))
