import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.cache.states import StatePool
from penstock.config import PrefillPriority
from penstock.errors import InvalidSetting, PromptTooLong, QueueFull
from penstock.request import Hits, Request, SamplingParams, SourceReading, Span, StepResult
from penstock.schedule.budget import POLICIES, STRETCH_WITHOUT_DECODES, StepCost, TokenBudget
from penstock.schedule.scheduler import ChunkRefused, Limits, Scheduler
from penstock.schedule.sweeps import Sweeps

BLOCK = 4


def make_scheduler(
    *,
    num_blocks=64,
    chunk_size=8,
    target=None,
    cost=None,
    floor=1,
    prefix=True,
    fits=None,
    num_checkpoints=None,
    **limits,
):
    """`num_checkpoints`: of a model with recurrent state; None: it has none."""
    pool = BlockPool(num_blocks)
    has_state = num_checkpoints is not None
    return Scheduler(
        limits=Limits(**{"block_size": BLOCK, "max_context": 10_000, "max_running": 4} | limits),
        budget=TokenBudget(ceiling=chunk_size, floor=floor, target_s=target, cost=cost),
        pool=pool,
        prefix=PrefixCache(pool) if prefix else None,
        model_identity="test",
        chunk_limit=fits or (lambda start, resident, wanted: wanted),
        peak_estimate=lambda chunk, context, resident: chunk,
        states=StatePool(num_running=4, num_checkpoints=num_checkpoints) if has_state else None,
    )


def make_request(request_id, prompt, *, sampling=None, **values):
    return Request(
        id=request_id, prompt=tuple(prompt), sampling=SamplingParams(**sampling or {}), arrived_at=0.0, **values
    )


def feed(scheduler, prompts):
    """Streamed prompts are read as the engine reads them: as far as the next chunk may go, and one token further.

    That chunk may have a size of their own: here the scheduler's, or up to a block more.
    """
    for sequence in scheduler.sequences.values():
        num_ahead = max(scheduler.budget.ceiling, BLOCK) + 1 + sequence.id % BLOCK
        known, end = len(sequence.tokens), sequence.num_scheduled + num_ahead
        if not sequence.prompt_is_complete and not sequence.is_leaving and end > known:
            prompt = prompts[sequence.id]
            scheduler.extend_prompt(sequence.id, prompt[known:end], is_last=end >= len(prompt))


def next_token(tokens):
    """A model of sorts: the token after a sequence depends on all of it."""
    return hash(tuple(tokens)) % 97


def advance_states(scheduler, plan, states):
    """Recurrent state as the tokens that made it: a chunk that starts from any other state is caught here."""
    for chunk in plan.chunks:
        use, tokens = chunk.state, scheduler.sequences[chunk.sequence_id].tokens
        before = [] if use.source is None else states[use.source]
        assert before == tokens[: chunk.start], "a chunk began with the state of another prefix"
        states[use.slot] = tokens[: chunk.end]
    for chunk in plan.chunks:
        if chunk.state.save_to is not None:
            states[chunk.state.save_to] = states[chunk.state.slot]


def advance_layers(plan, passages):
    """What a lane keeps of tokens between two layers: a chunk that goes on anywhere else is caught here."""
    for request_id in plan.preempted:
        passages.pop(request_id, None)
    between = [chunk for chunk in plan.chunks if chunk.layers is not None]
    assert len(between) <= 1
    for chunk in between:
        place, layers = (chunk.start, chunk.end), chunk.layers
        if layers.first:
            assert passages[chunk.sequence_id] == (*place, layers.first), "a sweep went on where it had not stopped"
        passages[chunk.sequence_id] = (*place, layers.end)
        assert layers.first < layers.end <= layers.num_layers
        assert chunk.is_through or not chunk.wants_logits
    return passages


def run_step(scheduler, lengths, outputs, states=None):
    """Runs one step with `next_token` as the model; ends a sequence after lengths[id] tokens."""
    plan = scheduler.next_step()
    if plan is None:
        return None
    if states is not None:
        advance_states(scheduler, plan, states)
    advance_layers(plan, scheduler.__dict__.setdefault("passages", {}))
    tokens, finished = {}, {}
    for chunk in plan.chunks:
        sequence = scheduler.sequences[chunk.sequence_id]
        for span in sequence.request.atomic_spans:
            assert not any(span.start < border < span.end for border in (chunk.start, chunk.end)), "a span was cut"
        if chunk.wants_logits:
            token = next_token(sequence.tokens[: chunk.end])
            tokens[sequence.id] = token
            outputs.setdefault(sequence.id, []).append(token)
            if len(outputs[sequence.id]) == lengths[sequence.id]:
                finished[sequence.id] = "length"
    scheduler.apply(
        StepResult(
            step=plan.step,
            token_by_sequence=tokens,
            finished=finished,
            elapsed_s=plan.predicted_s,
            peak_bytes=0,
        )
    )
    return plan


def expected_output(prompt, length):
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, aborts and failed steps over a tiny pool: every request ends with what it gives alone."""

    priority = PrefillPriority.INTERLEAVED
    target = None
    num_checkpoints = None
    has_spans = False  # of media that are read whole, larger than the budget and than a block
    sweeps = None

    def __init__(self):
        super().__init__()
        cost = StepCost((0.001, 0.001, 1e-6, 1e-6, 1e-6))
        has_state = self.num_checkpoints is not None
        self.states = {} if has_state else None
        self.scheduler = make_scheduler(
            num_blocks=12,
            chunk_size=7,
            overlap=0 if has_state or self.has_spans else 2,
            prefix=not self.has_spans,
            priority=self.priority,
            target=self.target,
            cost=cost,
            num_checkpoints=self.num_checkpoints,
            sweeps=self.sweeps,
        )
        self.prompts, self.lengths, self.outputs, self.aborted = {}, {}, {}, set()
        self.told_running = set()

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 30),
        num_generated=st.integers(1, 9),
        priority=st.integers(0, 2),
        is_streamed=st.booleans(),
        forks=st.lists(st.integers(0, 40), max_size=3),
    )
    def submit(self, seed, length, num_generated, priority, is_streamed, forks):
        request_id = len(self.prompts)
        self.prompts[request_id] = [seed * 100 + i for i in range(length)]
        self.lengths[request_id] = num_generated
        ends = [(0, 5), (5, 17), (20, 30)][seed:] if self.has_spans else []
        spans = tuple(Span(start=start, end=min(end, length)) for start, end in ends if start < length)
        is_streamed = is_streamed and not self.has_spans  # the spans of a stream would not be known
        self.scheduler.submit(
            make_request(
                request_id,
                () if is_streamed else self.prompts[request_id],
                priority=priority,
                atomic_spans=spans,
                prompt_is_complete=not is_streamed,
                forks=tuple(forks),
            )
        )

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), until=st.integers(1, 3), most=st.integers(0, 12))
    def pin(self, data, until, most):
        prompt = self.prompts[data.draw(st.sampled_from(sorted(self.prompts)))]
        self.scheduler.holdings.pin(prompt, rotary="default", scope="", until=until, most=most)

    @rule(now=st.integers(1, 3))
    def expire(self, now):
        self.scheduler.expire(now)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def pause_and_go_on(self, data):
        """A slow reader: its sequence rests for a step, and may lose its blocks to others."""
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.sequences)))
        self.scheduler.pause(request_id, is_paused=True)
        self.take_plan(run_step(self.scheduler, self.lengths, self.outputs, self.states))
        self.scheduler.pause(request_id, is_paused=False)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.sequences)))
        self.scheduler.abort(request_id)
        self.aborted.add(request_id)

    @rule()
    def step(self):
        had_work = self.scheduler.has_work
        plan = run_step(self.scheduler, self.lengths, self.outputs, self.states)
        assert (plan is not None) == had_work, "work was there and nothing was planned"
        self.take_plan(plan)

    def take_plan(self, plan):
        """Plans alone tell who runs."""
        if plan is not None:
            self.told_running = (self.told_running - set(plan.preempted)) | set(plan.admitted)
            assert set(self.scheduler.running) <= self.told_running
            assert not self.told_running & set(self.scheduler.waiting)

    @rule(num_asked=st.integers(0, 3))
    def refuse_a_step(self, num_asked):
        """The memory's limit is refused in the middle of a draft: nobody stands in a step that does not come."""
        limit = self.scheduler.chunk_limit
        asked = iter(range(num_asked))

        def refuse(start, resident, wanted):
            if next(asked, None) is None:
                raise InvalidSetting("--strict")
            return wanted

        self.scheduler.chunk_limit = refuse
        try:
            self.take_plan(run_step(self.scheduler, self.lengths, self.outputs, self.states))
        except ChunkRefused:
            for sequence in self.scheduler.sequences.values():
                assert (sequence.num_steps, sequence.num_pending) == (0, 0)
                assert sequence.num_scheduled == sequence.num_computed
        finally:
            self.scheduler.chunk_limit = limit

    @rule()
    def fail_a_step(self):
        plan = self.scheduler.next_step()
        self.take_plan(plan)
        if plan is not None:
            self.spoil_states(plan)
            self.scheduler.fail(plan.step)
            self.spoil_layers(plan)

    def spoil_states(self, plan):
        """A step that fails has advanced the state in some layers and not in others."""
        for chunk in plan.chunks if self.states is not None else ():
            self.states[chunk.state.slot] = self.states[chunk.state.save_to] = ["spoilt"]

    def spoil_layers(self, plan):
        """A step that fails may have taken a chunk through some of its layers."""
        passages = self.scheduler.__dict__.get("passages", {})
        for chunk in plan.chunks:
            passages.pop(chunk.sequence_id, None)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def abort_in_flight(self, data):
        plan = self.scheduler.next_step()
        self.take_plan(plan)
        if plan is None:
            return
        request_id = data.draw(st.sampled_from(sorted(chunk.sequence_id for chunk in plan.chunks)))
        self.scheduler.abort(request_id)
        self.aborted.add(request_id)
        assert request_id in self.scheduler.sequences, "blocks in flight are not given away"
        self.spoil_states(plan)
        self.scheduler.fail(plan.step)
        self.spoil_layers(plan)
        assert request_id not in self.scheduler.sequences

    @invariant()
    def streams_are_read_ahead(self):
        feed(self.scheduler, self.prompts)

    @invariant()
    def the_pool_is_intact(self):
        self.scheduler.check()

    def teardown(self):
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            feed(self.scheduler, self.prompts)
            run_step(self.scheduler, self.lengths, self.outputs, self.states)
        assert not self.scheduler.has_work, "a request never ended"
        self.scheduler.check()
        for request_id in set(self.prompts) - self.aborted:
            expected = expected_output(self.prompts[request_id], self.lengths[request_id])
            assert self.outputs[request_id] == expected


def machine_of(priority, target, **values):
    values |= {"priority": priority, "target": target}
    machine = type("Machine", (SchedulerMachine,), values)
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return case


class AheadMachine(RuleBasedStateMachine):
    """The same with each step planned while the one before it runs, over pages that remember what was written.

    A page holds, for each of its tokens, all tokens up to it: what a chunk reads must be its own prefix.
    """

    priority = PrefillPriority.INTERLEAVED

    def __init__(self):
        super().__init__()
        self.scheduler = make_scheduler(num_blocks=12, chunk_size=7, max_running=4, priority=self.priority)
        self.prompts, self.lengths, self.outputs, self.aborted = {}, {}, {}, set()
        self.flights, self.pages = [], {}

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 30),
        num_generated=st.integers(1, 9),
        is_length_known=st.booleans(),
        priority=st.integers(0, 2),
        is_streamed=st.booleans(),
    )
    def submit(self, seed, length, num_generated, is_length_known, priority, is_streamed):
        """An answer ends by its length, which the scheduler sees coming, or by a token, which nobody does."""
        request_id = len(self.prompts)
        self.prompts[request_id] = [seed * 100 + i for i in range(length)]
        self.lengths[request_id] = num_generated
        sampling = {"max_tokens": num_generated if is_length_known else 100}
        values = {"sampling": sampling, "priority": priority, "prompt_is_complete": not is_streamed}
        self.scheduler.submit(make_request(request_id, () if is_streamed else self.prompts[request_id], **values))

    @rule()
    def plan(self):
        if len(self.flights) == 2:
            self.land()
        feed(self.scheduler, self.prompts)
        plan = self.scheduler.next_step()
        if plan is None:
            assert self.flights or not self.scheduler.has_work, "work was there and nothing was planned"
            return
        blocks = {c.sequence_id: tuple(self.scheduler.sequences[c.sequence_id].block_ids) for c in plan.chunks}
        self.flights.append((plan, blocks))

    @precondition(lambda self: self.flights)
    @rule()
    def land(self):
        plan, blocks = self.flights.pop(0)
        tokens, finished = {}, {}
        for chunk in plan.chunks:
            sequence = self.scheduler.sequences[chunk.sequence_id]
            self.compute(chunk, sequence.tokens, blocks[sequence.id])
            if chunk.wants_logits and not sequence.is_leaving:
                token = tokens[sequence.id] = next_token(sequence.tokens[: chunk.end])
                self.outputs.setdefault(sequence.id, []).append(token)
                if len(self.outputs[sequence.id]) == self.lengths[sequence.id]:
                    finished[sequence.id] = "length"
        self.scheduler.apply(
            StepResult(step=plan.step, token_by_sequence=tokens, finished=finished, elapsed_s=0.01, peak_bytes=0)
        )

    def compute(self, chunk, tokens, blocks):
        for position in range(chunk.start if chunk.end <= len(tokens) else 0):
            seen = self.pages[blocks[position // BLOCK], position % BLOCK]
            assert seen == tokens[: position + 1], "a chunk read the pages of another prefix"
        for position in range(chunk.start, chunk.end):
            written = tokens[: position + 1] if position < len(tokens) else "past the end"
            self.pages[blocks[position // BLOCK], position % BLOCK] = written

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.sequences)))
        if not self.scheduler.sequences[request_id].is_leaving:
            self.aborted.add(request_id)
        self.scheduler.abort(request_id)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def fail(self, data):
        """The steps from one on fail; what they wrote is lost."""
        first = data.draw(st.integers(0, len(self.flights) - 1))
        self.scheduler.fail(self.flights[first][0].step)
        for plan, blocks in self.flights[first:]:
            for chunk in plan.chunks:
                for position in range(chunk.start, chunk.end):
                    self.pages[blocks[chunk.sequence_id][position // BLOCK], position % BLOCK] = "failed"
        del self.flights[first:]

    @invariant()
    def the_pool_is_intact(self):
        self.scheduler.check()

    def teardown(self):
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.plan()
            if self.flights:
                self.land()
        assert not self.scheduler.has_work, "a request never ended"
        self.scheduler.check()
        for request_id in set(self.prompts) - self.aborted:
            expected = expected_output(self.prompts[request_id], self.lengths[request_id])
            assert self.outputs[request_id] == expected


def ahead_machine_of(priority):
    case = type("Machine", (AheadMachine,), {"priority": priority}).TestCase
    case.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
    return case


TestAhead = ahead_machine_of(PrefillPriority.INTERLEAVED)
TestAheadPrefillFirst = ahead_machine_of(PrefillPriority.PREFILL_FIRST)
TestAheadDecodePriority = ahead_machine_of(PrefillPriority.DECODE_PRIORITY)

TestInterleaved = machine_of(PrefillPriority.INTERLEAVED, None)
TestInterleavedUnderATarget = machine_of(PrefillPriority.INTERLEAVED, 0.006)
TestPrefillFirst = machine_of(PrefillPriority.PREFILL_FIRST, None)
TestDecodePriority = machine_of(PrefillPriority.DECODE_PRIORITY, None)
TestDecodePriorityUnderATarget = machine_of(PrefillPriority.DECODE_PRIORITY, 0.006)
TestRecurrentState = machine_of(PrefillPriority.INTERLEAVED, None, num_checkpoints=5)
TestRecurrentStateUnderATarget = machine_of(PrefillPriority.DECODE_PRIORITY, 0.006, num_checkpoints=1)
TestRecurrentStateWithoutCheckpoints = machine_of(PrefillPriority.PREFILL_FIRST, None, num_checkpoints=0)

TestSpans = machine_of(PrefillPriority.INTERLEAVED, None, has_spans=True)
SWEEPS = Sweeps(num_layers=3, most_tokens=20, are_forced=True)
TestSweeps = machine_of(PrefillPriority.INTERLEAVED, 0.006, sweeps=SWEEPS)
TestSweepsDecodePriority = machine_of(PrefillPriority.DECODE_PRIORITY, 0.006, sweeps=SWEEPS)
TestSpansUnderATarget = machine_of(PrefillPriority.DECODE_PRIORITY, 0.006, has_spans=True)


def test_a_step_planned_ahead_goes_on_from_the_token_that_is_pending():
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(5), sampling={"max_tokens": 3}))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert [(c.start, c.end, c.wants_logits) for c in (*first.chunks, *second.chunks)] == [(0, 5, True), (5, 6, True)]
    scheduler.apply(StepResult(step=first.step, token_by_sequence={0: 7}, finished={}, elapsed_s=0.0, peak_bytes=0))
    third = scheduler.next_step()
    assert [(c.start, c.end) for c in third.chunks] == [(6, 7)]
    scheduler.apply(StepResult(step=second.step, token_by_sequence={0: 8}, finished={}, elapsed_s=0.0, peak_bytes=0))
    assert scheduler.next_step() is None  # the third token is the last


def test_claims_end_with_the_step_that_made_them():
    """A prompt whose last chunk ended on a border is not kept from its next block by its own old claim."""
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(40)))
    first = scheduler.next_step()
    scheduler.submit(make_request(1, range(100, 108)))  # shorter, so it takes the whole of the next step
    second = scheduler.next_step()
    assert [c.sequence_id for c in second.chunks] == [1]
    scheduler.apply(StepResult(step=first.step, token_by_sequence={}, finished={}, elapsed_s=0.01, peak_bytes=0))
    third = scheduler.next_step()
    assert {c.sequence_id: (c.start, c.end) for c in third.chunks}[0] == (8, 16)


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.5}, {"repetition_penalty": 1.1}, {"min_tokens": 2}, {"logprobs": 3}, {"temperature": 1}],
)
def test_a_step_is_planned_ahead_of_tokens_that_the_device_chooses(values):
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(5), sampling={"max_tokens": 3} | values))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert [(c.start, c.end) for c in (*first.chunks, *second.chunks)] == [(0, 5), (5, 6)]


def test_no_step_is_planned_ahead_of_a_token_that_a_grammar_must_be_told():
    values = {"grammar": "{}", "temperature": 0.5}
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(12), sampling=values))
    assert scheduler.next_step() is not None
    assert scheduler.next_step() is not None  # the rest of the prompt depends on no token
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(5), sampling=values))
    assert scheduler.next_step() is not None
    assert scheduler.next_step() is None


def test_no_step_is_planned_ahead_where_a_failure_restarts_what_is_in_flight():
    scheduler = make_scheduler(chunk_size=8, prefix=False, restarts_after_failure=True)
    scheduler.submit(make_request(0, range(20)))
    first = scheduler.next_step()
    held = list(scheduler.sequences[0].block_ids)
    if (second := scheduler.next_step()) is not None:
        scheduler.fail(second.step)
    assert scheduler.sequences[0].block_ids == held, "blocks in flight were given away"
    scheduler.apply(StepResult(step=first.step, token_by_sequence={}, finished={}, elapsed_s=0.01, peak_bytes=0))
    outputs, _ = run_all(scheduler, {0: 2})
    assert outputs[0] == expected_output(range(20), 2)


def run_all(scheduler, lengths):
    outputs, plans = {}, []
    while scheduler.has_work:
        plan = run_step(scheduler, lengths, outputs)
        assert plan is not None
        plans.append(plan)
    return outputs, plans


def chunk_bounds(plans, request_id=0):
    return [(c.start, c.end) for plan in plans for c in plan.chunks if c.sequence_id == request_id and c.num_tokens > 1]


def test_a_decode_that_loses_its_place_leaves_the_step_to_the_prompts():
    """Two prompts hold all but two blocks, which are kept for the streams, when the only stream needs one more."""
    cost = StepCost((0.001, 0.001, 1e-6, 1e-6, 1e-6))
    scheduler = make_scheduler(num_blocks=12, chunk_size=7, overlap=2, target=0.006, cost=cost)
    lengths, outputs = {0: 1, 1: 1, 2: 7}, {}
    scheduler.submit(make_request(0, range(200, 230), priority=1))
    for _ in range(4):
        run_step(scheduler, lengths, outputs)
    scheduler.submit(make_request(1, range(8), priority=1))
    scheduler.submit(make_request(2, range(200, 215), priority=1))
    run_step(scheduler, lengths, outputs)
    scheduler.pause(1, is_paused=True)
    run_step(scheduler, lengths, outputs)
    scheduler.pause(1, is_paused=False)
    plans = []
    while scheduler.has_work:
        plans.append(run_step(scheduler, lengths, outputs))
        assert plans[-1] is not None
    assert any(2 in plan.preempted for plan in plans), "the case that this is about"
    assert outputs[2] == expected_output(range(200, 215), 7)


def test_a_prompt_takes_blocks_as_its_chunks_run():
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(32)))
    assert scheduler.pool.num_held == 0
    for num_blocks in (2, 4, 6, 8):
        run_step(scheduler, {0: 1}, {})
        assert scheduler.pool.num_held in (num_blocks, 0)


def test_a_step_carries_every_decode_beside_a_chunk():
    scheduler = make_scheduler(chunk_size=8)
    for request_id in range(2):
        scheduler.submit(make_request(request_id, range(4)))
    outputs = {}
    run_step(scheduler, {0: 50, 1: 50}, outputs)
    scheduler.submit(make_request(2, range(100, 140)))
    plan = run_step(scheduler, {0: 50, 1: 50, 2: 1}, outputs)
    assert {c.sequence_id: c.num_tokens for c in plan.chunks} == {0: 1, 1: 1, 2: 8}


def test_a_second_equal_prompt_starts_at_the_hit():
    scheduler = make_scheduler()
    scheduler.submit(make_request(0, range(30)))
    run_all(scheduler, {0: 1})
    scheduler.submit(make_request(1, range(30)))
    sequence = scheduler.sequences[1]
    outputs, plans = run_all(scheduler, {1: 3})
    assert sequence.num_cached == 28
    assert chunk_bounds(plans, 1) == [(28, 30)]
    assert outputs[1] == expected_output(range(30), 3)


def test_a_prompt_of_whole_blocks_still_computes_its_last_token():
    scheduler = make_scheduler()
    for request_id in range(2):
        scheduler.submit(make_request(request_id, range(32)))
        sequence = scheduler.sequences[request_id]
        run_all(scheduler, {request_id: 1})
    assert sequence.num_cached == 28


def hits(scheduler, request_id, prompt, **values):
    sequence = scheduler.submit(make_request(request_id, prompt, **values))
    run_all(scheduler, {request_id: 1})
    return sequence.hits


def test_hits_are_counted_by_the_reason_why_their_blocks_were_there():
    scheduler = make_scheduler(num_blocks=24)
    hits(scheduler, 0, range(30))
    assert hits(scheduler, 1, [*range(20), 99, 98]) == Hits(recent=20)
    assert scheduler.holdings.pin(range(25), rotary="default", scope="", until=60.0, most=4) == 24
    assert hits(scheduler, 2, range(30)) == Hits(pinned=16, recent=12)
    scheduler.expire(60.0)
    assert hits(scheduler, 3, range(30)) == Hits(recent=28)
    first, second = (scheduler.submit(make_request(request_id, range(200, 230))) for request_id in (4, 5))
    run_all(scheduler, {4: 1, 5: 1})
    assert first.hits.num_tokens + second.hits.num_tokens == 28, "each block is computed by one of them"
    assert first.hits.running + second.hits.running >= 24


def test_what_a_request_computed_before_it_lost_its_place_is_no_hit():
    scheduler = make_scheduler(num_blocks=8, chunk_size=8)
    outputs, lengths = {}, {0: 20, 1: 20}
    sequences = [
        scheduler.submit(make_request(request_id, range(100 * request_id, 100 * request_id + 8)))
        for request_id in lengths
    ]
    while scheduler.has_work:
        run_step(scheduler, lengths, outputs)
    assert scheduler.num_preemptions, "the case that this is about"
    assert [sequence.hits for sequence in sequences] == [Hits(), Hits()]


def test_a_pinned_prefix_outlives_a_flood_and_gives_way_before_a_stream_does():
    scheduler = make_scheduler(num_blocks=16)
    hits(scheduler, 0, range(30))
    scheduler.holdings.pin(range(29), rotary="default", scope="", until=60.0, most=8)
    for request_id in range(1, 10):
        hits(scheduler, request_id, range(100 * request_id, 100 * request_id + 30))
    assert hits(scheduler, 10, range(30)) == Hits(pinned=28)
    hits(scheduler, 11, range(2000, 2060))
    assert scheduler.num_preemptions == 0


def chunk_ends_of(scheduler, request_id, prompt, **values):
    """(tokens found, ends of chunks) of a prompt that is read alone, its states held to the tokens that made them."""
    sequence, states, ends = scheduler.submit(make_request(request_id, prompt, **values)), {}, []
    states |= scheduler.told_states
    while scheduler.has_work:
        plan = run_step(scheduler, {request_id: 1}, {}, states)
        ends += [chunk.end for chunk in plan.chunks]
    scheduler.told_states = states
    return sequence.num_cached, ends


def test_the_place_where_two_prompts_part_is_a_checkpoint_for_the_third():
    scheduler = make_scheduler(num_blocks=200, chunk_size=64, num_checkpoints=8)
    scheduler.told_states = {}
    assert chunk_ends_of(scheduler, 0, range(200)) == (0, [64, 128, 192, 200])
    shifted = [*range(101), *range(900, 910), *range(101, 200)]
    found, ends = chunk_ends_of(scheduler, 1, shifted)
    assert (found, ends[0]) == (0, 64), "no state was kept there, for none was wanted"
    assert 100 in ends
    assert chunk_ends_of(scheduler, 2, [*range(101), *range(700, 800)])[0] == 100


def test_a_fork_that_is_told_is_a_checkpoint_for_the_second():
    scheduler = make_scheduler(num_blocks=200, chunk_size=64, num_checkpoints=8)
    scheduler.told_states = {}
    assert 100 in chunk_ends_of(scheduler, 0, range(200), forks=(102,))[1]
    assert chunk_ends_of(scheduler, 1, [*range(102), *range(900, 1000)])[0] == 100


def test_an_aborted_prompt_resumes_where_it_stood():
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(40)))
    for _ in range(3):
        run_step(scheduler, {0: 1}, {})
    scheduler.abort(0)
    scheduler.submit(make_request(1, range(40)))
    sequence = scheduler.sequences[1]
    _, plans = run_all(scheduler, {1: 1})
    assert sequence.num_cached == 24
    assert chunk_bounds(plans, 1)[0] == (24, 32)


def test_prompt_logprobs_bypass_prefix_hits():
    scheduler = make_scheduler()
    scheduler.submit(make_request(0, range(30)))
    run_all(scheduler, {0: 1})
    request = Request(id=1, prompt=tuple(range(30)), sampling=SamplingParams(prompt_logprobs=0), arrived_at=0.0)
    sequence = scheduler.submit(request)
    run_all(scheduler, {1: 1})
    assert sequence.num_cached == 0


@pytest.mark.parametrize("num_checkpoints", [None, 8])
@pytest.mark.parametrize("is_together", [False, True])
def test_prefixes_are_found_within_their_scope_alone(is_together, num_checkpoints):
    """Computed already, or still being read by another request in flight."""
    scheduler, cached = make_scheduler(num_checkpoints=num_checkpoints), []
    for request_id, scope in enumerate(["one", "other", "one", ""]):
        cached.append(scheduler.submit(make_request(request_id, range(30), scope=scope)))
        if not is_together:
            run_all(scheduler, {request_id: 1})
    run_all(scheduler, dict.fromkeys(range(4), 1))
    first, other, again, unnamed = (sequence.num_cached for sequence in cached)
    assert (other, unnamed) == (0, 0)
    assert first + again > 0 or (is_together and num_checkpoints), "states are found when they are saved"


def test_overlap_goes_back_in_place_and_never_into_a_shared_block():
    scheduler = make_scheduler(chunk_size=8, overlap=3)
    scheduler.submit(make_request(0, range(20)))
    _, plans = run_all(scheduler, {0: 1})
    assert chunk_bounds(plans) == [(0, 8), (5, 13), (10, 18), (15, 20)]
    scheduler.submit(make_request(1, range(20)))
    _, plans = run_all(scheduler, {1: 1})
    assert chunk_bounds(plans, 1)[0][0] == 16  # behind the hit, with no way back into it


def test_a_streamed_prompt_is_computed_as_it_is_read():
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(9), prompt_is_complete=False))
    outputs = {}
    plan = run_step(scheduler, {0: 2}, outputs)
    assert [(c.start, c.end, c.wants_logits) for c in plan.chunks] == [(0, 8, False)]
    assert scheduler.next_step() is None  # the last known token waits for what follows it
    scheduler.extend_prompt(0, range(9, 12), is_last=True)
    while scheduler.has_work:
        run_step(scheduler, {0: 2}, outputs)
    assert outputs[0] == expected_output(range(12), 2)


@pytest.mark.parametrize(
    ("num_computed", "values", "num_cached"),
    [
        (30, {}, 16),
        (30, {"overlap": 3}, 16),
        (9, {"num_checkpoints": 5}, 0),  # the only checkpoint lies behind all that is known
    ],
)
def test_a_streamed_prompt_that_is_cached_still_computes_some_of_what_was_read(num_computed, values, num_cached):
    scheduler = make_scheduler(chunk_size=8, **values)
    scheduler.submit(make_request(0, range(num_computed)))
    run_all(scheduler, {0: 1})
    sequence = scheduler.submit(make_request(BLOCK, (), prompt_is_complete=False))
    outputs = {}
    while scheduler.has_work:
        feed(scheduler, {BLOCK: range(30)})
        assert run_step(scheduler, {BLOCK: 3}, outputs) is not None, "the stream stalls"
    assert outputs[BLOCK] == expected_output(range(30), 3)
    assert sequence.num_cached == num_cached


def test_the_memory_is_asked_for_the_longest_context_of_the_step():
    asked = []

    def fits(start, resident, wanted):
        asked.append(start)
        return wanted

    scheduler = make_scheduler(chunk_size=16, fits=fits)
    scheduler.submit(make_request(0, range(40)))
    lengths, outputs = {0: 9, 1: 1, 2: 1}, {}
    while 0 not in outputs:
        run_step(scheduler, lengths, outputs)
    scheduler.submit(make_request(1, range(100, 105)))
    scheduler.submit(make_request(2, range(200, 206)))
    asked.clear()
    plan = run_step(scheduler, lengths, outputs)
    assert {c.sequence_id: c.num_tokens for c in plan.chunks} == {0: 1, 1: 5, 2: 6}
    assert set(asked) == {40}


def test_the_chunk_shrinks_with_the_memory_that_is_left():
    scheduler = make_scheduler(chunk_size=16, fits=lambda start, resident, wanted: min(wanted, max(1, 16 - start // 4)))
    scheduler.submit(make_request(0, range(60)))
    _, plans = run_all(scheduler, {0: 1})
    sizes = [end - start for start, end in chunk_bounds(plans)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16
    assert sizes[-1] < 16


@pytest.mark.parametrize(("num_tokens", "limits"), [(100, {"max_context": 100}), (64, {"num_blocks": 16})])
def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(num_tokens, limits):
    scheduler = make_scheduler(**limits)
    with pytest.raises(PromptTooLong, match=str(num_tokens)):
        scheduler.submit(make_request(0, range(num_tokens)))
    assert not scheduler.has_work


def test_a_stream_that_outgrows_the_context_is_refused_when_it_does():
    scheduler = make_scheduler(max_context=20)
    scheduler.submit(make_request(0, range(10), prompt_is_complete=False))
    with pytest.raises(PromptTooLong):
        scheduler.extend_prompt(0, range(10, 30), is_last=False)


def test_the_youngest_is_preempted_and_still_gives_the_same_answer():
    scheduler = make_scheduler(num_blocks=10, chunk_size=8)
    for request_id in range(3):
        scheduler.submit(make_request(request_id, [request_id * 50 + i for i in range(16)]))
    outputs, plans = run_all(scheduler, {0: 12, 1: 12, 2: 12})
    assert any(plan.preempted for plan in plans)
    assert all(0 not in plan.preempted for plan in plans)
    for request_id in range(3):
        assert outputs[request_id] == expected_output([request_id * 50 + i for i in range(16)], 12)


FOREVER = 10**6
COST = (0.004, 2e-5, 5e-10, 4e-9, 1e-7)


def with_decodes(num_decodes, **values):
    """A scheduler in which that many sequences decode and nothing else waits."""
    scheduler = make_scheduler(num_blocks=16_384, max_running=64, max_context=60_000, **{"chunk_size": 64} | values)
    for request_id in range(num_decodes):
        scheduler.submit(make_request(request_id, [request_id] * 5))
    lengths = dict.fromkeys(range(1000), FOREVER)
    outputs = {}
    while any(sequence.is_prefilling for sequence in scheduler.sequences.values()):
        run_step(scheduler, lengths, outputs)
    return scheduler, lengths, outputs


def shares(plans):
    """(decodes, prompt tokens) of each step."""
    return [
        (sum(not c.is_prompt for c in plan.chunks), sum(c.num_tokens for c in plan.chunks if c.is_prompt))
        for plan in plans
    ]


def test_prefill_first_reads_all_prompts_before_any_decode():
    scheduler, lengths, outputs = with_decodes(3, priority=PrefillPriority.PREFILL_FIRST)
    scheduler.submit(make_request(10, range(64 * 5)))
    plans = [run_step(scheduler, lengths, outputs) for _ in range(7)]
    assert shares(plans) == [(0, 64)] * 5 + [(4, 0)] * 2


def test_prefill_first_lets_decodes_wait_no_longer_than_its_bound():
    scheduler, lengths, outputs = with_decodes(2, priority=PrefillPriority.PREFILL_FIRST, chunk_size=4)
    scheduler.submit(make_request(10, range(4 * 900)))
    waits, wait = [], 0
    for num_decodes, _ in shares(run_step(scheduler, lengths, outputs) for _ in range(800)):
        wait = 0 if num_decodes else wait + 1
        waits.append(wait)
    assert max(waits) == POLICIES[PrefillPriority.PREFILL_FIRST].most_steps_without_decode


def test_interleaved_carries_every_decode_and_a_chunk_in_every_step():
    scheduler, lengths, outputs = with_decodes(5)
    scheduler.submit(make_request(10, range(64 * 4)))
    assert shares(run_step(scheduler, lengths, outputs) for _ in range(4)) == [(5, 64)] * 4


def test_interleaved_sizes_the_chunk_by_the_target_but_never_below_the_floor():
    cost = StepCost(COST)
    scheduler, lengths, outputs = with_decodes(5, chunk_size=4096, target=0.02, cost=cost, floor=16)
    scheduler.budget.lateness = 1.0
    scheduler.submit(make_request(10, range(50_000)))
    plans = [run_step(scheduler, lengths, outputs) for _ in range(60)]
    sizes = [num_tokens for _, num_tokens in shares(plans)]
    assert all(plan.predicted_s <= 0.02 for plan in plans)
    assert sizes[0] > 600
    assert sizes[-1] < sizes[0]
    scheduler.budget.target_s = 1e-6
    assert shares([run_step(scheduler, lengths, outputs)]) == [(5, 16)]


def test_prompts_that_share_a_step_without_decodes_share_its_time():
    """Of a machine that reads 300 tokens a second: the document fills what the question leaves, and no more."""
    cost, target = StepCost((0.01, 1 / 300, 1e-8, 1e-7, 1e-7)), 0.05
    scheduler = make_scheduler(
        num_blocks=16_384, chunk_size=1024, target=target, cost=cost, floor=16, max_context=60_000
    )
    scheduler.submit(make_request(0, range(20_000)))
    lengths, outputs = {0: 5, 1: 5}, {}
    alone = [run_step(scheduler, lengths, outputs) for _ in range(3)][-1]
    scheduler.submit(make_request(1, range(30_000, 30_020)))
    shared = run_step(scheduler, lengths, outputs)
    assert [c.sequence_id for c in shared.chunks] == [1, 0]
    for plan in (alone, shared):
        assert 2 * target < plan.predicted_s <= STRETCH_WITHOUT_DECODES * target
    scheduler.abort(1)
    scheduler.submit(make_request(2, range(40_000, 40_005)))
    scheduler.budget.target_s = 1e-6
    assert shares([run_step(scheduler, {2: 1}, outputs)]) == [(0, 5)]  # the floor is the step's, not each prompt's


def test_decode_priority_without_a_target_waits_for_the_decodes_up_to_its_bound():
    scheduler, lengths, outputs = with_decodes(3, priority=PrefillPriority.DECODE_PRIORITY, floor=16)
    scheduler.submit(make_request(10, range(640)))
    bound = POLICIES[PrefillPriority.DECODE_PRIORITY].most_steps_without_prefill
    found = shares(run_step(scheduler, lengths, outputs) for _ in range(2 * bound + 2))
    assert found == ([(3, 0)] * bound + [(3, scheduler.budget.overdue)]) * 2
    for request_id in range(3):
        scheduler.abort(request_id)
    assert shares([run_step(scheduler, lengths, outputs)]) == [(0, 64)]


def test_decode_priority_gives_prompts_what_the_target_leaves_which_may_be_nothing():
    cost = StepCost(COST)
    scheduler, lengths, outputs = with_decodes(
        4, priority=PrefillPriority.DECODE_PRIORITY, chunk_size=4096, target=0.02, cost=cost
    )
    scheduler.budget.lateness = 1.0
    scheduler.submit(make_request(10, range(30_000)))
    assert shares([run_step(scheduler, lengths, outputs)])[0][1] > 500
    scheduler.budget.target_s = 0.0041
    assert shares([run_step(scheduler, lengths, outputs)]) == [(4, 0)]


@pytest.mark.parametrize("priority", list(PrefillPriority))
def test_a_short_question_is_not_stuck_behind_a_long_document(priority):
    scheduler = make_scheduler(num_blocks=20_000, chunk_size=64, max_context=80_000, priority=priority)
    scheduler.submit(make_request(0, range(70_000)))
    lengths, outputs = {0: 1, 1: 5}, {}
    for _ in range(10):
        run_step(scheduler, lengths, outputs)
    scheduler.submit(make_request(1, range(90_000, 90_200)))
    plans = [run_step(scheduler, lengths, outputs) for _ in range(3)]
    assert any(chunk.sequence_id == 1 for plan in plans for chunk in plan.chunks)


def test_a_long_document_is_not_starved_by_a_flood_of_short_questions():
    """Twice as many prompt tokens arrive as can be read; the document still ends, after a bounded wait."""
    scheduler = make_scheduler(num_blocks=20_000, chunk_size=64, max_context=80_000, max_running=500)
    num_tokens = 6400
    scheduler.submit(make_request(0, range(num_tokens)))
    lengths, outputs = dict.fromkeys(range(10_000), 1), {}
    num_steps = 0
    while 0 not in outputs:
        num_steps += 1
        scheduler.submit(make_request(num_steps, [num_steps * 7 + i for i in range(128)]))
        run_step(scheduler, lengths, outputs)
        assert num_steps < 4 * num_tokens / 64, "the document starves"
    assert num_steps > num_tokens / 64, "the questions never went first"


def in_one_piece(kind, num_tokens, **values):
    """(limits, request 0) of a prompt that takes all its blocks with its first chunk."""
    limits = {"reads_whole": True} if kind == "whole" else {}
    if kind == "span":
        values["atomic_spans"] = (Span(start=0, end=num_tokens),)
    if kind == "source":
        values["source"] = SourceReading(num_tokens=num_tokens, num_passes=1)
    return limits, make_request(0, range(num_tokens + (kind == "source")), **values)


class ShortStreams:
    """Always so many short requests, the next as soon as one ends: they hold a part of the blocks between them."""

    def __init__(self, scheduler, num_present):
        self.scheduler, self.num_present = scheduler, num_present
        self.lengths, self.outputs, self.num_submitted = {0: 1}, {}, 0

    def step(self):
        num_missing = self.num_present - sum(request_id > 0 for request_id in self.scheduler.sequences)
        for _ in range(num_missing):
            self.num_submitted += 1
            self.lengths[self.num_submitted] = 8 + self.num_submitted * 7 % 33
            self.scheduler.submit(make_request(self.num_submitted, [self.num_submitted] * 8))
        return run_step(self.scheduler, self.lengths, self.outputs)

    def num_served(self):
        return sum(len(output) == self.lengths[request_id] for request_id, output in self.outputs.items())


@pytest.mark.parametrize("kind", ["whole", "span", "source"])
def test_what_is_read_in_one_piece_is_not_starved_by_a_flood_of_short_questions(kind):
    limits, request = in_one_piece(kind, 320)
    scheduler = make_scheduler(num_blocks=100, chunk_size=64, prefix=False, max_running=64, **limits)
    streams = ShortStreams(scheduler, 12)
    for _ in range(20):
        streams.step()
    scheduler.submit(request)
    num_steps = 0
    while 0 in scheduler.sequences:
        num_steps += 1
        streams.step()
        assert num_steps < 200, "it starves"
    num_served = streams.num_served()
    for _ in range(100):
        streams.step()
    assert streams.num_served() > num_served + 12


@pytest.mark.parametrize("ending", ["abort", "pause", "deadline"])
def test_others_join_again_when_what_lacks_blocks_does_not_wait_for_them_any_more(ending):
    limits, request = in_one_piece("whole", 320, deadline_at=10.0)
    scheduler = make_scheduler(num_blocks=100, chunk_size=64, prefix=False, max_running=64, **limits)
    scheduler.submit(make_request(1, range(100)))
    lengths, outputs = {0: 1, 1: FOREVER, 2: 1}, {}
    run_step(scheduler, lengths, outputs)
    scheduler.submit(request)
    scheduler.submit(make_request(2, range(400, 404), priority=1))
    assert [c.sequence_id for c in run_step(scheduler, lengths, outputs).chunks] == [1], "the case that this is about"
    if ending == "abort":
        scheduler.abort(0)
    elif ending == "pause":
        scheduler.pause(0, is_paused=True)
    else:
        scheduler.expire(10.0)
    assert [c.sequence_id for c in run_step(scheduler, lengths, outputs).chunks] == [1, 2]


def test_a_prompt_that_can_be_cut_keeps_nobody_from_joining():
    scheduler = make_scheduler(num_blocks=100, chunk_size=64, prefix=False, max_running=64)
    streams = ShortStreams(scheduler, 12)
    for _ in range(20):
        streams.step()
    scheduler.submit(make_request(0, range(320)))
    joined = []
    while scheduler.sequences[0].num_computed < 256:
        joined += streams.step().admitted
    assert any(request_id > 0 for request_id in joined)


def test_a_request_of_higher_priority_goes_first():
    scheduler = make_scheduler(chunk_size=8)
    scheduler.submit(make_request(0, range(16), priority=5))
    scheduler.submit(make_request(1, range(100, 132), priority=-1))
    plan = run_step(scheduler, {0: 1, 1: 1}, {})
    assert [chunk.sequence_id for chunk in plan.chunks] == [1]


def test_equal_prompts_in_flight_are_computed_once():
    scheduler = make_scheduler(num_blocks=256, chunk_size=16, max_running=8)
    for request_id in range(4):
        scheduler.submit(make_request(request_id, range(203)))
    outputs, plans = run_all(scheduler, dict.fromkeys(range(4), 2))
    num_computed = sum(chunk.num_tokens for plan in plans for chunk in plan.chunks if chunk.is_prompt)
    assert num_computed <= 203 + 3 * (BLOCK + 3)
    assert all(outputs[request_id] == expected_output(range(203), 2) for request_id in range(4))


def test_a_follower_takes_over_when_its_leader_is_aborted():
    scheduler = make_scheduler(num_blocks=256, chunk_size=16)
    for request_id in range(2):
        scheduler.submit(make_request(request_id, range(200)))
    lengths, outputs = {0: 1, 1: 2}, {}
    for _ in range(5):
        run_step(scheduler, lengths, outputs)
    held = set(scheduler.sequences[1].block_ids)
    assert held <= set(scheduler.sequences[0].block_ids)  # no block of its own
    scheduler.abort(0)
    rest, plans = run_all(scheduler, lengths)
    assert rest[1] == expected_output(range(200), 2)
    assert chunk_bounds(plans, 1)[0][0] >= 64


def test_a_full_queue_refuses_with_a_hint():
    scheduler = make_scheduler(max_running=1, max_waiting=2, max_waiting_tokens=100)
    scheduler.submit(make_request(0, range(60)))
    run_step(scheduler, {0: 1}, {})
    scheduler.submit(make_request(1, range(60)))
    with pytest.raises(QueueFull, match="100") as refused:
        scheduler.submit(make_request(2, range(60)))
    assert refused.value.retry_after_s >= 1
    scheduler.submit(make_request(3, range(5)))
    with pytest.raises(QueueFull, match="limit is 2"):
        scheduler.submit(make_request(4, range(5)))
    assert set(scheduler.sequences) == {0, 1, 3}


def test_who_finds_a_free_place_does_not_wait():
    scheduler = make_scheduler(max_running=4, max_waiting=2)
    for request_id in range(6):
        scheduler.submit(make_request(request_id, [request_id] * 5))
    with pytest.raises(QueueFull, match="2 requests wait, the limit is 2"):
        scheduler.submit(make_request(6, range(5)))
    run_step(scheduler, dict.fromkeys(range(6), 9), {})
    with pytest.raises(QueueFull, match="2 requests wait"):
        scheduler.submit(make_request(6, range(5)))
    scheduler.abort(0)
    scheduler.submit(make_request(6, range(5)))


def test_a_place_without_a_block_is_not_free():
    scheduler = make_scheduler(num_blocks=4, chunk_size=16, max_running=64, max_waiting=1)
    scheduler.submit(make_request(0, range(15)))
    run_step(scheduler, {0: 9}, {})
    scheduler.submit(make_request(1, range(5)))
    with pytest.raises(QueueFull, match="1 requests wait"):
        scheduler.submit(make_request(2, range(5)))


def test_tokens_that_are_announced_count_in_the_queue_before_they_come():
    """Those of a prompt whose images are still to be encoded."""
    scheduler = make_scheduler(max_waiting_tokens=100)
    scheduler.submit(make_request(0, (), prompt_is_complete=False, num_announced=90))
    with pytest.raises(QueueFull, match="90 prompt tokens wait and this prompt has 20"):
        scheduler.submit(make_request(1, (), prompt_is_complete=False, num_announced=20))
    scheduler.submit(make_request(2, range(10)))


def test_a_request_ends_when_its_deadline_passes():
    scheduler = make_scheduler()
    scheduler.submit(make_request(0, range(40), deadline_at=10.0))
    scheduler.submit(make_request(1, range(100, 140)))
    run_step(scheduler, {0: 1, 1: 1}, {})
    scheduler.expire(9.9)
    assert 0 in scheduler.sequences
    scheduler.expire(10.0)
    assert scheduler.take_ended() == [(0, "deadline")]
    assert list(scheduler.sequences) == [1]


def test_a_paused_sequence_rests_and_is_the_first_to_lose_its_blocks():
    scheduler = make_scheduler(num_blocks=12, chunk_size=16)
    scheduler.submit(make_request(0, range(20)))
    outputs, lengths = {}, {0: 3, 1: 3}
    run_step(scheduler, lengths, outputs)
    scheduler.pause(0, is_paused=True)
    scheduler.submit(make_request(1, range(100, 140)))
    while 1 in scheduler.sequences:
        plan = run_step(scheduler, lengths, outputs)
        assert all(chunk.sequence_id == 1 for chunk in plan.chunks)
    scheduler.pause(0, is_paused=False)
    while scheduler.has_work:
        run_step(scheduler, lengths, outputs)
    assert outputs[0] == expected_output(range(20), 3)
