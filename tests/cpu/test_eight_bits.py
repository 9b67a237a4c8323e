"""Checkpoints in eight-bit floats with scales: what transformers computes with the weights that they stand for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from image_answers import EXACT, SETTINGS
from lane_ids import NATIVE_MULTIMODAL, NATIVE_TEXT
from logit_recorder import LogitRecorder
from safetensors.torch import load_file, save_file
from tiny_vision_models import IMAGE_TOKEN, save_with_joined_experts

from penstock.engine.engine import Engine
from penstock.engine.planning import plan
from penstock.errors import InvalidModelFile, UnsupportedModel

TOKENS = list(range(3, 60))
GREEDY = {"max_tokens": 3, "ignore_eos": True}
FULL_PRECISION = ("embed_tokens", "lm_head", "norm", "visual", "conv1d", "gate.weight", "in_proj_a", "in_proj_b")


def blocks(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """A scale for each value of a matrix."""
    whole = scales.repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return whole[..., : shape[-2], : shape[-1]]


def save_in_eight_bits(folder: Path, other: Path, block: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    """Writes a copy with scaled matrices, and gives the weights that they stand for. None: a scale for each tensor."""
    shutil.copytree(folder, other, dirs_exist_ok=True)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [
        name for name in tensors if tensors[name].ndim > 1 and not any(part in name for part in FULL_PRECISION)
    ]:
        *outer, rows, columns = tensors[name].shape
        size = block or (rows, columns)
        shape = (*outer, -(-rows // size[0]), -(-columns // size[1]))
        scales = torch.rand(*shape, generator=generator) * 0.01 + 0.001
        codes = (tensors[name] / blocks(scales, tensors[name].shape, size)).clamp(-448, 448).to(torch.float8_e4m3fn)
        meant[name] = codes.float() * blocks(scales, tensors[name].shape, size)
        tensors |= {name: codes, f"{name}_scale_inv": scales if block else scales.reshape(())}
        if block is None:
            tensors[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(1.0)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    (other / "config.json").write_text(json.dumps(config))
    return meant


@torch.no_grad()
def reference(folder: Path, model, meant: dict[str, torch.Tensor], tmp_path: Path) -> torch.Tensor:
    """The logits of the last token, by transformers, with the weights that are meant."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(
        load_file(folder / "model.safetensors") | meant, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    plain = type(model).from_pretrained(tmp_path).eval()
    return plain(input_ids=torch.tensor([TOKENS])).logits[0, -1]


def read(folder: Path, **settings) -> tuple[str, torch.Tensor]:
    with Engine.load(str(folder), **SETTINGS, chunk_size=7, **settings) as engine:
        recorder = LogitRecorder(engine)
        engine.generate(TOKENS, **GREEDY)
        return engine.lane.id, recorder.all[0]


@pytest.mark.parametrize("block", [(48, 40), (32, 32), None], ids=str)
def test_a_text_model_reads_what_its_blocks_stand_for(block, tiny, tmp_path):
    """Blocks of 48 by 40 divide no matrix here, so that the last ones are cut."""
    folder, model = tiny("qwen3")
    meant = save_in_eight_bits(folder, tmp_path / "eight", block)
    lane, logits = read(tmp_path / "eight")
    assert lane == NATIVE_TEXT
    assert float((logits - reference(folder, model, meant, tmp_path / "meant")).abs().max()) <= EXACT


@torch.no_grad()
def test_the_library_expands_them_in_the_same_way(tiny, tmp_path):
    save_in_eight_bits(tiny("qwen3")[0], tmp_path, (8, 8))
    expanding = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=expanding, dtype=torch.float32
    ).eval()
    expected = plain(input_ids=torch.tensor([TOKENS])).logits[0, -1]
    assert float((read(tmp_path)[1] - expected).abs().max()) <= EXACT


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-vl-moe"])
def test_an_image_text_model_reads_them_with_its_tower_and_alone(name, tiny_vision, tmp_path):
    folder, model = tiny_vision(name)
    if name == "qwen3-vl-moe":  # the experts of a layer in one tensor, as they are published
        save_with_joined_experts(folder, tmp_path / "joined", inputs_first=True)
        folder = tmp_path / "joined"
    meant = save_in_eight_bits(folder, tmp_path / "eight", (48, 40))
    assert any("experts" in part for part in meant) == (name == "qwen3-vl-moe")
    expected = reference(folder, model, meant, tmp_path / "meant")
    for settings, lane in (({"text_only": False}, NATIVE_MULTIMODAL), ({"text_only": True}, NATIVE_TEXT)):
        found, logits = read(tmp_path / "eight", **settings)
        assert found == lane
        assert float((logits - expected).abs().max()) <= EXACT
        asked = {"prompt_tokens": 100, **SETTINGS, **settings}
        priced = [plan(str(one), **asked).prompt.weight_bytes for one in (tmp_path / "eight", folder)]
        assert priced[0] == priced[1], "scales are read and not kept"


def test_a_tower_in_eight_bits_is_refused(tiny_vision, tmp_path):
    folder, _ = tiny_vision("qwen3.5")
    save_in_eight_bits(folder, tmp_path, (32, 32))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.visual.merger.linear_fc1.weight_scale_inv"] = torch.ones(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"belongs to the vision tower.* or give --text-only"):
        Engine.load(str(tmp_path), **SETTINGS, text_only=False)
    assert read(tmp_path, text_only=True)[0] == NATIVE_TEXT


def test_scales_of_other_blocks_are_refused(tiny, tmp_path):
    save_in_eight_bits(tiny("qwen3")[0], tmp_path, (32, 32))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [16, 16]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModelFile, match="blocks of 16 x 16 need"):
        Engine.load(str(tmp_path), **SETTINGS)
    assert max(TOKENS) < IMAGE_TOKEN
