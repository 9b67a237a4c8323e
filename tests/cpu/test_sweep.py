"""A step that is cut into tiles inside each layer gives the very numbers that chunks of a tile's size give."""

from dataclasses import replace
from itertools import pairwise

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from logit_recorder import LogitRecorder
from step_inputs import inputs_of
from tiny_models import prompt

from penstock.lanes.sweep import cut
from penstock.request import Finished
from penstock.schedule.budget import FIRST_LATENESS, StepCost
from penstock.schedule.sweeps import Sweeps

QUICK = ["llama", "qwen3-next", "gemma4-e", "phi3-longrope"]
FAMILIES = sorted(tiny_models.CONFIGS)
PROMPT = prompt(157)
PROMPTS = [PROMPT, prompt(45)[7:20]]
WHOLE = {"prefix_cache": False}


def logits_of(engine, *, tile=None, prompts=(PROMPT,)):
    recorder = LogitRecorder(engine)
    if tile is not None:
        engine.model.lane.sweep.width = tile
    engine.generate_batch(prompts, max_tokens=3, ignore_eos=True)
    return recorder.all


def assert_a_sweep_is_its_chunks(load, name, tile, **settings):
    swept = logits_of(load(name, chunk_size=0, **WHOLE, **settings), tile=tile)
    assert torch.equal(swept, logits_of(load(name, chunk_size=tile, **WHOLE, **settings)))


@pytest.mark.parametrize("tile", [7, 64])
@pytest.mark.parametrize("name", QUICK)
def test_a_sweep_gives_what_its_tiles_give_as_chunks(name, tile, load):
    assert_a_sweep_is_its_chunks(load, name, tile)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("settings", [{}, {"quantize": "int8"}], ids=str)
def test_so_it_does_in_c(settings, load):
    assert load("smollm3", dtype="bfloat16", **settings).model.lane.steps is not None
    assert_a_sweep_is_its_chunks(load, "smollm3", 7, dtype="bfloat16", **settings)


@pytest.mark.evidence
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_swept_as_it_is_read_in_chunks(name, load):
    assert_a_sweep_is_its_chunks(load, name, 7, dtype="bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", [1, 7, 64, 512])
@pytest.mark.parametrize("name", FAMILIES)
def test_so_it_is_in_every_tile(name, tile, dtype, load):
    assert_a_sweep_is_its_chunks(load, name, tile, dtype=dtype)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 16))
def test_tiles_hold_every_token_once_in_order_and_no_more_than_their_width(lengths, width):
    inputs, reached = inputs_of(*lengths), [100 * index for index in range(len(lengths))]
    tiles = list(cut(inputs, width))
    assert torch.equal(torch.cat([tile.ids_T for tile in tiles]), inputs.ids_T)
    for tile in tiles:
        assert len(tile.ids_T) == tile.query_starts[-1] <= width
        for sequence, length, end in zip(
            tile.sequence_ids, pairwise(tile.query_starts), tile.context_lens, strict=True
        ):
            reached[sequence] += length[1] - length[0]
            assert reached[sequence] == end, "a chunk goes on where it stopped"
            assert tile.block_table[tile.sequence_ids.index(sequence)] == (sequence,)
    assert reached == list(inputs.context_lens)


def test_a_resident_model_reads_a_whole_prompt_in_the_memory_of_a_tile(load):
    memory = load("llama").model.memory
    whole, tile = (memory.activation_bytes(num_tokens, 32_768) for num_tokens in (32_768, 1024))
    assert whole - tile == 32_768 * memory.shape.swept_bytes_per_token


def test_a_sweep_tells_how_far_it_is_after_each_layer(load):
    engine, told = load("llama", chunk_size=0), []
    engine.model.lane.sweep.width = 16
    engine.on_layer = told.append
    engine.generate(PROMPT, max_tokens=2)
    assert [event.num_computed for event in told] == [len(PROMPT) * layer // 4 for layer in (1, 2, 3)]
    assert {event.num_total for event in told} == {len(PROMPT)}


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_a_cancelled_sweep_ends_after_the_layer_and_others_go_on(name, load):
    expected = load(name, chunk_size=0).generate(PROMPTS[1], max_tokens=8, ignore_eos=True).token_ids
    engine, told = load(name, chunk_size=0), []
    engine.model.lane.sweep.width = 16
    stream = engine.submit(PROMPTS[1], max_tokens=8, ignore_eos=True)
    engine.step()
    left = engine.submit(PROMPT, max_tokens=8)

    def cancel(event):
        told.append(event.request_id)
        engine.cancel(left)

    engine.on_layer = cancel
    outputs = {}
    while len(outputs) < 2:
        outputs |= {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
    assert told == [left], "no layer after the one in which it was cancelled"
    assert outputs[left].finish_reason == "abort"
    assert outputs[left].token_ids == ()
    assert outputs[stream].token_ids == expected


def sweeping(engine):
    """Makes a prompt stop after its first layer: the time of two is more than the target."""
    engine.scheduler.limits = replace(
        engine.scheduler.limits, sweeps=Sweeps(num_layers=engine.model.lane.num_stops, are_forced=True)
    )
    engine.scheduler.budget.target_s = 0.1
    engine.scheduler.budget.cost = StepCost((0.0, 0.8 * 0.1 / FIRST_LATENESS * 4 / len(PROMPT), 0.0, 0.0, 0.0))


def outputs_beside(engine, begin):
    """An answer that is being written when a long prompt comes, and then a short one; with the plans of the steps."""
    plans, outputs = [], {}
    ids = [engine.submit(PROMPTS[1], max_tokens=30, ignore_eos=True)]
    engine.step()
    begin()
    engine.on_plan = plans.append
    ids += [engine.submit(tokens, max_tokens=6, ignore_eos=True) for tokens in (PROMPT, prompt(20, seed=9))]
    while len(outputs) < 3:
        outputs |= {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
    return plans, [outputs[request_id] for request_id in ids]


@pytest.mark.parametrize("name", ["llama", "gemma4-e", "phi3-longrope"])
def test_answers_go_on_between_the_layers_of_a_prompt_and_all_tokens_are_the_same(name, load):
    settings = {"chunk_size": 64, **WHOLE}
    _, expected = outputs_beside(load(name, **settings), lambda: None)
    engine = load(name, **settings)
    engine.model.lane.sweep.width = 64
    plans, found = outputs_beside(engine, lambda: sweeping(engine))
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    swept = [chunk.layers for plan in plans for chunk in plan.chunks if chunk.layers is not None]
    assert (swept[0].first, swept[0].end) == (0, 1)
    assert swept[-1].end == swept[-1].num_layers
    assert all(len(plan.chunks) > 1 for plan in plans if any(chunk.layers for chunk in plan.chunks))
    assert len(found[1].chunks) < len(expected[1].chunks), "a sweep is told as one chunk"
    assert found[1].chunks[-1].end == len(PROMPT)
    assert not engine.model.lane.sweep._stopped, "hidden states are kept of nobody"


@pytest.fixture
def stopped(load):
    """An engine whose long prompt stands after its first layer, and what it would answer."""
    expected = load("llama", **WHOLE).generate(PROMPT, max_tokens=6, ignore_eos=True).token_ids
    engine = load("llama", **WHOLE)
    engine.submit(PROMPTS[1], max_tokens=30, ignore_eos=True)
    engine.step()
    sweeping(engine)
    request_id = engine.submit(PROMPT, max_tokens=6, ignore_eos=True)
    engine.step()
    assert list(engine.model.lane.sweep._stopped) == [request_id]
    return engine, request_id, expected


def test_a_prompt_that_is_cancelled_between_two_layers_leaves_nothing(stopped):
    engine, request_id, _ = stopped
    engine.cancel(request_id)
    (left,) = [event.output for event in engine.step() if isinstance(event, Finished)]
    assert (left.finish_reason, left.token_ids) == ("abort", ())
    assert not engine.model.lane.sweep._stopped
    engine.scheduler.check()


def test_a_step_that_breaks_in_a_later_layer_begins_the_prompt_again(stopped):
    engine, request_id, expected = stopped
    with torch.inference_mode():  # numbers of a step that never was
        engine.model.lane.sweep._stopped[request_id][0].fill_(float("nan"))

    def break_off(event):
        engine.on_layer = None
        raise OSError("broken")

    def run_until_it_breaks():
        while engine.on_layer is not None:
            engine.step()

    engine.on_layer = break_off
    with pytest.raises(OSError, match="broken"):
        run_until_it_breaks()
    outputs = {}
    while len(outputs) < 2:
        outputs |= {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
    assert outputs[request_id].token_ids == expected
