"""A step that is cut into tiles inside each layer gives the very numbers that chunks of a tile's size give."""

from itertools import accumulate, pairwise

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from logit_recorder import LogitRecorder
from tiny_models import prompt

from penstock.attention.backend import ForwardInputs
from penstock.lanes.sweep import cut
from penstock.request import Finished

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


def inputs_of(*lengths: int) -> ForwardInputs:
    starts = tuple(accumulate(lengths, initial=0))
    return ForwardInputs(
        ids_T=torch.arange(starts[-1]),
        positions_T=torch.arange(starts[-1]),
        query_starts=starts,
        context_lens=tuple(100 * index + length for index, length in enumerate(lengths)),
        block_table=tuple((index,) for index in range(len(lengths))),
        rotary_variants=("default",) * len(lengths),
        sequence_ids=tuple(range(len(lengths))),
        logit_rows=torch.empty(0),
        state_slots=tuple(range(len(lengths))),
    )


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
