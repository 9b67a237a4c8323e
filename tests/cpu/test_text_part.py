"""The text part of an image-text checkpoint, read alone: our decoder, the prefix cache, and no weight of the tower."""

import json
import shutil
from math import prod

import pytest
import torch
import transformers
from image_answers import EXACT, SETTINGS
from lane_ids import GENERIC_MULTIMODAL, GENERIC_TEXT, NATIVE_MULTIMODAL, NATIVE_TEXT
from logit_recorder import LogitRecorder
from penstock_command import penstock_text
from tiny_models import prompt, save_tokenizer
from tiny_vision_models import IMAGE_TOKEN, KINDS, TEMPLATE, pictures

from penstock.config import load_config
from penstock.doctor.model import diagnose_model
from penstock.engine.engine import Engine
from penstock.engine.planning import plan
from penstock.errors import InvalidMedia, InvalidSetting
from penstock.models.files import resolve
from penstock.models.safetensors import read_safetensors_header

pytestmark = pytest.mark.usefixtures("own_verdicts")
TOKENS = [token for token in prompt(60) if token < IMAGE_TOKEN]
GREEDY = {"max_tokens": 3, "ignore_eos": True}


@torch.no_grad()
def reference(model, tokens=TOKENS) -> torch.Tensor:
    """Float32 logits of the last token of a prompt of text, read whole by the image-text model of transformers."""
    return model(input_ids=torch.tensor([tokens])).logits[0, -1]


@pytest.mark.parametrize("chunk_sizes", [(7,), pytest.param((1, 64, 0), marks=pytest.mark.evidence)], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_the_text_part_gives_the_logits_of_the_whole_model_and_shares_prefixes(name, chunk_sizes, tiny_vision):
    folder, model = tiny_vision(name)
    expected = reference(model)
    for chunk_size in chunk_sizes:
        with Engine.load(str(folder), **SETTINGS, text_only=True, chunk_size=chunk_size, block_size=4) as engine:
            assert engine.lane.id == NATIVE_TEXT
            assert not engine.adjustments
            recorder = LogitRecorder(engine)
            first = engine.generate(TOKENS, **GREEDY)
            assert float((recorder.all[0] - expected).abs().max()) <= EXACT
            recorder = LogitRecorder(engine)
            beside = [engine.submit([5, 6, 7], **GREEDY), engine.submit(TOKENS, **GREEDY)]
            again = [event.output for event in engine.events(beside[1]) if hasattr(event, "output")][-1]
            has_checkpoint = engine.model.spec.recurrent is None or first.num_prompt_chunks > 1  # states of a hybrid
            assert (again.num_cached_tokens > 0) == has_checkpoint
            assert again.token_ids == first.token_ids


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_no_weight_of_the_tower_is_read_or_counted(name, tiny_vision, tmp_path):
    """The folder that is read has no tensor but those of the text part."""
    from safetensors.torch import load_file, save_file

    folder, model = tiny_vision(name)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if "visual" not in key and "vision" not in key}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors")
    with Engine.load(str(tmp_path), **SETTINGS, text_only=True) as engine:
        recorder = LogitRecorder(engine)
        engine.generate(TOKENS, **GREEDY)
        assert float((recorder.all[0] - reference(model)).abs().max()) <= EXACT
    planned = plan(str(folder), prompt_tokens=100, **SETTINGS, text_only=True)
    with_tower = plan(str(folder), prompt_tokens=100, **SETTINGS, text_only=False)
    of_text = [name for name in kept if "language_model" in name or "lm_head" in name]
    header = read_safetensors_header(folder / "model.safetensors")
    assert planned.prompt.weight_bytes == 4 * sum(prod(header[name].shape) for name in of_text)
    assert planned.prompt.weight_bytes < with_tower.prompt.weight_bytes
    assert planned.prompt.media_bytes == 0


def test_an_image_is_refused_with_the_reason(tiny_vision):
    with (
        Engine.load(str(tiny_vision("llava")[0]), **SETTINGS, text_only=True) as engine,
        pytest.raises(InvalidMedia, match=r"only the text part is read: asked for by --text-only\. Leave them out"),
    ):
        engine.generate("w1 <image> w2", images=pictures(1))


def test_without_a_processor_the_text_part_is_read_and_everybody_says_so(tiny_vision):
    folder = str(tiny_vision("qwen3-vl")[0])
    why = "gives no processor: it has no preprocessor_config.json"
    planned = plan(folder, prompt_tokens=100, **SETTINGS)
    assert planned.lane.id == NATIVE_TEXT
    assert why in planned.prompt.adjustments[0]
    with Engine.load(folder, **SETTINGS) as engine:
        assert engine.lane.id == NATIVE_TEXT
        assert [why in adjustment for adjustment in engine.adjustments] == [True]
        with pytest.raises(InvalidMedia, match=why):
            engine.generate("w1 <image> w2", images=pictures(1))
    with pytest.raises(InvalidSetting, match=f"--strict: only the text part .* {why}"):
        Engine.load(folder, **SETTINGS, strict=True)
    for settings in ({"text_only": False}, {"lane": NATIVE_MULTIMODAL}):
        assert plan(folder, prompt_tokens=100, **SETTINGS, **settings).lane.id == NATIVE_MULTIMODAL
    findings = diagnose_model(folder, load_config(SETTINGS)).diagnoses
    assert any(found.topic == "images" and why in found.finding for found in findings)


def test_a_config_alone_does_not_say_that_images_cannot_be_read(tiny_vision, tmp_path):
    """Of a hub's model only the config is here when it is planned."""
    shutil.copy(tiny_vision("qwen3-vl")[0] / "config.json", tmp_path)
    assert plan(str(tmp_path), prompt_tokens=100, **SETTINGS).lane.id == NATIVE_MULTIMODAL


def test_the_table_of_a_text_part_is_that_of_text_models(tiny_vision):
    with pytest.raises(Exception, match="has no vision_config: it reads no images"):
        plan(str(tiny_vision("llava")[0]), prompt_tokens=9, **SETTINGS, text_only=True, lane=NATIVE_MULTIMODAL)


# --- text parts without a native decoder ------------------------------------------------------------------------


def save_llava(folder, text_config) -> transformers.PreTrainedModel:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    config = transformers.LlavaConfig(text_config=text_config, vision_config=vision, image_token_id=IMAGE_TOKEN)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


SIZES = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": True}


def test_a_text_part_without_a_native_decoder_is_run_by_transformers(tmp_path):
    text = transformers.StableLmConfig(
        **SIZES, intermediate_size=112, num_key_value_heads=4, use_parallel_residual=True
    )
    model = save_llava(tmp_path, text)
    assert plan(str(tmp_path), prompt_tokens=9, **SETTINGS).lane.id == GENERIC_MULTIMODAL, "nobody asked"
    with Engine.load(str(tmp_path), **SETTINGS, text_only=True, chunk_size=7) as engine:
        assert engine.lane.id == GENERIC_TEXT
        recorder = LogitRecorder(engine)
        engine.generate(TOKENS, **GREEDY)
        assert float((recorder.all[0] - reference(model)).abs().max()) <= EXACT
        assert engine.generate(TOKENS, **GREEDY).num_cached_tokens > 0


# --- how it is asked for --------------------------------------------------------------------------------------


def test_flag_environment_and_file_ask_for_it(tiny_vision, tmp_path, monkeypatch):
    folder = tiny_vision("llava")[0]
    flags = ["--json", "--prompt-tokens", 50, "--dtype", "float32", "--memory", "4GiB", "--chunk-size", 7]
    document = json.loads(penstock_text("plan", folder, "--text-only", *flags).stdout)
    assert document["lane"]["id"] == NATIVE_TEXT
    assert document["lane"]["reason"].endswith("only the text part is read: asked for by --text-only")
    assert load_config({}, environment={"PENSTOCK_TEXT_ONLY": "1"}).text_only is True
    (tmp_path / "penstock.toml").write_text("text-only = false")
    assert load_config({}, environment={}, folder=tmp_path).text_only is False
    assert load_config({}, environment={}).text_only is None


def test_a_template_that_knows_parts_only_is_given_parts(tiny_vision):
    folder = tiny_vision("llava")[0]
    assert TEMPLATE.count("part['text']") == 1
    with Engine.load(str(folder), **SETTINGS, text_only=True) as engine, Engine.load(str(folder), **SETTINGS) as whole:
        asked = [{"role": "user", "content": "w1 w2"}]
        assert engine.lane.id == NATIVE_TEXT
        assert whole.lane.id == NATIVE_MULTIMODAL
        said = engine.generate(asked, **GREEDY)
        assert said.token_ids == whole.generate(asked, **GREEDY).token_ids
        assert said.num_prompt_tokens == 4
    assert resolve(str(folder)).why_text_only == ""
