"""The last layer works for the rows whose logits are asked, and gives them what it would give beside all others."""

from dataclasses import replace
from itertools import compress, pairwise

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from logit_recorder import LogitRecorder
from step_inputs import inputs_of
from tiny_models import prompt

from penstock.lanes.sweep import cut

QUICK = ["llama", "qwen3-next", "gemma4-e", "qwen3-moe"]
PROMPTS = [prompt(90), prompt(45)[7:20], prompt(33)]


def logits_of(engine, *, asks):
    run = engine.model.lane.run
    if not asks:
        engine.model.lane.run = lambda inputs: run(replace(inputs, asks_last=None))
    recorder = LogitRecorder(engine)
    engine.generate_batch(PROMPTS, max_tokens=4, ignore_eos=True)
    return recorder.all


def assert_others_are_not_missed(load, name):
    settings = {"chunk_size": 16, "prefix_cache": False, "dtype": "float32"}
    found, expected = (logits_of(load(name, **settings), asks=asks) for asks in (True, False))
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", QUICK)
def test_logits_are_those_of_a_last_layer_over_all_rows(name, load):
    assert_others_are_not_missed(load, name)


@pytest.mark.evidence
@pytest.mark.parametrize("name", sorted(set(tiny_models.CONFIGS) - set(QUICK)))
def test_so_they_are_in_every_family(name, load):
    assert_others_are_not_missed(load, name)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("settings", [{}, {"quantize": "int8"}], ids=str)
def test_in_c_they_are_the_same_to_the_bit(settings, load):
    engines = [load("smollm3", dtype="bfloat16", chunk_size=16, prefix_cache=False, **settings) for _ in range(2)]
    assert engines[0].model.lane.steps is not None
    found, expected = (logits_of(engine, asks=asks) for engine, asks in zip(engines, (True, False), strict=True))
    assert torch.equal(found, expected)


def test_prompt_logprobs_and_embeddings_need_every_row(load):
    engine, seen = load("llama", chunk_size=16), []
    run = engine.model.lane.run

    def watch(inputs):
        seen.append(inputs.of_asked_rows())
        return run(inputs)

    engine.model.lane.run = watch
    engine.generate(PROMPTS[0], max_tokens=1, prompt_logprobs=1)
    engine.generate(PROMPTS[1], max_tokens=1, pooling="mean")
    assert seen == [None] * len(seen) != []
    engine.generate(PROMPTS[0][1:], max_tokens=1)
    assert [asked.num_chunks for asked in seen if asked is not None] == [0, 0, 0, 0, 0, 1]


@st.composite
def steps(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    asks = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    inputs = inputs_of(*lengths)
    last_rows = [end - 1 for end in inputs.query_starts[1:]]
    logit_rows = torch.tensor(list(compress(last_rows, asks)), dtype=torch.long)
    return replace(inputs, logit_rows=logit_rows, asks_last=tuple(asks))


@given(steps(), st.integers(1, 16))
def test_every_asked_row_is_in_one_tile_and_keeps_its_context(inputs, width):
    contexts = compress(inputs.context_lens, inputs.asks_last)
    expected = dict(zip(inputs.ids_T[inputs.logit_rows].tolist(), contexts, strict=True))
    found = {}
    for tile in cut(inputs, width):
        asked = tile.of_asked_rows()
        if asked is None:  # all of its rows
            assert len(tile.logit_rows) == len(tile.ids_T) == sum(tile.asks_last)
            asked = tile
        assert all(end - start == 1 for start, end in pairwise(asked.query_starts))
        found |= dict(zip(asked.ids_T.tolist(), asked.context_lens, strict=True))
    assert found == expected
