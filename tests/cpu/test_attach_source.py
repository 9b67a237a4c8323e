"""Encoder-decoder models that are attached: their own generate gives the same tokens, with the source read in tiles."""

import pytest
import torch
import transformers
from tiny_models import prompt
from tiny_seq2seq import tiny_seq2seq

import penstock
from penstock.errors import InvalidSetting, PromptTooLong, UnsupportedModel


@pytest.fixture(scope="module", params=["t5", "bart", "t5gemma"])
def model(request):
    return tiny_seq2seq(request.param)


def generated(model, ids, **settings):
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False} | settings
    return model.generate(input_ids=ids, return_dict_in_generate=True, output_logits=True, **settings)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_generate_gives_the_same_tokens_and_logits(model, chunk_size):
    ids = torch.tensor([prompt(90)])
    plain = generated(model, ids)
    told = []
    with penstock.attach(model, chunk_size=chunk_size, on_progress=told.append) as attachment:
        found = generated(model, ids)
    assert torch.equal(found.sequences, plain.sequences)
    assert (torch.stack(found.logits) - torch.stack(plain.logits)).abs().max() <= 1e-4
    assert attachment.reading.applied
    assert attachment.reading.num_tokens == 90
    assert told[-1].num_computed == told[-1].num_total == 90
    assert torch.equal(generated(model, ids).sequences, plain.sequences)
    assert "generate" not in vars(model)


def test_beams_and_padded_batches_agree(model):
    ids = torch.tensor([prompt(40), [0] * 15 + prompt(25, seed=2)])
    mask = (torch.arange(40) >= torch.tensor([[0], [15]])).long()
    for settings in ({}, {"num_beams": 3}):
        plain = generated(model, ids, attention_mask=mask, **settings)
        with penstock.attach(model, chunk_size=16):
            assert torch.equal(generated(model, ids, attention_mask=mask, **settings).sequences, plain.sequences)


def test_a_budget_lowers_the_tile_or_refuses(model):
    ids = torch.tensor([prompt(200)])
    plain = generated(model, ids)
    with penstock.attach(model, chunk_size=150, memory="64GiB") as attachment:
        assert torch.equal(generated(model, ids).sequences, plain.sequences)
        assert not attachment.reading.adjustments
    with penstock.attach(model, chunk_size=150, memory="1MiB"), pytest.raises(PromptTooLong, match="raise memory"):
        generated(model, ids)


def test_what_cannot_be_read_in_tiles_is_refused(model):
    with penstock.attach(model, chunk_size=16), pytest.raises(InvalidSetting, match="output_hidden_states"):
        generated(model, torch.tensor([prompt(40)]), output_hidden_states=True)
    with penstock.attach(model), pytest.raises(InvalidSetting, match="attached already"):
        penstock.attach(model)


def test_an_encoder_that_mixes_its_tokens_is_refused():
    config = transformers.SwitchTransformersConfig(vocab_size=199, d_model=32, d_kv=8, d_ff=48, num_layers=2)
    with pytest.raises(UnsupportedModel, match="cannot be read in tiles"):
        penstock.attach(transformers.SwitchTransformersForConditionalGeneration(config).eval())
