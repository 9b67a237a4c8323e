"""Layers that are read again for every step give the numbers of layers that stay, and no others when a disk fails."""

import os

import gguf_models
import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Type
from logit_recorder import LogitRecorder
from streamed_layers import streaming
from tiny_models import prompt

from penstock.config import cache_folder
from penstock.engine.engine import Engine
from penstock.errors import InvalidModelFile, MemoryTooSmall
from penstock.kernels import build
from penstock.server.board import Board
from penstock.server.metrics import Metrics

QUICK = ["llama", "qwen3-moe", "qwen3-next", "gemma4-e", "cohere"]
PROMPTS = [prompt(157), prompt(45)[7:20]]


@pytest.fixture
def streamed(monkeypatch, tmp_path):
    build.kernels()  # which are kept in another cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def begin(pick=range):
        streaming(monkeypatch, pick)

    return begin


def logits_of(engine):
    recorder = LogitRecorder(engine)
    engine.generate_batch(PROMPTS, max_tokens=3, ignore_eos=True)
    return recorder.all


def stream_of(engine):
    return engine.model.lane.decoder.stream


def assert_streamed_is_resident(name, streamed, load, **settings):
    expected = logits_of(load(name, **settings))
    streamed()
    engine = load(name, **settings)
    assert len(stream_of(engine)._slots) == 3
    assert torch.equal(logits_of(engine), expected)
    assert stream_of(engine).num_read > 0


@pytest.mark.parametrize("name", QUICK)
def test_streamed_layers_give_the_numbers_of_resident_ones(name, streamed, load):
    assert_streamed_is_resident(name, streamed, load, chunk_size=64)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("settings", [{}, {"quantize": "int4"}], ids=str)
def test_so_they_do_in_c(settings, streamed, load):
    assert_streamed_is_resident("smollm3", streamed, load, dtype="bfloat16", chunk_size=64, **settings)


@pytest.mark.evidence
@pytest.mark.parametrize("name", sorted(tiny_models.CONFIGS))
def test_every_family_streams_as_it_stays(name, streamed, load):
    assert_streamed_is_resident(name, streamed, load, dtype="bfloat16", chunk_size=64)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "quantize": "int8"}], ids=str)
@pytest.mark.parametrize("name", sorted(tiny_models.CONFIGS))
def test_so_it_does_in_float32_and_in_few_bits(name, settings, streamed, load):
    assert_streamed_is_resident(name, streamed, load, chunk_size=64, **settings)


@pytest.mark.parametrize("quant", [Type.BF16, Type.F32])
def test_a_gguf_streams_as_it_stays(quant, streamed, tiny, tmp_path):
    path = gguf_models.write_gguf(tiny("qwen3")[0], "qwen3", tmp_path / "model.gguf", quant)
    dtype = {"dtype": "bfloat16" if quant == Type.BF16 else "float32"}
    with Engine.load(str(path), **dtype) as engine:
        expected = logits_of(engine)
    streamed(lambda count: range(1, count))
    with Engine.load(str(path), **dtype) as engine:
        assert torch.equal(logits_of(engine), expected)
        assert not packs(), "its bytes are those of memory"


def packs():
    folder = cache_folder("packs")
    return sorted(path for path in folder.rglob("*.layer")) if folder.is_dir() else []


def test_layers_that_memory_has_otherwise_are_laid_out_once(streamed, tiny, tmp_path):
    streamed(lambda count: (0, 2))
    for _ in range(2):
        with Engine.load(str(tiny("llama")[0]), dtype="bfloat16") as engine:
            logits = logits_of(engine)
        kept = packs()
        assert [path.name for path in kept] == ["0.layer", "2.layer"]
    times = [path.stat().st_mtime_ns for path in kept]
    with Engine.load(str(tiny("llama")[0]), dtype="bfloat16") as engine:
        assert torch.equal(logits_of(engine), logits)
    assert [path.stat().st_mtime_ns for path in packs()] == times


def test_what_was_laid_out_of_other_weights_is_not_used(streamed, tmp_path):
    streamed()
    folder = tmp_path / "model"
    found = []
    for seed in (0, 1):
        tiny_models.save_tiny_model("llama", folder, seed=seed)
        with Engine.load(str(folder), dtype="bfloat16") as engine:
            found.append((logits_of(engine), packs()[0].parent))
    (first, earlier), (second, later) = found
    assert earlier != later
    assert not earlier.exists()
    assert not torch.equal(first, second)


@pytest.fixture
def own_copy(tmp_path):
    tiny_models.save_tiny_model("llama", tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut short", "written over"])
def test_a_file_that_changes_under_a_model_ends_the_request_and_gives_no_token(is_cut, streamed, own_copy):
    streamed()
    with Engine.load(str(own_copy)) as engine:
        expected = logits_of(engine)
        path = own_copy / "model.safetensors"
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(len(content) // 2) if is_cut else file.write(content[: len(content) // 2])
        with pytest.raises(InvalidModelFile, match="has changed since it was loaded"):
            engine.generate(PROMPTS[0], max_tokens=3)
        assert not engine.has_work
    path.write_bytes(content)
    with Engine.load(str(own_copy)) as engine:
        assert torch.equal(logits_of(engine), expected)


def test_a_read_that_fails_ends_the_request_and_the_next_one_is_read(streamed, own_copy):
    streamed()
    with Engine.load(str(own_copy)) as engine:
        expected = logits_of(engine)
        (file,) = stream_of(engine)._files.values()
        kept = os.dup(file._file.fileno())
        broken = os.open(os.devnull, os.O_WRONLY)  # which cannot be read from
        os.dup2(broken, file._file.fileno())
        file._facts = file._stat()
        with pytest.raises(InvalidModelFile, match="cannot be read: Bad file descriptor"):
            engine.generate(PROMPTS[0], max_tokens=3)
        os.dup2(kept, file._file.fileno())
        file._facts = file._stat()
        os.close(kept)
        os.close(broken)
        engine.forget_prefixes()
        assert torch.equal(logits_of(engine), expected)


def test_a_pack_that_cannot_be_written_refuses_the_model(streamed, own_copy, tmp_path):
    streamed()
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(MemoryTooSmall, match="cannot be written there: Not a directory"):
        Engine.load(str(own_copy), dtype="bfloat16")


def test_metrics_tell_what_was_read_and_waited_for(streamed, own_copy):
    streamed()
    with Engine.load(str(own_copy)) as engine:
        metrics = Metrics()
        metrics.describe("tiny", engine, Board())
        engine.generate(PROMPTS[0], max_tokens=2, ignore_eos=True)
        lines = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if line[0] != "#")
        stream = stream_of(engine)
        assert stream.num_read == 2 * engine.model.memory.placement.pass_bytes
        assert float(lines["penstock:layer_bytes_read"]) == stream.num_read
        assert float(lines["penstock:layer_wait_seconds"]) == stream.waited_s
