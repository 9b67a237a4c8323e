"""Embeddings of prompts that are read in chunks are those of the whole prompt."""

import pytest
import torch
from tiny_models import prompt

from penstock.errors import InvalidSetting


def reference(model, tokens, pooling):
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden.mean(0) if pooling == "mean" else hidden[-1], dim=0)


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("chunk_size", [0, 1, 7, 64])
def test_a_chunked_embedding_is_that_of_the_whole_prompt(load, tiny, name, pooling, chunk_size):
    tokens = prompt(90)
    output = load(name, chunk_size=chunk_size).generate(tokens, pooling=pooling, max_tokens=1)
    expected = reference(tiny(name)[1], tokens, pooling)
    assert torch.tensor(output.embedding) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_prefix_that_was_read_before_changes_nothing(load, pooling):
    engine = load(chunk_size=16)
    first = engine.generate(prompt(90), pooling=pooling, max_tokens=1)
    again = engine.generate(prompt(90), pooling=pooling, max_tokens=1)
    assert again.num_cached_tokens == (0 if pooling == "mean" else 80)
    assert again.embedding == pytest.approx(first.embedding, abs=1e-5)


def test_overlapping_chunks_count_every_token_once(load, tiny):
    output = load(chunk_size=16, overlap=5).generate(prompt(90), pooling="mean", max_tokens=1)
    assert torch.tensor(output.embedding) == pytest.approx(reference(tiny("llama")[1], prompt(90), "mean"), abs=1e-4)


def test_only_those_who_ask_get_one(load):
    embedded, usual = load(chunk_size=16), load(chunk_size=16)
    first = embedded.submit(prompt(40), pooling="mean", max_tokens=1)
    second = embedded.submit(prompt(40, seed=2), max_tokens=5, ignore_eos=True)
    outputs = {}
    while embedded.scheduler.has_work:
        for event in embedded.step():
            if hasattr(event, "output"):
                outputs[event.request_id] = event.output
    assert len(outputs[first].embedding) == 64
    assert outputs[second].embedding is None
    alone = usual.generate(prompt(40, seed=2), max_tokens=5, ignore_eos=True)
    assert outputs[second].token_ids == alone.token_ids


def test_a_lane_without_hidden_states_refuses(load):
    with pytest.raises(InvalidSetting, match="transformers-generic-text"):
        load(lane="transformers-generic-text").generate(prompt(5), pooling="mean")
