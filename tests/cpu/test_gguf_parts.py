"""A GGUF in several files, as llama.cpp splits one."""

import re

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf_models import CASES, write_gguf
from logit_recorder import LogitRecorder
from tiny_models import CONFIGS, prompt, save_tiny_model

import penstock
from penstock.engine.engine import Engine
from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.models.files import resolve


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(the whole file, its parts)."""
    architecture, config = CASES["llama"]
    monkeypatch.setitem(CONFIGS, "llama, to be split", config)
    save_tiny_model("llama, to be split", tmp_path)
    whole = write_gguf(tmp_path, architecture, tmp_path / "whole.gguf")
    write_gguf(tmp_path, architecture, tmp_path / "model.gguf", tensors_of_part=15)
    return whole, sorted(tmp_path.glob("model-*.gguf"))


def logits(path):
    with Engine.load(str(path), memory="4GiB", threads=1) as engine:
        recorder = LogitRecorder(engine)
        engine.generate(prompt(40), max_tokens=4, ignore_eos=True)
        return recorder.all


def test_parts_are_the_whole_model_whichever_is_named(made):
    whole, parts = made
    assert len(parts) == 3
    expected = logits(whole)
    assert torch.equal(logits(parts[0]), expected)
    assert torch.equal(logits(parts[2]), expected)
    assert resolve(str(parts[1])).weight_files == tuple(parts)
    assert resolve(str(parts[1])).identity == resolve(str(parts[0])).identity


def test_a_part_that_is_missing_or_of_another_model_is_named(made):
    whole, (first, second, third) = made
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(InvalidModelFile, match=re.escape(second.name)):
        resolve(str(first))
    second.write_bytes(third.read_bytes())
    with pytest.raises(InvalidModelFile, match="says it is part 2 of 3"):
        resolve(str(third))
    second.write_bytes(whole.read_bytes())
    with pytest.raises(InvalidModelFile, match="says it is part None of None"):
        resolve(str(first))
    second.write_bytes(kept)
    alone = first.with_name("alone.gguf")
    first.rename(alone)
    with pytest.raises(InvalidModelFile, match="its name does not say so"):
        resolve(str(alone))


def test_the_tower_of_images_beside_a_model_is_said_to_be_left_aside(made):
    whole, _ = made
    plain = penstock.plan(str(whole), prompt_tokens=50, memory="4GiB").prompt.adjustments
    tower = whole.with_name("mmproj-model-f16.gguf")
    writer = GGUFWriter(tower, "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 3, 2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = penstock.plan(str(whole), prompt_tokens=50, memory="4GiB").prompt.adjustments
    assert len(said) == len(plain) + 1
    (about_images,) = set(said) - set(plain)
    assert about_images.startswith("images are not read: ")
    assert str(tower) in about_images
    with pytest.raises(UnsupportedModel, match="the tower of an image-text model alone"):
        resolve(str(tower))


def test_names_that_promise_too_many_parts_are_refused(made):
    _, parts = made
    for count in ("00000", "00001", "99999"):
        lying = parts[0].with_name(f"lying-00001-of-{count}.gguf")
        lying.write_bytes(parts[0].read_bytes())
        with pytest.raises(InvalidModelFile, match="parts"):
            resolve(str(lying))
