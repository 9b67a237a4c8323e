"""Encoder-decoder models that are attached: their own generate gives the same tokens, with the source read in tiles."""

import functools

import pytest
import torch
import transformers
from tiny_models import prompt
from tiny_seq2seq import tiny_seq2seq

import penstock
from penstock.errors import InvalidSetting, PromptTooLong, UnsupportedModel


@pytest.fixture(scope="module", params=["t5", "bart", "t5gemma", "led", "longt5-global"])
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


def test_methods_that_an_instance_had_itself_are_put_back():
    """Other tools set them on the instance, as attach does: those must not be lost."""
    model = tiny_seq2seq("bart")
    places = [(model, "generate"), (model, "forward"), (model.get_encoder(), "forward")]
    for instance, name in places:
        setattr(instance, name, functools.partial(getattr(instance, name)))
    own = [vars(instance)[name] for instance, name in places]
    penstock.detach(penstock.attach(model, chunk_size=7).model)
    assert [vars(instance).get(name) for instance, name in places] == own


def test_what_was_put_before_an_attached_encoder_is_not_removed():
    model = tiny_seq2seq("bart")
    penstock.attach(model, chunk_size=7)
    encoder = model.get_encoder()
    attached, encoder.forward = encoder.forward, functools.partial(encoder.forward)
    with pytest.raises(InvalidSetting, match="Something else has replaced"):
        penstock.detach(model)
    encoder.forward = attached
    penstock.detach(model)
    assert "forward" not in vars(encoder)


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


def test_a_long_decoder_prompt_is_read_in_chunks(model):
    ids, begun = torch.tensor([prompt(40)]), torch.tensor([prompt(33, seed=4)])
    plain = generated(model, ids, decoder_input_ids=begun)
    lengths = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with penstock.attach(model, chunk_size=7):
        generated(model, ids, decoder_input_ids=begun)  # the decoder is checked here
        lengths.clear()
        found = generated(model, ids, decoder_input_ids=begun)
    hook.remove()
    assert torch.equal(found.sequences, plain.sequences)
    assert (torch.stack(found.logits) - torch.stack(plain.logits)).abs().max() <= 1e-4
    num_begun = plain.sequences.shape[1] - 12  # generate puts its start token before them where it is missing
    assert lengths[:6] == [7, 7, 7, 7, num_begun - 28, 1]
    assert "forward" not in vars(model)


def test_progress_predicts_the_peak(model):
    told = []
    with penstock.attach(model, chunk_size=16, on_progress=told.append):
        generated(model, torch.tensor([prompt(90)]))
    states = 90 * model.get_encoder().config.hidden_size * model.dtype.itemsize
    assert told[0].predicted_peak_bytes >= told[0].memory_bytes + states - 1_000_000
    assert {event.predicted_peak_bytes for event in told} == {told[0].predicted_peak_bytes}


def test_what_cannot_be_read_in_tiles_is_refused(model):
    with penstock.attach(model, chunk_size=16), pytest.raises(InvalidSetting, match="output_hidden_states"):
        generated(model, torch.tensor([prompt(40)]), output_hidden_states=True)
    with penstock.attach(model), pytest.raises(InvalidSetting, match="attached already"):
        penstock.attach(model)


def test_tokens_that_see_the_whole_source_are_refused_and_not_left_out():
    model, ids = tiny_seq2seq("led"), torch.tensor([prompt(40)])
    seeing = torch.zeros_like(ids)
    with penstock.attach(model, chunk_size=16):
        generated(model, ids, global_attention_mask=seeing)
        seeing[:, 0] = 1
        with pytest.raises(InvalidSetting, match="global_attention_mask names tokens that see the whole source"):
            generated(model, ids, global_attention_mask=seeing)


def test_an_encoder_that_mixes_its_tokens_is_refused():
    config = transformers.SwitchTransformersConfig(vocab_size=199, d_model=32, d_kv=8, d_ff=48, num_layers=2)
    with pytest.raises(UnsupportedModel, match="cannot be read in tiles"):
        penstock.attach(transformers.SwitchTransformersForConditionalGeneration(config).eval())
