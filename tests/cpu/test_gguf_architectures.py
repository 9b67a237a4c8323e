"""Every architecture that is read from GGUF, in several shapes, against the folder that the file was made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf_image_models
import pytest
import tiny_models
import torch
from gguf_models import CASES, write_gguf
from logit_recorder import LogitRecorder
from tiny_models import prompt, reference_logits, save_tiny_model, tiny_model

from penstock.engine.engine import Engine
from penstock.lanes.native_text import _prefixed
from penstock.models.decoder import Decoder
from penstock.models.files import resolve
from penstock.models.gguf_architectures import ARCHITECTURES
from penstock.models.layer_specs import ExpertNames
from penstock.models.spec import DecoderSpec, decoder_spec
from penstock.models.weights import open_weights

CHUNKS = (1, 7, 64, 512)
MORE = pytest.mark.evidence  # second and third shapes of an architecture


@pytest.fixture
def pair(tmp_path, monkeypatch, case) -> tuple[Path, Path]:
    """(a folder of transformers, the same as GGUF)."""
    architecture, made = CASES[case]
    monkeypatch.setitem(tiny_models.CONFIGS, case, made)
    save_tiny_model(case, tmp_path)
    return tmp_path, write_gguf(tmp_path, architecture, tmp_path / "model.gguf")


def filled(path: Path) -> Decoder:
    files = resolve(str(path))
    weights = open_weights(files)
    spec = _prefixed(decoder_spec(files.config), weights)
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"))
    decoder.load(weights)
    return decoder


def numbers_of(spec: DecoderSpec) -> dict[str, Any]:
    """What a forward pass depends on, in six digits; names and the context of hybrids are the converter's own."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    for name in ("renames", "max_context", "rotaries", "intermediate_size"):
        del values[name]
    has_experts = any(layer.has_experts for layer in spec.layers)
    values["experts"] = dataclasses.replace(spec.experts, names=ExpertNames()) if spec.experts and has_experts else None
    for name in {layer.rotary for layer in spec.layers} - {None}:
        rotary = spec.rotaries[name]
        values[name] = (rotary.type, rotary.theta, rotary.num_dims, rotary.is_interleaved)
    text = json.dumps(
        values, default=lambda one: dataclasses.asdict(one) if dataclasses.is_dataclass(one) else str(one)
    )
    return json.loads(text, parse_float=lambda digits: f"{float(digits):.6g}")


def test_every_architecture_has_a_model_here():
    elsewhere = {"phi3", "gemma3", *gguf_image_models.ARCHITECTURES.values()}
    assert {architecture for architecture, _ in CASES.values()} >= ARCHITECTURES.keys() - elsewhere


@pytest.mark.parametrize("case", [pytest.param(case, marks=MORE if "," in case else ()) for case in CASES])
def test_a_gguf_gives_the_decoder_of_the_folder_that_it_was_made_of(pair):
    from_folder, from_gguf = map(filled, pair)
    assert numbers_of(from_gguf.spec) == numbers_of(from_folder.spec)
    for (_, expected), (name, found) in zip(memory_of(from_folder), memory_of(from_gguf), strict=True):
        # Norms were added one and lost it again; decays were stored as exponentials.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=3e-7, msg=name)


def memory_of(decoder: Decoder) -> list[tuple[str, torch.Tensor]]:
    """Every tensor once: its whole storage, which names share in different ways."""
    found = {
        destination.untyped_storage().data_ptr(): (name, destination) for name, destination in decoder.destinations()
    }
    return [(name, torch.empty(0).set_(one.untyped_storage())) for name, one in found.values()]


@pytest.mark.evidence
@pytest.mark.parametrize("case", CASES)
def test_chunks_of_a_gguf_give_the_logits_of_the_whole_prompt_in_transformers(pair, case):
    model, tokens = tiny_model(case), prompt(90)
    for chunk_size in CHUNKS:
        with Engine.load(str(pair[1]), dtype="float32", memory="4GiB", threads=1, chunk_size=chunk_size) as engine:
            assert engine.lane.id == "optimized-native-text"
            recorder = LogitRecorder(engine)
            output = engine.generate(tokens, max_tokens=8, ignore_eos=True)
        expected = reference_logits(model, [*tokens, *output.token_ids][:-1])[len(tokens) - 1 :]
        assert (recorder.all - expected).abs().max() <= 1e-4, chunk_size
        assert output.token_ids == tuple(expected.argmax(-1).tolist())
