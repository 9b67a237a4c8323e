"""The peak of every lane on the card, as planned before a prompt is read and as it was taken."""

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytest.importorskip("PIL")

import transformers
from lane_ids import GENERIC_MULTIMODAL, GENERIC_TEXT, NATIVE_MULTIMODAL, NATIVE_TEXT, SEQ2SEQ_SOURCE
from peaks import LARGEST_GAP, MB
from tiny_models import prompt, save_tokenizer
from tiny_vision_models import IMAGE_TOKEN, llava_processor, pictures

from penstock.engine.engine import Engine

NUM_TOKENS = 6000
NUM_WORDS = 32_000
DECODER = {
    "vocab_size": NUM_WORDS,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}


def causal():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def with_images():
    vision = transformers.CLIPVisionConfig(**TOWER, image_size=32, patch_size=8)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**DECODER), vision_config=vision, image_token_id=IMAGE_TOKEN
    )
    return transformers.LlavaForConditionalGeneration(config)


def of_a_source():
    sizes = {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_layers": 8, "num_heads": 16, "vocab_size": NUM_WORDS}
    config = transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    NATIVE_TEXT: causal,
    GENERIC_TEXT: causal,
    NATIVE_MULTIMODAL: with_images,
    GENERIC_MULTIMODAL: with_images,
    SEQ2SEQ_SOURCE: of_a_source,
}


def asked(lane):
    """A text prompt, or text around two pictures; as many tokens in all, nearly."""
    if lane not in (NATIVE_MULTIMODAL, GENERIC_MULTIMODAL):
        return {"prompt": prompt(NUM_TOKENS)}
    words = " ".join(f"w{token % IMAGE_TOKEN}" for token in prompt(NUM_TOKENS - 32))
    return {"prompt": f"<image> {words} <image> w9", "images": pictures(2)}


@pytest.mark.parametrize("lane", MODELS)
def test_a_lane_takes_what_its_plan_says(lane, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    MODELS[lane]().to(torch.bfloat16).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    if MODELS[lane] is with_images:
        llava_processor().save_pretrained(tmp_path)
    settings = {"lane": lane, "device": "cuda", "dtype": "bfloat16", "context": NUM_TOKENS + 256, "max_running": 1}
    Engine.load(str(tmp_path), **settings, memory="8GiB").close()  # the self-check's models are gone before the count
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with Engine.load(str(tmp_path), **settings, memory="8GiB") as engine:
        assert engine.lane.id == lane
        plan = engine.plan(NUM_TOKENS)
        output = engine.generate(**asked(lane), max_tokens=2, ignore_eos=True)
        reserve = engine.model.memory.media_bytes  # for larger images, and for more of them
    planned, taken = plan.peak_bytes - plan.runtime_bytes, output.peak_bytes - plan.runtime_bytes - before
    gap = (planned - reserve) / taken - 1
    sizes = f"{planned / MB:.0f} MB planned, {reserve / MB:.0f} of them kept free for images, {taken / MB:.0f} taken"
    print(f"{lane}: {sizes}, {gap:+.1%} without what is kept free")
    assert abs(output.num_prompt_tokens - NUM_TOKENS) < 100
    assert taken <= planned * (1 + LARGEST_GAP)
    assert abs(gap) <= LARGEST_GAP
