"""What a replica tells of itself is what its scheduler does."""

from random import Random

import pytest

from penstock.cache.prefix import PrefixCache, root_hash
from penstock.config import PrefillPriority
from penstock.request import Request, StepResult
from penstock.route.news import MAX_HASHES, LoadMeter, Wanted, packed, short_hash
from penstock.schedule.scheduler import Scheduler
from penstock.simulate.costs import MACHINES
from penstock.simulate.simulate import SAMPLING, calibrated_cost, make_scheduler

BLOCK = 16


def scheduler_of(num_blocks: int = 256) -> Scheduler:
    machine = MACHINES["cpu"]
    cost = calibrated_cost(machine, Random(0))
    return make_scheduler(
        machine, priority=PrefillPriority.INTERLEAVED, target_s=None, num_blocks=num_blocks, cost=cost
    )


def submit(scheduler: Scheduler, number: int, prompt: range) -> None:
    scheduler.submit(Request(id=number, prompt=tuple(prompt), sampling=SAMPLING, arrived_at=0.0))


def step(scheduler: Scheduler) -> StepResult | None:
    plan = scheduler.next_step()
    if plan is None:
        return None
    tokens = {chunk.sequence_id: 1 for chunk in plan.chunks if chunk.wants_logits}
    result = StepResult(step=plan.step, token_by_sequence=tokens, finished={}, elapsed_s=1.0, peak_bytes=0)
    scheduler.apply(result)
    return result


def load_of(scheduler: Scheduler, meter: LoadMeter | None = None):
    return (meter or LoadMeter()).load(scheduler, model="m", identity="cpu", rotary="default")


def test_what_is_read_is_published_under_the_hashes_of_the_prompt():
    scheduler = scheduler_of()
    prompt = range(1, 100)
    submit(scheduler, 0, prompt)
    before = load_of(scheduler)
    step(scheduler)
    after = load_of(scheduler)
    wanted = Wanted.of(list(prompt), root_hash("cpu", "default"), BLOCK)
    assert before.hashes == frozenset()
    assert len(wanted.hashes) == 6
    assert set(wanted.hashes) <= after.hashes


def test_the_backlog_is_what_the_prompts_that_are_there_will_take():
    scheduler = scheduler_of()
    assert load_of(scheduler).backlog_s == 0
    submit(scheduler, 0, range(1, 2001))
    one = load_of(scheduler)
    assert one.num_unread_tokens == 2000
    assert one.backlog_s == pytest.approx(one.reading_s(0, 2000))
    submit(scheduler, 1, range(5000, 6000))
    two = load_of(scheduler)
    assert two.backlog_s == pytest.approx(two.reading_s(0, 2000) + two.reading_s(0, 1000))
    assert two.num_waiting == 2


def test_a_prompt_in_the_middle_counts_with_its_rest():
    scheduler = scheduler_of()
    submit(scheduler, 0, range(1, 2001))
    step(scheduler)
    rest = load_of(scheduler)
    assert rest.num_unread_tokens == 2000 - MACHINES["cpu"].ceiling
    assert 0 < rest.backlog_s < rest.reading_s(0, 2000)


def test_the_prediction_of_a_prompt_is_that_of_the_machine():
    machine = MACHINES["cpu"]
    load = load_of(scheduler_of())
    for measured in machine.measurements[:2]:
        num_tokens = round(measured.features[1])
        assert load.reading_s(0, num_tokens) == pytest.approx(measured.elapsed_s, rel=0.15)
    assert load.reading_s(500, 500) == 0


def test_without_a_target_the_cost_is_fitted_from_the_steps():
    machine, meter = MACHINES["cpu"], LoadMeter()
    scheduler = scheduler_of(num_blocks=4096)
    scheduler.budget.cost = None
    for number in range(40):
        submit(scheduler, number, range(10_000 * number, 10_000 * number + 200 + 37 * number))
        while (plan := scheduler.next_step()) is not None:
            chunks = [(chunk.end - chunk.start) for chunk in plan.chunks]
            tokens = {chunk.sequence_id: 1 for chunk in plan.chunks if chunk.wants_logits}
            finished = dict.fromkeys(tokens, "length")
            result = StepResult(
                step=plan.step,
                token_by_sequence=tokens,
                finished=finished,
                elapsed_s=0.02 + sum(chunks) / 800,
                peak_bytes=0,
            )
            meter.take_step(plan, result)
            scheduler.apply(result)
    load = load_of(scheduler, meter)
    assert load.reading_s(0, 1000) == pytest.approx(0.02 + 1000 / 800, rel=0.2)
    assert load.step_tokens == machine.ceiling


def test_of_many_hashes_those_that_a_number_divides_are_published():
    hashes = Random(1).sample(range(2**32), 3 * MAX_HASHES)
    divisor, text = packed(hashes)
    load = load_of(scheduler_of()).model_copy(update={"hash_divisor": divisor, "cached": text})
    assert divisor == 4
    assert load.hashes == {one for one in hashes if one % 4 == 0}


def test_only_what_would_be_found_is_published():
    scheduler = scheduler_of(num_blocks=16)
    assert isinstance(scheduler.prefix, PrefixCache)
    submit(scheduler, 0, range(1, 130))
    step(scheduler)
    assert load_of(scheduler).hashes == {short_hash(one) for one in scheduler.prefix.hashes}
    assert load_of(scheduler).num_free_blocks == 16 - len(scheduler.sequences[0].block_ids)
