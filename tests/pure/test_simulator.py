from dataclasses import replace
from random import Random

import pytest

from penstock.config import PrefillPriority
from penstock.schedule.budget import StepLoad
from penstock.simulate.costs import MACHINES
from penstock.simulate.report import TARGETS_S, RunSummary, check_all, check_lone_question
from penstock.simulate.scheduling_cost import measure
from penstock.simulate.simulate import calibrated_cost, simulate
from penstock.simulate.workloads import SCENARIOS, SIZES, Arrival, Arrivals, beside, day
from penstock.trace.percentile import percentile

H200 = MACHINES["h200"]
SMALL = replace(SIZES["h200"], prompt=16_384, document=65_536, day_requests=150, day_s=60.0, num_decoded=512)


def small_trace():
    rng = Random(3)
    arrivals = [
        Arrival(at_s=rng.uniform(0, 2), num_prompt_tokens=rng.randint(1, 6_000), num_generated=rng.randint(1, 40))
        for _ in range(30)
    ]
    return Arrivals(title="small", arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)))


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_fitted_costs_reproduce_the_measured_figures(machine):
    for measurement in machine.measurements:
        assert machine.seconds(measurement.features) == pytest.approx(measurement.elapsed_s, rel=0.15)
    assert all(coefficient >= 0 for coefficient in machine.coefficients)


def test_the_fitted_costs_predict_what_they_were_not_fitted_to():
    """vLLM with 8,192 tokens per step, 65k beside 32 decodes: TTFT 3.55 s, p99 gap 656 ms."""
    run = simulate(beside(SIZES["h200"], Random(1)), H200, priority=PrefillPriority.INTERLEAVED, target_s=None, seed=1)
    summary = RunSummary.of(run, "beside-64k")
    assert summary.long_prompt_ttft_s == pytest.approx(3.55, rel=0.1)
    assert summary.gap_p99_ms == pytest.approx(656, rel=0.1)


def test_a_short_calibration_finds_the_cost_of_a_mixed_step():
    cost = calibrated_cost(H200, Random(0))
    load = StepLoad(num_tokens=16, decode_contexts=16 * 512).with_chunk(8_192, 1_024)
    assert cost.predict(load) == pytest.approx(H200.seconds(load.features), rel=0.15)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_depends_on_nothing_but_its_seed(name):
    make = SCENARIOS[name]
    assert make(SMALL, Random(5)) == make(SMALL, Random(5))
    assert make(SMALL, Random(5)) != make(SMALL, Random(6))


def test_equal_seeds_give_equal_runs():
    def summary(seed):
        run = simulate(small_trace(), H200, priority=PrefillPriority.INTERLEAVED, target_s=0.05, seed=seed)
        return RunSummary.of(run, "small")

    assert summary(7) == summary(7)
    assert summary(7) != summary(8)


@pytest.mark.parametrize("target_s", [0.05, None])
@pytest.mark.parametrize("priority", PrefillPriority)
def test_every_request_ends_with_all_its_tokens(priority, target_s):
    trace = small_trace()
    run = simulate(trace, H200, priority=priority, target_s=target_s, seed=1)
    assert run.is_complete
    assert [run.lives[i].num_generated for i in range(30)] == [arrival.num_generated for arrival in trace.arrivals]
    assert len(run.gaps) == sum(arrival.num_generated - 1 for arrival in trace.arrivals)
    assert run.num_prompt_tokens == sum(arrival.num_prompt_tokens for arrival in trace.arrivals)


def test_the_promises_hold_beside_a_long_prompt():
    trace = beside(SMALL, Random(1))
    summaries = [
        RunSummary.of(simulate(trace, H200, priority=priority, target_s=target_s, seed=1), "beside-64k")
        for priority in PrefillPriority
        for target_s in TARGETS_S
    ]
    checks = check_all(summaries)
    assert len(checks) == 10
    assert [check for check in checks if not check.holds] == []


def test_a_lone_question_is_not_stuck_behind_a_document():
    assert [check for check in check_lone_question(H200, seed=1, sizes=SMALL) if not check.holds] == []


@pytest.mark.parametrize("priority", [PrefillPriority.INTERLEAVED, PrefillPriority.DECODE_PRIORITY])
def test_a_busy_hour_keeps_its_target(priority):
    run = simulate(day(SMALL, Random(1)), H200, priority=priority, target_s=0.05, seed=1)
    assert run.is_complete
    assert all(check.holds for check in check_all([RunSummary.of(run, "day")]))


def test_a_percentile_is_a_value_that_occurred():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99.0
    assert percentile([], 0.5) == 0.0


def test_scheduling_grows_no_faster_than_the_sequences():
    few, many = (min(measure(number, num_steps=60).us_per_sequence for _ in range(2)) for number in (64, 256))
    assert many < 1.5 * few
