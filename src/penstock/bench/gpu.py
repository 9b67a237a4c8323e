"""A GPU, measured over the fixed work; under latency targets, by its kernels and by its bytes as well."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock.bench.limits import DeviceLimits, least_read_s, least_step_s, measured_limits
from penstock.bench.work import CONTEXT, MAX_RUNNING, SHAPES, Mixed, Report, Work, WorkRun
from penstock.bench.workbench import BenchSettings, EngineSubject, Workbench
from penstock.config import GIB
from penstock.engine.calibration import calibrate
from penstock.engine.engine import Engine
from penstock.errors import InvalidSetting
from penstock.models.quantization import Quantization, quantization_of
from penstock.models.spec import DecoderSpec
from penstock.plan.devices import require_device
from penstock.plan.machine import process_age_s
from penstock.request import StepPlan, StepResult
from penstock.trace.environment import versions

WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})  # of the host
REST_S = 1.0  # a card that has just been warmed up is slower for a moment


class _CardSubject(EngineSubject):
    def sharpen(self, factor: float) -> None:
        import torch

        decoder = getattr(self.engine.model.lane, "decoder", None)
        head_VM = getattr(decoder, "head_VM", None)
        if not isinstance(head_VM, torch.Tensor):
            raise InvalidSetting("Sampled decodes are measured with our own decoder, unquantised; leave out part s.")
        with torch.inference_mode():
            head_VM.mul_(factor)


class GpuBench(WorkRun):
    """Our own engine over the work, as any caller sends it requests."""

    def __init__(self, engine: Engine, work: Work, report: Report) -> None:
        super().__init__(_CardSubject(engine), work, report)
        self.engine = engine

    def run(self, parts: str, targets_ms: Iterable[float] = ()) -> dict[str, Any]:
        """The long prompt beside decodes comes again under each target."""
        found = super().run(parts)
        for target_ms in targets_ms:
            found[f"mixed_at_{target_ms:g}_ms"] = asdict(self._beside_decodes_within(target_ms))
        return found

    def warm_up(self) -> None:
        """Compiles the kernels and captures the decodes, as an engine that serves would before its first request."""
        self.engine.warm_up()
        longest = max(self.work.prompt_lengths)
        lengths = [min(length, longest) for length in (4096, 4, 40, 400, 4000, 12_000)]
        for _ in range(2):
            self.seconds([self.work.tokens(length, 0) for length in lengths], [4] * len(lengths))
        time.sleep(REST_S)

    def profile(self) -> None:
        """Kernels by their time on the device: of a prompt, of the last chunk of a longer one, and of two batches."""
        work = self.work
        self._profile("a chunk of 8192", [work.tokens(8192, 0)], 0, 1)
        self._profile("the last chunk of 32768", [work.tokens(32768, 0)], 3, 1)
        for size, context in work.batches[0], work.batches[2]:
            prompts = [work.tokens(context, seed) for seed in range(size)]
            self._profile(f"decode {size} at {context}", prompts, 40, 4)

    def _beside_decodes_within(self, target_ms: float) -> Mixed:
        """Reads a prompt beside decodes with nothing named but a latency target."""
        steps: list[tuple[float, float, int]] = []  # (measured over predicted seconds, measured, tokens)

        def watch(plan: StepPlan, result: StepResult) -> None:
            steps.append((result.elapsed_s / max(plan.predicted_s, 1e-9), result.elapsed_s, plan.num_tokens))

        cost = self.engine.scheduler.budget.cost = self.engine.scheduler.budget.cost or calibrate(self.engine)
        self.report("target", f"{target_ms:g} ms, cost {[f'{value:.2e}' for value in cost.coefficients]}")
        with self.engine.limits(watch=watch) as budget:
            budget.target_s = target_ms / 1e3
            found = self.beside_decodes()
        wide = [count for *_, count in steps if count > self.work.num_decoders]
        self.report("tokens of its steps", wide[self.work.num_decoders // 4 :: 12])
        worst = sorted(steps, reverse=True)[:8]
        self.report("late steps", [f"{late:.2f} x, {s * 1e3:.1f} ms, {count} tokens" for late, s, count in worst])
        return found

    def _profile(self, name: str, prompts: Sequence[Sequence[int]], num_warm: int, num_steps: int) -> None:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        for prompt in prompts:
            self.subject.submit(prompt, num_warm + num_steps)
        for _ in range(num_warm):
            self.engine.step()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            began = time.perf_counter()
            for _ in range(num_steps):
                self.engine.step()
            step_us = (time.perf_counter() - began) / num_steps * 1e6
        while self.engine.has_work:
            self.engine.step()
        found = seen.key_averages()
        busy = [kernel for kernel in found if kernel.device_type == DeviceType.CUDA]
        num_kernels = sum(kernel.count for kernel in busy) / num_steps
        num_waits = sum(call.count for call in found if call.key in WAITS) / num_steps
        per_layer = num_kernels / self.engine.model.spec.num_layers
        busy_us = sum(kernel.self_device_time_total for kernel in busy) / num_steps
        kernels = f"{num_kernels:.0f} kernels, {per_layer:.1f} a layer, {busy_us:.0f} us of {step_us:.0f}"
        self.report(f"profile of {name}", f"{kernels}; the host waits {num_waits:.1f} times; us per step")
        for kernel in sorted(busy, key=lambda kernel: -kernel.self_device_time_total)[:16]:
            us_per_step = kernel.self_device_time_total / num_steps
            self.report(f"{us_per_step:10.1f} us  {kernel.count / num_steps:6.0f} x", kernel.key[:90])


def against_limits(
    spec: DecoderSpec,
    work: Work,
    limits: DeviceLimits,
    found: Mapping[str, Any],
    report: Report,
    quantization: Quantization | None = None,
) -> dict[str, Any]:
    """Says what each row that was measured would take at the limits; one that took less shows a limit to be wrong."""
    given = limits, quantization
    least_s = {f"prefill_{length}": least_read_s(spec, length, *given) for length in work.prompt_lengths}
    least_s |= {
        f"tpot_{size}_{context}": least_step_s(spec, [context] * size, *given) for size, context in work.batches
    }
    least_s = {key: seconds for key, seconds in least_s.items() if key in found}
    for key, seconds in least_s.items():
        share = seconds / found[key]
        wrong = "; the limit was measured too low" if share > 1 else ""
        report(f"{key} at the limits", f"{seconds * 1e3:.2f} ms, of which it reached {share:.1%}{wrong}")
    return {"limits": limits.model_dump(), "least_s": least_s}


def measure_gpu(
    model: str | None,
    shape: str,
    parts: str,
    targets_ms: Iterable[float],
    asked: Mapping[str, Any],
    report: Report,
    *,
    with_profile: bool,
) -> dict[str, Any]:
    """Measures a model, or the shape with random weights where there is none; the document that `RESULT` shows."""
    import torch

    require_device("cuda", has_cuda=torch.cuda.is_available())
    settings = BenchSettings(model=model or shape, device="cuda", dtype="bfloat16")
    fixed: dict[str, Any] = {"block_size": 64, "prefix_cache": False, "context": CONTEXT, "max_running": MAX_RUNNING}
    workbench = Workbench(settings, shape=None if model else SHAPES[shape], **(fixed | dict(asked)))
    before = measured_limits("cuda")
    _forget_engines()
    with workbench.load() as engine:
        report("engine up", f"{process_age_s():.1f} s after the process began")
        spec, quantization = engine.model.spec, quantization_of(engine.model.files, engine.model.quantize, "cuda")
        work = Work.of_vocabulary(spec.vocab_size)
        bench = GpuBench(engine, work, report)
        after_loading_s = bench.seconds([work.tokens(128, 0)], [1])
        first_token_s = process_age_s()
        report("first token", f"{first_token_s:.1f} s, of which {after_loading_s:.1f} s after loading")
        bench.warm_up()
        report("warm", f"{process_age_s():.1f} s")
        found = bench.run(parts.replace("b", ""), targets_ms)
        if with_profile:
            bench.profile()
        facts = {
            "engine": "penstock",
            "lane": engine.model.lane.facts.id,
            "batched": asked["chunk_size"],
            "device": torch.cuda.get_device_name(),
            "versions": versions(),
            "first_token_s": first_token_s,
        }
    facts |= {"shape": shape} if model is None else {}
    peak_bytes = torch.cuda.max_memory_allocated()
    del engine, bench
    _forget_engines()
    limits = before.larger(measured_limits("cuda"))
    report(
        "limits", f"{limits.product_gflops / 1e3:.0f} TFLOP/s in products, {limits.read_gb_per_s / 1e3:.2f} TB/s read"
    )
    if isinstance(spec, DecoderSpec):
        found |= against_limits(spec, work, limits, found, report, quantization)
    if "b" in parts:
        found |= bytes_against_plan(workbench, work.prompt_lengths[1:], work, report)
    return {**facts, "peak_bytes": peak_bytes, **found}


def bytes_against_plan(bench: Workbench, lengths: Iterable[int], work: Work, report: Report) -> dict[str, Any]:
    """Bytes of the card for one prompt of each length: as planned before it is read, and the most that were taken."""
    found = {}
    for length in lengths:
        _forget_engines()
        with bench.load(context=length + 64, max_running=1) as engine:
            engine.warm_up()
            plan = engine.plan(length)
            planned = plan.peak_bytes - plan.runtime_bytes
            engine.generate(work.tokens(length, 0), max_tokens=2, ignore_eos=True)
            taken = engine.held.peak_bytes - plan.runtime_bytes
        del engine  # before the next takes its place
        found[f"bytes_{length}"] = {"planned": planned, "taken": taken}
        gap = f"{planned / GIB:.2f} GiB planned, {taken / GIB:.2f} taken, {planned / taken - 1:+.1%}"
        report(f"bytes for {length}", gap)
    return found


def _forget_engines() -> None:
    """Gives back what engines that were closed took of the card; its peak begins anew."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
