import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.errors import PromptTooLong
from penstock.request import Request, SamplingParams, StepResult
from penstock.schedule.budget import TokenBudget
from penstock.schedule.scheduler import Limits, Scheduler

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
    **limits,
):
    pool = BlockPool(num_blocks)
    return Scheduler(
        limits=Limits(**{"block_size": BLOCK, "max_context": 10_000, "max_running": 4} | limits),
        budget=TokenBudget(ceiling=chunk_size, floor=floor, target_s=target, cost=cost),
        pool=pool,
        prefix=PrefixCache(pool) if prefix else None,
        model_identity="test",
        chunk_limit=fits or (lambda start, resident, wanted: wanted),
        peak_estimate=lambda chunk, context, resident: chunk,
    )


def make_request(request_id, prompt, **values):
    return Request(id=request_id, prompt=tuple(prompt), sampling=SamplingParams(), arrived_at=0.0, **values)


def next_token(tokens):
    """A model of sorts: the token after a sequence depends on all of it."""
    return hash(tuple(tokens)) % 97


def run_step(scheduler, lengths, outputs):
    """Runs one step with `next_token` as the model; ends a sequence after lengths[id] tokens."""
    plan = scheduler.next_step()
    if plan is None:
        return None
    tokens, finished = {}, {}
    for chunk in plan.chunks:
        sequence = scheduler.sequences[chunk.sequence_id]
        if chunk.wants_logits:
            token = next_token(sequence.tokens[: chunk.end])
            tokens[sequence.id] = token
            outputs.setdefault(sequence.id, []).append(token)
            if len(outputs[sequence.id]) == lengths[sequence.id]:
                finished[sequence.id] = "length"
    scheduler.apply(
        StepResult(step=plan.step, token_by_sequence=tokens, finished=finished, elapsed_s=0.0, peak_bytes=0)
    )
    return plan


def expected_output(prompt, length):
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, aborts and failed steps over a tiny pool: every request ends with what it gives alone."""

    def __init__(self):
        super().__init__()
        self.scheduler = make_scheduler(num_blocks=12, chunk_size=7, overlap=2)
        self.prompts, self.lengths, self.outputs, self.aborted = {}, {}, {}, set()

    @rule(seed=st.integers(0, 3), length=st.integers(1, 30), num_generated=st.integers(1, 9))
    def submit(self, seed, length, num_generated):
        request_id = len(self.prompts)
        self.prompts[request_id] = [seed * 100 + i for i in range(length)]
        self.lengths[request_id] = num_generated
        self.scheduler.submit(make_request(request_id, self.prompts[request_id]))

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.sequences)))
        self.scheduler.abort(request_id)
        self.aborted.add(request_id)

    @rule()
    def step(self):
        had_work = self.scheduler.has_work
        plan = run_step(self.scheduler, self.lengths, self.outputs)
        assert (plan is not None) == had_work, "work was there and nothing was planned"

    @rule()
    def fail_a_step(self):
        plan = self.scheduler.next_step()
        if plan is not None:
            self.scheduler.fail(plan.step)

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def abort_in_flight(self, data):
        plan = self.scheduler.next_step()
        if plan is None:
            return
        request_id = data.draw(st.sampled_from(sorted(chunk.sequence_id for chunk in plan.chunks)))
        self.scheduler.abort(request_id)
        self.aborted.add(request_id)
        assert request_id in self.scheduler.sequences, "blocks in flight are not given away"
        self.scheduler.fail(plan.step)
        assert request_id not in self.scheduler.sequences

    @invariant()
    def the_pool_is_intact(self):
        self.scheduler.check()

    def teardown(self):
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            run_step(self.scheduler, self.lengths, self.outputs)
        assert not self.scheduler.has_work, "a request never ended"
        self.scheduler.check()
        for request_id in set(self.prompts) - self.aborted:
            expected = expected_output(self.prompts[request_id], self.lengths[request_id])
            assert self.outputs[request_id] == expected


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def run_all(scheduler, lengths):
    outputs, plans = {}, []
    while scheduler.has_work:
        plan = run_step(scheduler, lengths, outputs)
        assert plan is not None
        plans.append(plan)
    return outputs, plans


def chunk_bounds(plans, request_id=0):
    return [(c.start, c.end) for plan in plans for c in plan.chunks if c.sequence_id == request_id and c.num_tokens > 1]


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
