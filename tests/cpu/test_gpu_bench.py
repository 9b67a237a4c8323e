"""The work that GPUs are measured with, in small and on a CPU: every part runs and gives the keys that peers give."""

import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from programs import program
from torch.utils.flop_counter import FlopCounterMode

from penstock.bench.gpu import GpuBench, against_limits, bytes_against_plan
from penstock.bench.limits import DeviceLimits, _num_pairs, least_read_s, least_step_s
from penstock.bench.random_model import random_engine, random_transformers_model, save_model
from penstock.bench.work import SHAPES, Mixed, Work, WorkRun
from penstock.bench.workbench import BenchSettings, Workbench
from penstock.cli.bench import SHAPE_NAMES
from penstock.engine.engine import Engine
from penstock.models.spec import decoder_spec

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
SHAPE = SHAPES["qwen3-8b"] | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
}


@pytest.fixture
def workbench():
    settings = {"chunk_size": 32, "context": 1000, "memory": "4GiB", "prefix_cache": False}
    asked = BenchSettings(model="a shape", dtype="float32", threads=1)
    with Workbench(asked, shape=SHAPE, **settings) as bench:
        yield bench


@pytest.fixture
def bench(workbench):
    with workbench.load() as engine:
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


def test_bytes_are_those_of_an_engine_for_each_prompt(workbench):
    told = {}
    found = bytes_against_plan(workbench, SMALL.prompt_lengths, SMALL, told.__setitem__)
    assert list(found) == ["bytes_64", "bytes_200"]
    assert found["bytes_200"]["planned"] > found["bytes_64"]["planned"] > 0
    assert list(told) == ["bytes for 64", "bytes for 200"]


H200 = Path(__file__).parents[2] / "benchmarks" / "h200"


def test_the_work_for_another_engine_needs_nothing_but_python():
    """As in its environment: no library of ours is there."""
    lines = ["import runpy", f"peer = runpy.run_path({str(H200 / 'vllm_peer.py')!r}, run_name='peer')"]
    lines += ["print(peer['work_of']('qwen3-8b').tokens(3, 7))"]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout.split() == str(Work().tokens(3, 7)).split(), done.stderr


@pytest.mark.parametrize("shape", SHAPES)
def test_another_engine_is_given_our_work_on_every_shape(shape):
    work = program(H200 / "vllm_peer.py", "vllm_peer").work_of(shape)
    ours = Work.of_vocabulary(decoder_spec(SHAPES[shape]).vocab_size)  # as `bench gpu` asks the loaded model
    assert asdict(work) == asdict(ours)
    assert max(work.tokens(5000, 3)) < SHAPES[shape]["vocab_size"]
    for count, seed in ((2048, 0), (1024, 255), (300, 99)):
        assert work.tokens(count, seed) == ours.tokens(count, seed)


def test_the_work_is_what_vllm_was_measured_with():
    work, last = Work(), json.loads((H200 / "last.json").read_text())["qwen3-8b"]["vllm"]["8192"]
    keys = {f"prefill_{length}" for length in work.prompt_lengths} | {f"tpot_{b}_{c}" for b, c in work.batches}
    ways = [f"{name}_{logits}" for name in ("greedy", "sampled") for logits in ("flat", "peaked")]
    keys |= {f"tpot_{b}_{c}_{way}" for b, c in work.sampled_batches for way in ways}
    keys |= {"mixed", "mixed_of_2048", "mixed_of_512", "offline"}
    assert keys == set(last) - {"engine", "version", "shape", "batched", "device"}
    assert set(last["mixed"]) == {field.name for field in fields(Mixed)}
    requests = work.requests()
    assert last["offline"]["tin"] == sum(read for read, _ in requests)
    assert last["offline"]["tout"] == sum(written for _, written in requests)


def test_the_command_knows_every_shape():
    assert tuple(SHAPES) == SHAPE_NAMES


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
    script = program(H200 / "transformers_decode.py", "transformers_decode")
    model = random_transformers_model(SHAPE, "cpu")
    assert script.decode_step_s(model, SMALL, 3, 32) > 0
    prompts = [torch.tensor([SMALL.tokens(20, seed)]) for seed in range(3)]
    next_token = torch.tensor([[5], [6], [7]])
    with torch.inference_mode():
        cache = script.joined([model(prompt, use_cache=True).past_key_values for prompt in prompts])
        together = model(next_token, past_key_values=cache).logits[:, -1]
        whole = [torch.cat([prompt, token[None]], dim=1) for prompt, token in zip(prompts, next_token, strict=True)]
        alone = torch.cat([model(ids).logits[:, -1] for ids in whole])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0.02)
    save_model(model, str(tmp_path))
    settings = {"context": 100, "memory": "4GiB", "threads": 1}
    with Engine.load(str(tmp_path), lane="transformers-generic-text", **settings) as engine:
        assert engine.model.lane.facts.id == "transformers-generic-text"
        assert len(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True).token_ids) == 3


def test_random_weights_can_be_packed():
    with random_engine(SHAPE, quantize="int8", context=100, memory="4GiB", threads=1) as engine:
        assert len(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True).token_ids) == 3
        assert engine.model.memory.shape.weight_bytes < 250_000


@pytest.mark.evidence
def test_a_served_shape_is_measured_through_http_beside_the_engine_alone(tmp_path):
    settings = ("memory=1GiB", "threads=1", "context=512", "device=cpu", "dtype=float32", "block_size=16")
    size = ("--queue", "6", "64", "8", "--clients", "2", "--rounds", "1")
    script = [sys.executable, str(H200 / "through_http.py"), "--shape", "tiny", *size, "--log", str(tmp_path / "log")]
    done = subprocess.run([*script, "--set", *settings], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rsplit("RESULT ", 1)[1])
    num_tokens = sum(written for _, written in replace(Work(), queue=(6, 64, 8)).requests())
    for row in (found["alone"][0], found["whole"][0], found["streamed"][0]):
        assert (row["requests"], row["tout"]) == (6, num_tokens)
    assert found["streamed"][0]["events"] == num_tokens


def test_a_shape_is_served_in_place_of_a_model_and_alone():
    for flags, told in {("huge",): "huge", ("tiny", "--lane", "any"): "--lane", ("tiny", "another"): "another"}.items():
        command = [sys.executable, "-m", "penstock.cli.main", "serve", "--random-weights", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert told in done.stderr


def test_a_time_below_its_limit_is_told_as_a_wrong_limit():
    report = program(H200 / "report.py", "h200_report")
    last = json.loads((H200 / "last.json").read_text())
    ours = last["qwen3-8b"]["penstock"]
    ours["least_s"] = {"tpot_1_1024": 0.9 * ours["tpot_1_1024"]}
    assert "is wrong" not in report.table(last)
    ours["tpot_1_1024"] *= 0.8
    (wrong,) = (line for line in report.table(last).splitlines() if "is wrong" in line)
    assert wrong.startswith("| decode step, 1 at 1k")


def test_rows_are_held_against_the_limits():
    told: dict[str, str] = {}
    spec, limits = decoder_spec(SHAPE), DeviceLimits(product_gflops=1.0, read_gb_per_s=1.0)
    fast, slow = least_read_s(spec, 200, limits) / 2, 4 * least_step_s(spec, [32] * 4, limits)
    found = against_limits(
        spec, SMALL, limits, {"prefill_200": fast, "tpot_4_32": slow, "offline": {}}, told.__setitem__
    )
    assert set(found["least_s"]) == {"prefill_200", "tpot_4_32"}
    assert "200.0%; the limit was measured too low" in told["prefill_200 at the limits"]
    assert told["tpot_4_32 at the limits"].endswith("it reached 25.0%")


def test_experts_in_codes_are_held_against_the_bytes_of_their_codes():
    """What one H200 took for 8 answers of gpt-oss-20b at 1k, and the limits of the same card."""
    ours = {"limits": {"product_gflops": 796_655, "read_gb_per_s": 4285}, "tpot_8_1024": 3.039e-3}
    (least_s,) = program(H200 / "report.py", "h200_report")._least_s("gpt-oss-20b", ours).values()
    assert 0.5 * ours["tpot_8_1024"] < least_s < ours["tpot_8_1024"]
    in_values = against_limits(
        decoder_spec(SHAPES["gpt-oss-20b"]), Work(), DeviceLimits(**ours["limits"]), ours, lambda *_: None
    )
    assert in_values["least_s"]["tpot_8_1024"] > 2 * ours["tpot_8_1024"]


def test_a_step_reads_every_weight_but_the_embeddings_and_all_keys_and_values():
    model = random_transformers_model(SHAPE, "cpu")
    weights = sum(parameter.numel() for parameter in model.parameters()) - SHAPE["vocab_size"] * SHAPE["hidden_size"]
    spec, limits = decoder_spec(SHAPE), DeviceLimits(product_gflops=1.0, read_gb_per_s=1e-9)
    assert least_step_s(spec, [0], limits) == 2 * weights
    cached = 2 * 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    assert least_step_s(spec, [10, 30], limits) == 2 * weights + 40 * cached


def test_a_prompt_needs_the_products_that_torch_counts():
    """Torch counts every pair of attention and a row of the head for each token; of the last layer, keys are enough."""
    length, limits = 40, DeviceLimits(product_gflops=1e-9, read_gb_per_s=1e30)
    layers, heads = SHAPE["num_hidden_layers"] - 1, SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    model = random_transformers_model(SHAPE | {"num_hidden_layers": layers}, "cpu")
    model.set_attn_implementation("eager")
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        model(torch.tensor([SMALL.tokens(length, 0)]))
    unseen = 4 * heads * layers * (length * length - length * (length + 1) // 2)
    heads_of_others = 2 * (length - 1) * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    norms = 2 * length * (layers * (2 * SHAPE["hidden_size"] + 2 * SHAPE["head_dim"]) + SHAPE["hidden_size"])
    kept = 2 * length * 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * SHAPE["hidden_size"]
    expected = counted.get_total_flops() - unseen - heads_of_others + norms + kept
    assert least_read_s(decoder_spec(SHAPE), length, limits) == expected


def test_few_rows_choose_few_experts_and_windows_hide_keys():
    shape = SHAPES["qwen3-30b-a3b"]
    spec, limits = decoder_spec(shape), DeviceLimits(product_gflops=1.0, read_gb_per_s=1e-9)
    one, many = (least_step_s(spec, [0] * size, limits) / 2 for size in (1, 5000))
    of_one = 3 * shape["moe_intermediate_size"] * shape["hidden_size"] * shape["num_hidden_layers"]
    assert many - one == pytest.approx((shape["num_experts"] - shape["num_experts_per_tok"]) * of_one)
    assert _num_pairs(7, 3) == sum(min(position + 1, 3) for position in range(7))


def test_rows_of_a_run_that_was_ended_are_read_as_it_printed_them():
    report = program(H200 / "report.py", "h200_report")
    printed = []
    run = WorkRun(None, SMALL, lambda name, value: printed.append(f"{name}: {value}"))
    run.report("prefill 2048", "12.5 ms, 163840 tok/s")
    run.report("decode 8 at 1024", "2.125 ms per step, 3765 tok/s")
    run.report("target", "44 ms, cost ['1.00e-03']")
    run.report("beside decodes", Mixed(ttft=1.5, itl_quiet_p50=0.1, itl_p50=0.2, itl_p99=3e-05, itl_max=0.4, n=7))
    keys = report._printed("\n".join(printed))
    assert keys["prefill_2048"] == 0.0125
    assert keys["tpot_8_1024"] == 0.002125
    assert Mixed(**keys["mixed_at_44_ms"]).itl_p99 == 3e-05
