"""An attached image-text model: `generate` writes what it wrote before, and each image is encoded once."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny_models import prompt
from tiny_vision_models import IMAGE_TOKEN, KINDS, ON_EVERY_LANE, processed_prompt, tiny_vision_model

import penstock
from penstock.errors import InvalidMedia, InvalidSetting

EXACT = 1e-4
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def generate(model, **inputs):
    return model.generate(**(GREEDY | inputs), return_dict_in_generate=True, output_logits=True)


def assert_same(output, reference):
    assert torch.equal(output.sequences, reference.sequences)
    differences = [float((a - b).abs().max()) for a, b in zip(output.logits, reference.logits, strict=True)]
    assert max(differences) <= EXACT


@pytest.fixture(scope="module")
def made():
    known = {}

    def make(name):
        if name not in known:
            model = tiny_vision_model(name)
            known[name] = model, processed_prompt(name, model)
        return known[name]

    return make


def reference_for(model, inputs, strategy):
    """The plain generate; before `mm_encoder_outputs` it mixed the images of a prompt up between beams."""
    if strategy and "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        with penstock.attach(model, chunk_size=512):
            return generate(model, **inputs, **strategy)
    return generate(model, **inputs, **strategy)


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ON_EVERY_LANE)
def test_generate_writes_what_it_wrote_before(made, name, strategy):
    model, inputs = made(name)
    reference = reference_for(model, inputs, strategy)
    calls = []
    hook = model.get_submodule(KINDS[name].tower).register_forward_hook(lambda *_: calls.append(1))
    with penstock.attach(model, chunk_size=7) as attachment:
        assert_same(generate(model, **inputs, **strategy), reference)
        first_calls = len(calls)
        assert_same(generate(model, **inputs, **strategy), reference)
    hook.remove()
    assert first_calls == 1
    assert len(calls) == first_calls, "the images of the second prompt are known"
    assert attachment.reading.applied


def test_an_image_larger_than_a_chunk_is_read_whole_and_reported(made):
    model, inputs = made("gemma3")
    with penstock.attach(model, chunk_size=7) as attachment:
        generate(model, **inputs)
    assert len(attachment.reading.adjustments) == 2
    assert all("belong together and were read in one chunk" in told for told in attachment.reading.adjustments)


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "llava"])
def test_candidates_are_checked_against_the_images(made, name):
    model, inputs = made(name)
    reference = generate(model, **inputs, prompt_lookup_num_tokens=3)
    with penstock.attach(model, chunk_size=7) as attachment:
        assert_same(generate(model, **inputs, prompt_lookup_num_tokens=3), reference)
    assert attachment.reading.applied


@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3", "smolvlm"])
def test_prompts_without_images_are_exact(made, name):
    model, _ = made(name)
    ids = torch.tensor([[token for token in prompt(50) if token < IMAGE_TOKEN]])
    reference = generate(model, input_ids=ids)
    with penstock.attach(model, chunk_size=7) as attachment:
        assert_same(generate(model, input_ids=ids), reference)
    assert attachment.reading.applied


def test_a_budget_bounds_the_tower_too(made):
    from penstock.plan.machine import resident_bytes

    model, inputs = made("llava")
    reference = generate(model, **inputs)
    calls = []
    hook = model.get_submodule(KINDS["llava"].tower).register_forward_hook(lambda *_: calls.append(1))
    with penstock.attach(model, memory=resident_bytes() + 2**30):
        assert_same(generate(model, **inputs), reference)
    hook.remove()
    assert len(calls) == 1


def test_too_few_images_are_refused(made):
    model, inputs = made("llava")
    few = dict(inputs, pixel_values=inputs["pixel_values"][:1])
    with penstock.attach(model, chunk_size=7), pytest.raises(InvalidMedia, match="more placeholders than images"):
        generate(model, **few)


def test_embeddings_are_exact_where_nothing_sees_ahead(made):
    model, _ = made("llava")
    embeddings = model.get_input_embeddings()(torch.tensor([prompt(50)])).detach()
    reference = generate(model, inputs_embeds=embeddings)
    with penstock.attach(model, chunk_size=7) as attachment:
        assert_same(generate(model, inputs_embeds=embeddings), reference)
    assert attachment.reading.applied


def test_embeddings_beside_images_are_refused(made):
    model, inputs = made("llava")
    embeddings = torch.randn(1, 40, 64)
    with penstock.attach(model, chunk_size=7), pytest.raises(InvalidSetting, match="Give input_ids"):
        generate(model, inputs_embeds=embeddings, pixel_values=inputs["pixel_values"])
