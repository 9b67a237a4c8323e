"""The work that GPUs are measured with, in small and on a CPU: every part runs and gives the keys that peers give."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import program

from penstock.bench.gpu import GpuBench, Work
from penstock.engine.engine import Engine
from penstock.engine.random_model import QWEN3_8B, random_engine

SMALL = Work(
    prompt_lengths=(64, 200),
    batches=((1, 32), (4, 32)),
    num_decode_steps=6,
    num_decoders=3,
    decoder_context=20,
    decoder_tokens=60,
    long_prompt=300,
    num_quiet_steps=4,
    queue=(5, 64, 16),
    vocabulary=190,
)
SHAPE = QWEN3_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
}


@pytest.fixture
def bench():
    settings = {"chunk_size": 32, "context": 1000, "memory": "4GiB", "threads": 1, "prefix_cache": False}
    with random_engine(SHAPE, dtype="float32", **settings) as engine:
        said = []
        bench = GpuBench(engine, SMALL, lambda name, value: said.append(name))
        bench.warm_up()
        yield bench, said


def test_every_part_gives_the_keys_that_peers_give(bench):
    measured, said = bench
    found = measured.run("pdmo", [50.0])
    assert set(found) == {
        *("prefill_64", "prefill_200", "tpot_1_32", "tpot_4_32", "mixed", "mixed_at_50_ms", "offline")
    }
    assert found["prefill_200"] > found["prefill_64"] > 0
    assert set(found["mixed"]) == {"ttft", "itl_quiet_p50", "itl_p50", "itl_p99", "itl_max", "n"}
    for mixed in found["mixed"], found["mixed_at_50_ms"]:
        # The prompt takes ten steps or more, and each gives every decoder a token.
        assert mixed["n"] >= 10 * SMALL.num_decoders
        assert mixed["ttft"] > mixed["itl_max"] >= mixed["itl_p99"] >= mixed["itl_p50"] > 0
    requests = SMALL.requests()
    assert found["offline"]["tin"] == sum(read for read, _ in requests)
    assert found["offline"]["tout"] == sum(written for _, written in requests)
    assert found["offline"]["tok_s"] > 0
    assert {"prefill 64", "decode 4 at 32", "late steps", "offline"} <= set(said)


def test_the_command_says_what_is_missing():
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--random-weights" in done.stderr


def test_random_weights_are_not_for_other_lanes():
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "gpu", "--random-weights", "--lane", "any"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--lane takes a model" in done.stderr


def test_transformers_itself_is_measured_and_the_model_left_for_its_lane(tmp_path):
    path = Path(__file__).parents[2] / "benchmarks" / "h200" / "transformers_decode.py"
    script = program(path, "transformers_decode")
    model = script.random_model(SHAPE, "cpu")
    assert script.decode_step_s(model, SMALL, 3, 32) > 0
    prompts = [torch.tensor([SMALL.tokens(20, seed)]) for seed in range(3)]
    next_token = torch.tensor([[5], [6], [7]])
    with torch.inference_mode():
        cache = script.joined([model(prompt, use_cache=True).past_key_values for prompt in prompts])
        together = model(next_token, past_key_values=cache).logits[:, -1]
        whole = [torch.cat([prompt, token[None]], dim=1) for prompt, token in zip(prompts, next_token, strict=True)]
        alone = torch.cat([model(ids).logits[:, -1] for ids in whole])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0.02)
    script.save(model, tmp_path)
    settings = {"context": 100, "memory": "4GiB", "threads": 1}
    with Engine.load(str(tmp_path), lane="transformers-generic-text", **settings) as engine:
        assert engine.model.lane.facts.id == "transformers-generic-text"
        assert len(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True).token_ids) == 3


def test_random_weights_can_be_packed():
    with random_engine(SHAPE, quantize="int8", context=100, memory="4GiB", threads=1) as engine:
        assert len(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True).token_ids) == 3
        assert engine.model.memory.shape.weight_bytes < 250_000
