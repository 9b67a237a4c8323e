"""Measures a GPU over fixed work: prompts read alone, batches that write, a long prompt beside decodes, a full queue.

The model has the shape of Qwen3-8B and random weights made on the device; token ids come from seeds. So the numbers
depend on no file, and another engine can be given the same work. Prints one line `RESULT {json}`; times are seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engine.engine import Engine  # sets OpenMP's wait policy, so it stands before torch

import tokenizers  # isort: skip
import torch

from penstock.cache.storage import KvStorage
from penstock.config import EngineConfig
from penstock.engine.calibration import calibrate
from penstock.engine.loading import LoadedModel, attention_backend, decode_graphs, gpu_memory
from penstock.engine.planning import CUDA_TILING
from penstock.lanes.lane import native_shape, pick_lane
from penstock.lanes.native import NativeTextLane
from penstock.models.decoder import Decoder
from penstock.models.spec import decoder_spec
from penstock.plan.memory import MemoryModel
from penstock.prompt.tokens import Tokenizer
from penstock.request import Token

# --- the work -----------------------------------------------------------------------------------------------

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}
PROMPT_LENGTHS = (2048, 8192, 32768, 131072)
BATCHES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (8, 32768))  # (sequences, context of each)
NUM_DECODE_STEPS = 128
NUM_DECODERS, DECODER_CONTEXT, DECODER_TOKENS, LONG_PROMPT = 32, 2048, 400, 65536
NUM_QUIET_STEPS = 60  # before the long prompt arrives
MAX_CONTEXT = 140_000
MAX_RUNNING = 256


def token_ids(count: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(10, 150_000) for _ in range(count))


def mixed_queue(count: int = 256, seed: int = 1) -> list[tuple[int, int]]:
    """(prompt tokens, tokens to write) of each request."""
    generator = random.Random(seed)
    return [(generator.randint(128, 4096), generator.randint(64, 256)) for _ in range(count)]


# --- the engine ---------------------------------------------------------------------------------------------


def random_engine(settings: EngineConfig, memory_share: float, has_graphs: bool) -> Engine:
    device = torch.device("cuda")
    gpu = gpu_memory(device)
    assert gpu is not None
    spec = decoder_spec(QWEN3_8B)
    decoder = Decoder(spec, dtype=torch.bfloat16, device=device)
    fill_randomly(decoder)
    budget = int(gpu.total_bytes * memory_share)
    memory = MemoryModel(
        shape=native_shape(QWEN3_8B, "bfloat16"),
        tiling=CUDA_TILING,
        runtime_bytes=gpu.runtime_bytes,
        block_size=settings.block_size,
    )
    chunk = settings.chunk_size or settings.max_chunk_size
    num_blocks = memory.kv_capacity(budget_bytes=budget, chunk=chunk) // settings.block_size
    storage = KvStorage(
        num_layers=spec.num_layers,
        num_slots=num_blocks * settings.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=torch.bfloat16,
        device=device,
    )
    facts = pick_lane(QWEN3_8B, None)
    attention = attention_backend(storage, settings.block_size, spec.num_heads)
    graphs = decode_graphs(decoder, attention, max_running=MAX_RUNNING, max_context=MAX_CONTEXT) if has_graphs else None
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w0": 0}, unk_token="w0"))
    model = LoadedModel(
        name="qwen3-8b-random",
        identity="random",
        spec=spec,
        lane=NativeTextLane(decoder, attention, shape=memory.shape, facts=facts, graphs=graphs),
        tokenizer=Tokenizer(words),
        chat_template=None,
        eos_ids=frozenset(),
        memory=memory,
        budget_bytes=budget,
        num_blocks=num_blocks,
        max_context=MAX_CONTEXT,
        dtype="bfloat16",
        device=device,
        adjustments=(),
    )
    return Engine(model, settings)


@torch.inference_mode()
def fill_randomly(decoder: Decoder) -> None:
    torch.manual_seed(0)
    for name, parameter in decoder._destinations():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02)


class Bench:
    """Requests to an engine as any caller sends them: greedy, with ids instead of text."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def has_work(self) -> bool:
        return self.engine.scheduler.has_work

    def submit(self, prompt: Sequence[int], num_tokens: int) -> int:
        return self.engine.submit(prompt, max_tokens=num_tokens, ignore_eos=True)

    def step(self) -> list[int]:
        """One step; the requests that received a token."""
        return [event.request_id for event in self.engine.step() if isinstance(event, Token)]

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> float:
        """From submission to the last token of all."""
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        for prompt, count in zip(prompts, num_tokens, strict=True):
            self.submit(prompt, count)
        while self.has_work:
            self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - started_at


def warm_up(bench: Bench) -> None:
    """Compiles the kernels and records the decodes, as an engine that serves would before its first request."""
    lane = bench.engine.model.lane
    if isinstance(lane, NativeTextLane) and lane.graphs is not None:
        lane.graphs.record_all()
    for _ in range(2):
        bench.seconds([token_ids(length, 0) for length in (4096, 4, 40, 400, 4000, 12_000)], [4] * 6)


# --- the parts ----------------------------------------------------------------------------------------------


def read_prompts(bench: Bench) -> dict[str, object]:
    found: dict[str, object] = {}
    for length in PROMPT_LENGTHS:
        times = [bench.seconds([token_ids(length, seed)], [1]) for seed in range(4 if length < 100_000 else 2)]
        found[f"prefill_{length}"] = min(times)
        report(f"prefill {length}", f"{min(times) * 1e3:.1f} ms, {length / min(times):.0f} tok/s")
    return found


def write_batches(bench: Bench) -> dict[str, object]:
    found: dict[str, object] = {}
    for size, context in BATCHES:
        prompts = [token_ids(context, seed) for seed in range(size)]
        bench.seconds(prompts, [8] * size)
        first = min(bench.seconds(prompts, [1] * size) for _ in range(2))
        all_ = min(bench.seconds(prompts, [1 + NUM_DECODE_STEPS] * size) for _ in range(2))
        step_s = (all_ - first) / NUM_DECODE_STEPS
        found[f"tpot_{size}_{context}"] = step_s
        report(f"decode {size} at {context}", f"{step_s * 1e3:.3f} ms per step, {size / step_s:.0f} tok/s")
    return found


@dataclass(slots=True, kw_only=True)
class Gaps:
    """Times between the tokens of each decoder, before or after the long prompt and beside it."""

    last: dict[int, float]
    quiet: list[float]
    beside: list[float]


def long_beside_decodes(bench: Bench) -> dict[str, object]:
    for seed in range(NUM_DECODERS):
        bench.submit(token_ids(DECODER_CONTEXT, seed), DECODER_TOKENS)
    gaps = Gaps(last={}, quiet=[], beside=[])
    long_id: int | None = None
    arrived_at = 0.0
    ttft: float | None = None
    num_steps = 0
    while bench.has_work:
        tokens = bench.step()
        now = time.perf_counter()
        num_steps += 1
        is_reading = long_id is not None and ttft is None
        for sequence_id in tokens:
            if sequence_id == long_id:
                ttft = now - arrived_at
                continue
            if sequence_id in gaps.last:
                (gaps.beside if is_reading else gaps.quiet).append(now - gaps.last[sequence_id])
            gaps.last[sequence_id] = now
        if long_id is None and len(gaps.last) == NUM_DECODERS and num_steps > NUM_QUIET_STEPS:
            arrived_at = time.perf_counter()
            long_id = bench.submit(token_ids(LONG_PROMPT, 99), 1)
    mixed = {
        "ttft": ttft,
        "itl_quiet_p50": quantile(gaps.quiet, 0.5),
        "itl_p50": quantile(gaps.beside, 0.5),
        "itl_p99": quantile(gaps.beside, 0.99),
        "itl_max": max(gaps.beside),
        "n": len(gaps.beside),
    }
    report("mixed", mixed)
    return {"mixed": mixed}


def under_target(bench: Bench, target_ms: float) -> object:
    """The mixed work again, with nothing named but a latency target."""
    budget = bench.engine.scheduler.budget
    budget.cost = budget.cost or calibrate(bench.engine)
    budget.target_s = target_ms / 1e3
    report("target", f"{target_ms:g} ms, cost {[f'{value:.2e}' for value in budget.cost.coefficients]}")
    sizes: list[int] = []
    bench.engine.on_step = lambda plan, result: sizes.append(plan.num_tokens)
    found = long_beside_decodes(bench)["mixed"]
    budget.target_s = None
    bench.engine.on_step = None
    report("tokens of its steps", [size for size in sizes if size > NUM_DECODERS][NUM_DECODERS // 4 :: 12])
    report("cost", [f"{value:.2e}" for value in budget.cost.coefficients])
    return found


def host_times(bench: Bench) -> None:
    """Where the host's time of one chunk goes, before the device has it all."""
    engine = bench.engine
    for length in (2048, 8192):
        for _ in range(2):
            torch.cuda.synchronize()
            times = [time.perf_counter()]
            engine.submit(token_ids(length, 5), max_tokens=1, ignore_eos=True)
            times.append(time.perf_counter())
            plan = engine.scheduler.next_step()
            assert plan is not None
            times.append(time.perf_counter())
            inputs = engine._runner._inputs(plan, engine.scheduler.sequences, [length - 1], None)
            times.append(time.perf_counter())
            engine.model.lane.run(inputs)
            times.append(time.perf_counter())
            torch.cuda.synchronize()
            times.append(time.perf_counter())
            engine.scheduler.fail(plan.step)
            engine.abort(plan.chunks[0].sequence_id)
        names = ("submit", "plan", "inputs", "launch", "wait")
        spent = {name: f"{(b - a) * 1e3:.2f}" for name, a, b in zip(names, times, times[1:], strict=False)}
        report(f"host ms of a chunk of {length}", spent)


def full_queue(bench: Bench) -> dict[str, object]:
    requests = mixed_queue()
    prompts = [token_ids(length, seed) for seed, (length, _) in enumerate(requests)]
    seconds = bench.seconds(prompts, [count for _, count in requests])
    num_in, num_out = sum(length for length, _ in requests), sum(count for _, count in requests)
    offline = {"s": seconds, "tin": num_in, "tout": num_out, "tok_s": (num_in + num_out) / seconds}
    report("offline", offline)
    return {"offline": offline}


def profile(bench: Bench, name: str, prompts: Sequence[Sequence[int]], num_warm: int, num_steps: int) -> None:
    """Kernels by their time on the device, of a few steps after the first ones."""
    for prompt in prompts:
        bench.submit(prompt, num_warm + num_steps)
    for _ in range(num_warm):
        bench.step()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(num_steps):
            bench.step()
    while bench.has_work:
        bench.step()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    report(f"profile of {name}", f"us per step, {num_steps} steps")
    for row in [row for row in rows if row.self_device_time_total > 0][:16]:
        count = row.count / num_steps
        print(f"  {row.self_device_time_total / num_steps:10.1f} us  {count:6.0f} x  {row.key[:90]}", flush=True)


PARTS: dict[str, Callable[[Bench], dict[str, object]]] = {
    "p": read_prompts,
    "d": write_batches,
    "m": long_beside_decodes,
    "o": full_queue,
}


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def report(name: str, value: object) -> None:
    print(f"{name}: {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="pdmo", help="p prompts, d decodes, m mixed, o offline")
    parser.add_argument("--budget", type=int, default=8192, help="prompt tokens of one step")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--memory-share", type=float, default=0.85)
    parser.add_argument("--targets", type=float, nargs="*", help="also the mixed work under these targets, in ms")
    parser.add_argument("--eager", action="store_true", help="launch decodes kernel by kernel")
    parser.add_argument("--profile", action="store_true", help="also show where the time of a step goes")
    arguments = parser.parse_args()
    settings = EngineConfig(
        chunk_size=arguments.budget,
        block_size=arguments.block_size,
        context=MAX_CONTEXT,
        max_running=MAX_RUNNING,
        prefix_cache=False,
        dtype="bfloat16",
        device="cuda",
    )
    started_at = time.perf_counter()
    bench = Bench(random_engine(settings, arguments.memory_share, not arguments.eager))
    report("engine up", f"{time.perf_counter() - started_at:.1f} s")
    warm_up(bench)
    report("warm", f"{time.perf_counter() - started_at:.1f} s")
    results: dict[str, object] = {}
    for part in arguments.parts:
        results |= PARTS[part](bench)
    for target in arguments.targets or ():
        results[f"mixed_at_{target:g}_ms"] = under_target(bench, target)
    if arguments.profile:
        host_times(bench)
        profile(bench, "a chunk of 8192", [token_ids(8192, 0)], 0, 1)
        profile(bench, "the last chunk of 32768", [token_ids(32768, 0)], 3, 1)
        for size, context in BATCHES[0], BATCHES[2]:
            profile(bench, f"decode {size} at {context}", [token_ids(context, seed) for seed in range(size)], 40, 4)
    peak_bytes = torch.cuda.max_memory_allocated()
    facts = {"engine": "penstock", "batched": arguments.budget, "device": torch.cuda.get_device_name()}
    print("RESULT", json.dumps({**facts, "peak_bytes": peak_bytes, **results}))


if __name__ == "__main__":
    main()
