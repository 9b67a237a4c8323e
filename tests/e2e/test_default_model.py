"""The default model, real weights: every chunking writes the same tokens."""

import json
import random
import subprocess
import sys

import pytest
import torch
from logit_recorder import LogitRecorder

from penstock.engine.engine import Engine
from penstock.engine.loading import load_tokenizer
from penstock.kernels import build
from penstock.models.files import resolve

pytestmark = pytest.mark.evidence
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]


def text_of(num_tokens):
    """Words of one token each, in a seeded order."""
    backend = load_tokenizer(resolve("smollm2")).backend
    decoded = (backend.decode([token]) for token in range(1000, 9000))
    words = [word for word in decoded if word.startswith(" ") and word[1:].isalpha()]
    generator = random.Random(num_tokens)
    return "".join(generator.choice(words) for _ in range(num_tokens))


def run(path, chunk_size):
    command = [*PENSTOCK, "run", "-f", str(path), "-p", "Go on.", "--dtype", "float32", "--max-tokens", "24", "--json"]
    finished = subprocess.run([*command, "--chunk-size", str(chunk_size)], capture_output=True, check=True)
    return json.loads(finished.stdout)


@pytest.mark.parametrize(("num_tokens", "chunk_sizes"), [(3000, (17, 256, 1024)), (300, (1, 64))])
def test_the_command_line_writes_the_same_tokens_for_every_chunk_size(num_tokens, chunk_sizes, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(text_of(num_tokens))
    whole = run(path, 0)
    assert whole["prompt_tokens"] >= num_tokens
    assert len(whole["chunks"]) == 1
    for chunk_size in chunk_sizes:
        report = run(path, chunk_size)
        assert len(report["chunks"]) == -(-report["prompt_tokens"] // chunk_size)
        assert report["token_ids"] == whole["token_ids"], f"chunk size {chunk_size}"


def logits(num_tokens, **settings):
    tokens = random.Random(0).sample(range(49_000), num_tokens)
    with Engine.load("smollm2", **settings) as engine:
        recorder = LogitRecorder(engine)
        engine.generate(tokens, max_tokens=4, ignore_eos=True)
    return recorder.all


def test_a_chunk_as_large_as_the_prompt_is_bitwise_the_whole_prompt():
    whole = logits(3000, dtype="float32", chunk_size=0)
    assert torch.equal(whole, logits(3000, dtype="float32", chunk_size=0)), "the same request twice"
    assert torch.equal(whole, logits(3000, dtype="float32", chunk_size=3000))
    assert torch.equal(whole, logits(3000, dtype="float32", chunk_size=4096))
    assert (whole - logits(3000, dtype="float32", chunk_size=256)).abs().max() < 1e-3


@pytest.mark.skipif(not build.can_run(), reason="no C kernels")
def test_in_its_own_codes_every_chunk_size_is_bitwise_the_whole_prompt():
    whole = logits(700, dtype="bfloat16", chunk_size=0)
    for chunk_size in (7, 64, 256):
        assert torch.equal(whole, logits(700, dtype="bfloat16", chunk_size=chunk_size)), f"chunk size {chunk_size}"


def logprobs(num_tokens, **settings):
    tokens = random.Random(0).sample(range(49_000), num_tokens)
    with Engine.load("smollm2", **settings) as engine:
        output = engine.generate(tokens, max_tokens=1, prompt_logprobs=0)
    return torch.tensor([one.logprob for one in output.prompt_logprobs[1:]])


@pytest.mark.skipif(not build.can_run(), reason="no C kernels")
def test_a_long_prompt_in_its_own_codes_is_nearer_to_float32_than_in_bfloat16():
    """Whole it is read layer by layer; in chunks, each step is one call of C."""
    whole = logprobs(2200, dtype="bfloat16", chunk_size=0)
    for chunk_size in (1024, 300):
        found = logprobs(2200, dtype="bfloat16", chunk_size=chunk_size)
        assert torch.equal(whole, found), f"chunk size {chunk_size}"
    exact = logprobs(2200, dtype="float32", quantize="none", chunk_size=0)
    rounded = logprobs(2200, dtype="bfloat16", quantize="none", chunk_size=0)
    assert (whole - exact).abs().mean() < 0.75 * (rounded - exact).abs().mean()
