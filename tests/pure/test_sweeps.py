from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import make_request, make_scheduler, run_step

from penstock.config import PrefillPriority
from penstock.request import Chunk, LayerGroup
from penstock.schedule.budget import StepCost, StepLoad
from penstock.schedule.sweeps import Sweeps
from penstock.simulate.costs import MACHINES
from penstock.simulate.report import RunSummary
from penstock.simulate.simulate import simulate
from penstock.simulate.workloads import SIZES, beside

COST = StepCost((0.004, 0.001, 1e-6, 1e-6, 1e-5))
DECODES = StepLoad(num_tokens=4, decode_contexts=400)


def chunk_of(start, num_tokens, layers=None):
    end = start + num_tokens
    return Chunk(sequence_id=0, start=start, end=end, wants_logits=False, num_prompt_tokens=10_000, layers=layers)


@given(st.integers(0, 5_000), st.integers(1, 4_000), st.integers(2, 40), st.data())
def test_the_load_of_all_layers_is_that_of_a_chunk_however_they_are_grouped(start, num_tokens, num_layers, data):
    cut = data.draw(st.integers(1, num_layers - 1))
    groups = [LayerGroup(first=first, end=end, num_layers=num_layers) for first, end in ((0, cut), (cut, num_layers))]
    chunks, loads = [chunk_of(start, num_tokens, layers) for layers in groups], [StepLoad(), StepLoad()]
    for load, chunk in zip(loads, chunks, strict=True):
        load.count(chunk)
    whole = StepLoad().with_chunk(start, num_tokens)
    assert sum(load.num_passes for load in loads) == pytest.approx(1)
    assert sum(load.num_tokens for load in loads) == pytest.approx(num_tokens, abs=2)
    assert sum(load.token_contexts for load in loads) == pytest.approx(whole.token_contexts, abs=2)
    assert sum(load.chunk_contexts for load in loads) >= whole.chunk_contexts - 2
    loads[1].count(chunks[1], -1)
    assert loads[1] == StepLoad()


@given(st.floats(0.0, 0.5), st.integers(0, 5_000), st.integers(1, 3_000), st.integers(1, 40), st.integers(0, 39))
def test_the_next_layers_are_as_many_as_the_step_has_time_for(limit_s, start, num_tokens, num_layers, num_done):
    sweeps, num_done = Sweeps(num_layers=num_layers), min(num_done, num_layers - 1)
    done = LayerGroup(first=0, end=num_done, num_layers=num_layers)
    cursor = chunk_of(start, num_tokens, done)
    found = sweeps.taken_on(COST, DECODES, cursor, limit_s, least=0)
    end = num_done if found is None else found.layers.end
    assert num_done <= end <= num_layers
    if found is not None:
        assert found.layers.first == num_done
        assert COST.predict(DECODES.with_chunks(found)) <= limit_s
    if end < num_layers:
        one_more = LayerGroup(first=num_done, end=end + 1, num_layers=num_layers)
        assert COST.predict(DECODES.with_chunks(replace(cursor, layers=one_more))) > limit_s
    assert sweeps.taken_on(COST, DECODES, cursor, 0.0, least=1).layers.end == num_done + 1


def test_a_sweep_begins_late_in_a_prompt_where_short_chunks_fetch_all_keys_again():
    sweeps, cost = Sweeps(num_layers=30), StepCost((0.004, 0.001, 0, 1e-6, 2e-6))
    early, late = (cost.largest_chunk(DECODES, start, 4_000, 0.05) for start in (0, 12_000))
    assert sweeps.begun(cost, DECODES, chunk_of(0, early), 4_000, 0.05) is None
    swept = sweeps.begun(cost, DECODES, chunk_of(12_000, late), 4_000, 0.05)
    assert swept.num_tokens > 10 * late
    assert swept.layers.first == 0 < swept.layers.end


def test_where_no_chunk_is_short_enough_for_the_target_layers_are():
    sweeps, chunk = Sweeps(num_layers=30), chunk_of(4_000, 16)
    assert COST.predict(DECODES.with_chunk(4_000, 16)) > 0.05
    assert sweeps.begun(COST, DECODES, chunk, 4_000, 0.05).layers.end == 1


def test_answers_go_on_between_the_layers_of_a_prompt():
    sweeps = Sweeps(num_layers=10, are_forced=True)
    scheduler = make_scheduler(target=0.05, cost=StepCost((0.004, 0.001, 0, 0, 0)), num_blocks=400, sweeps=sweeps)
    lengths, outputs = {0: 40, 1: 2, 2: 1}, {}
    scheduler.submit(make_request(0, range(5)))
    run_step(scheduler, lengths, outputs)
    scheduler.submit(make_request(1, range(100, 500)))
    plans = [run_step(scheduler, lengths, outputs)]
    assert plans[0].chunks[1].layers is not None
    scheduler.submit(make_request(2, range(3)))
    while len(outputs.get(1, [])) < 2:
        plans.append(run_step(scheduler, lengths, outputs))
    swept = [chunk for plan in plans for chunk in plan.chunks if chunk.layers is not None and chunk.start == 0]
    assert [chunk.layers.first for chunk in swept] == [0, *(chunk.layers.end for chunk in swept[:-1])]
    assert swept[-1].is_through
    assert all(any(chunk.sequence_id == 0 for chunk in plan.chunks) for plan in plans), "no step without the answer"
    assert all(plan.predicted_s <= 0.05 for plan in plans)
    assert len(outputs[2]) == 1, "a short question came and went meanwhile"
    assert scheduler.sequences.keys() == {0}


@pytest.mark.parametrize(
    "request_values", [{"chunk_size": 8}, {"prompt_is_complete": False}, {"sampling": {"prompt_logprobs": 0}}], ids=str
)
def test_prompts_that_need_chunks_are_read_in_chunks(request_values):
    sweeps = Sweeps(num_layers=10, are_forced=True)
    scheduler = make_scheduler(target=0.05, cost=COST, num_blocks=400, sweeps=sweeps)
    scheduler.submit(make_request(0, range(400), **request_values))
    assert all(chunk.layers is None for chunk in scheduler.next_step().chunks)


def test_auto_picks_what_keeps_the_target_and_of_these_the_faster():
    found = [
        RunSummary.of(
            simulate(
                beside(SIZES["cpu"], Random(1)),
                replace(MACHINES["cpu"], reading=reading),
                priority=PrefillPriority.INTERLEAVED,
                target_s=0.2,
                seed=1,
            ),
            "beside-64k",
        )
        for reading in ("chunks", "sweeps", "auto")
    ]
    chunks, sweeps, auto = (summary.long_prompt_ttft_s for summary in found)
    assert auto < 0.9 * chunks
    assert sweeps < 0.9 * chunks
    assert all(summary.gap_p99_ms < 220 for summary in found)
