"""The work that GPUs are measured with, in small and on a CPU: every part runs and gives the keys that peers give."""

import subprocess
import sys

import pytest

from penstock.bench.gpu import GpuBench, Work
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


def test_random_weights_can_be_packed():
    with random_engine(SHAPE, quantize="int8", context=100, memory="4GiB", threads=1) as engine:
        assert len(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True).token_ids) == 3
        assert engine.model.memory.shape.weight_bytes < 250_000
