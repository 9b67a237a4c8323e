"""Fixed work for a GPU: prompts read alone, batches that write, a long prompt beside decodes, a full queue.

Token ids come from seeds and weights may be random, so the figures depend on no file, and another engine can be given
the same work. Times are seconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.engine.calibration import calibrate
from penstock.engine.engine import Engine
from penstock.engine.profiling import kernel_times
from penstock.request import StepPlan, StepResult, Token
from penstock.trace.summary import percentile

Report = Callable[[str, object], None]
REST_S = 1.0  # a card that has just been warmed up is slower for a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    prompt_lengths: tuple[int, ...] = (2048, 8192, 32768, 131072)
    batches: tuple[tuple[int, int], ...] = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (8, 32768))  # of a context
    num_decode_steps: int = 128
    num_decoders: int = 32
    decoder_context: int = 2048
    decoder_tokens: int = 400
    long_prompt: int = 65536
    num_quiet_steps: int = 60  # before the long prompt arrives
    queue: tuple[int, int, int] = (256, 4096, 256)  # requests, and the most tokens that one reads and writes
    vocabulary: int = 150_000

    def tokens(self, count: int, seed: int) -> tuple[int, ...]:
        generator = random.Random(seed)
        return tuple(generator.randrange(10, self.vocabulary) for _ in range(count))

    def requests(self) -> list[tuple[int, int]]:
        """(prompt tokens, tokens to write) of each request in the full queue."""
        generator = random.Random(1)
        count, most_read, most_written = self.queue
        return [
            (generator.randint(most_read // 32, most_read), generator.randint(most_written // 4, most_written))
            for _ in range(count)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Gaps between the tokens of each decoder, in quiet and beside the long prompt, whose first token takes `ttft`."""

    ttft: float
    itl_quiet_p50: float
    itl_p50: float
    itl_p99: float
    itl_max: float
    n: int


class GpuBench:
    """Requests to an engine as any caller sends them: greedy, with ids instead of text."""

    def __init__(self, engine: Engine, work: Work, report: Report) -> None:
        self.engine = engine
        self.work = work
        self._report = report

    def run(self, parts: str, targets_ms: Iterable[float] = ()) -> dict[str, Any]:
        """`parts`: p prompts, d decodes, m a long prompt beside decodes, o a full queue; m again under each target."""
        found: dict[str, Any] = {}
        for part in parts:
            found |= self.parts[part]()
        for target_ms in targets_ms:
            found[f"mixed_at_{target_ms:g}_ms"] = asdict(self._beside_decodes_within(target_ms))
        return found

    @property
    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {
            "p": self._read_prompts,
            "d": self._write_batches,
            "m": lambda: {"mixed": asdict(self._beside_decodes())},
            "o": self._full_queue,
        }

    def warm_up(self) -> None:
        """Compiles the kernels and records the decodes, as an engine that serves would before its first request."""
        self.engine.warm_up()
        longest = max(self.work.prompt_lengths)
        lengths = [min(length, longest) for length in (4096, 4, 40, 400, 4000, 12_000)]
        for _ in range(2):
            self.seconds([self.work.tokens(length, 0) for length in lengths], [4] * len(lengths))
        time.sleep(REST_S)

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> float:
        """From submission to the last token of all."""
        started_at = time.perf_counter()
        for prompt, count in zip(prompts, num_tokens, strict=True):
            self._submit(prompt, count)
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - started_at

    def profile(self) -> None:
        """Kernels by their time on the device: of a prompt, of the last chunk of a longer one, and of two batches."""
        work = self.work
        self._profile("a chunk of 8192", [work.tokens(8192, 0)], 0, 1)
        self._profile("the last chunk of 32768", [work.tokens(32768, 0)], 3, 1)
        for size, context in work.batches[0], work.batches[2]:
            prompts = [work.tokens(context, seed) for seed in range(size)]
            self._profile(f"decode {size} at {context}", prompts, 40, 4)

    def _read_prompts(self) -> dict[str, Any]:
        found = {}
        for length in self.work.prompt_lengths:
            num_runs = 4 if length < 100_000 else 2
            seconds = min(self.seconds([self.work.tokens(length, seed)], [1]) for seed in range(num_runs))
            found[f"prefill_{length}"] = seconds
            self._report(f"prefill {length}", f"{seconds * 1e3:.1f} ms, {length / seconds:.0f} tok/s")
        return found

    def _write_batches(self) -> dict[str, Any]:
        found = {}
        num_steps = self.work.num_decode_steps
        for size, context in self.work.batches:
            prompts = [self.work.tokens(context, seed) for seed in range(size)]
            self.seconds(prompts, [8] * size)
            first = min(self.seconds(prompts, [1] * size) for _ in range(2))
            all_ = min(self.seconds(prompts, [1 + num_steps] * size) for _ in range(2))
            step_s = (all_ - first) / num_steps
            found[f"tpot_{size}_{context}"] = step_s
            self._report(f"decode {size} at {context}", f"{step_s * 1e3:.3f} ms per step, {size / step_s:.0f} tok/s")
        return found

    def _beside_decodes(self) -> Mixed:
        work, engine = self.work, self.engine
        for seed in range(work.num_decoders):
            self._submit(work.tokens(work.decoder_context, seed), work.decoder_tokens)
        last: dict[int, float] = {}
        quiet: list[float] = []
        beside: list[float] = []
        long_id: int | None = None
        arrived_at = ttft = 0.0
        num_steps = 0
        while engine.has_work:
            tokens = [event.request_id for event in engine.step() if isinstance(event, Token)]
            now = time.perf_counter()
            num_steps += 1
            is_reading = long_id is not None and not ttft
            for request_id in tokens:
                if request_id == long_id:
                    ttft = now - arrived_at
                    continue
                if request_id in last:
                    (beside if is_reading else quiet).append(now - last[request_id])
                last[request_id] = now
            if long_id is None and len(last) == work.num_decoders and num_steps > work.num_quiet_steps:
                arrived_at = time.perf_counter()
                long_id = self._submit(work.tokens(work.long_prompt, 99), 1)
        found = Mixed(
            ttft=ttft,
            itl_quiet_p50=percentile(quiet, 0.5),
            itl_p50=percentile(beside, 0.5),
            itl_p99=percentile(beside, 0.99),
            itl_max=max(beside),
            n=len(beside),
        )
        self._report("beside decodes", found)
        return found

    def _beside_decodes_within(self, target_ms: float) -> Mixed:
        """With nothing named but a latency target."""
        budget = self.engine.scheduler.budget
        budget.cost = budget.cost or calibrate(self.engine)
        budget.target_s = target_ms / 1e3
        self._report("target", f"{target_ms:g} ms, cost {[f'{value:.2e}' for value in budget.cost.coefficients]}")
        sizes: list[int] = []
        slowest: list[tuple[float, float, int]] = []  # (measured over predicted seconds, measured, tokens)
        before = self.engine.on_step

        def watch(plan: StepPlan, result: StepResult) -> None:
            sizes.append(plan.num_tokens)
            slowest.append((result.elapsed_s / max(plan.predicted_s, 1e-9), result.elapsed_s, plan.num_tokens))

        self.engine.on_step = watch
        try:
            return self._beside_decodes()
        finally:
            budget.target_s = None
            self.engine.on_step = before
            wide = [size for size in sizes if size > self.work.num_decoders]
            self._report("tokens of its steps", wide[self.work.num_decoders // 4 :: 12])
            worst = sorted(slowest, reverse=True)[:8]
            self._report("late steps", [f"{late:.2f} x, {s * 1e3:.1f} ms, {count} tokens" for late, s, count in worst])

    def _full_queue(self) -> dict[str, Any]:
        requests = self.work.requests()
        prompts = [self.work.tokens(length, seed) for seed, (length, _) in enumerate(requests)]
        seconds = self.seconds(prompts, [count for _, count in requests])
        num_in, num_out = sum(length for length, _ in requests), sum(count for _, count in requests)
        offline = {"s": seconds, "tin": num_in, "tout": num_out, "tok_s": (num_in + num_out) / seconds}
        self._report("offline", offline)
        return {"offline": offline}

    def _profile(self, name: str, prompts: Sequence[Sequence[int]], num_warm: int, num_steps: int) -> None:
        for prompt in prompts:
            self._submit(prompt, num_warm + num_steps)
        for _ in range(num_warm):
            self.engine.step()
        kernels = kernel_times(self.engine, num_steps)
        while self.engine.has_work:
            self.engine.step()
        self._report(f"profile of {name}", f"us per step, {num_steps} steps")
        for kernel in kernels[:16]:
            self._report(f"{kernel.us_per_step:10.1f} us  {kernel.num_per_step:6.0f} x", kernel.name[:90])

    def _submit(self, prompt: Sequence[int], num_tokens: int) -> int:
        return self.engine.submit(prompt, max_tokens=num_tokens, ignore_eos=True)


def bytes_against_plan(
    load: Callable[..., Engine], lengths: Iterable[int], work: Work, peak_bytes: Callable[[], int], report: Report
) -> dict[str, Any]:
    """Bytes of the card for one prompt of each length: as planned before it is read, and the most that were taken."""
    found = {}
    for length in lengths:
        with load(context=length + 64, max_running=1) as engine:
            engine.warm_up()
            plan = engine.plan(length)
            planned = plan.peak_bytes - plan.runtime_bytes
            engine.generate(work.tokens(length, 0), max_tokens=2, ignore_eos=True)
            taken = peak_bytes()
        del engine  # before the next takes its place
        found[f"bytes_{length}"] = {"planned": planned, "taken": taken}
        gap = f"{planned / 2**30:.2f} GiB planned, {taken / 2**30:.2f} taken, {planned / taken - 1:+.1%}"
        report(f"bytes for {length}", gap)
    return found
