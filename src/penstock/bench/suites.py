"""Suites: which probes run, and how large they are on a processor and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version

from penstock.bench.changes import BenchReport, compare, confirm
from penstock.bench.ledger import BenchRun, Fingerprint, gpu_names
from penstock.bench.probes import PROBES
from penstock.bench.samples import ProbeResult
from penstock.bench.workbench import ProbeSizes, Workbench
from penstock.models.files import resolve
from penstock.trace.environment import versions

QUICK = ProbeSizes(least_seconds=3.0)
FULL = ProbeSizes(
    least_seconds=3.0,
    prompt_lengths=(128, 512, 2048, 8192, 16384),
    output_lengths=(16, 64, 256),
    sweep_tokens=8192,
    chunk_sizes=(0, 64, 128, 256, 512, 1024, 2048, 4096),
    memory_lengths=(1024, 2048, 4096, 8192, 16384),
    num_streams=8,
    beside_tokens=6144,
    turn_tokens=100,
    answer_tokens=16,
    reopen_tokens=4096,
)
FULL_ON_GPU = FULL.model_copy(
    update={
        "prompt_lengths": (128, 2048, 8192, 32768, 131072),
        "sweep_tokens": 32768,
        "memory_lengths": (1024, 4096, 16384, 65536, 131072),
        "num_streams": 32,
        "beside_tokens": 65536,
        "latency_target_ms": 50,
        "reopen_tokens": 32768,
    }
)


def run_suite(
    name: str, bench: Workbench, *, on_probe: Callable[[ProbeResult], None] = lambda result: None
) -> BenchRun:
    probes = PROBES if name in ("quick", "full") else {name: PROBES[name]}
    started, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    results: list[ProbeResult] = []
    for probe in probes.values():
        results.append(probe(bench))
        on_probe(results[-1])
    return BenchRun(
        suite=name,
        started_at=started_at,
        seconds=time.perf_counter() - started,
        fingerprint=Fingerprint.of_this_machine(),
        versions=versions(),
        model_identity=resolve(bench.settings.model).identity,
        settings=bench.settings,
        sizes=bench.sizes,
        probes=tuple(results),
    )


def compare_twice(
    before: BenchRun, run: BenchRun, bench: Workbench, *, on_probe: Callable[[ProbeResult], None] = lambda result: None
) -> BenchReport:
    """Probes in which something changed are measured again; only what changes twice is said to have changed."""
    found = compare(before, run)
    suspected = {change.probe for change in found.flagged}
    if not suspected:
        return BenchReport(run=run, comparison=found)
    started = time.perf_counter()
    again: dict[str, ProbeResult] = {}
    for name in (probe.name for probe in run.probes if probe.name in suspected):
        again[name] = PROBES[name](bench)
        on_probe(again[name])
    second = run.model_copy(update={"probes": tuple(again.values())})
    merged = [probe.merged(again[probe.name]) if probe.name in again else probe for probe in run.probes]
    seconds = run.seconds + time.perf_counter() - started
    whole = run.model_copy(update={"probes": tuple(merged), "seconds": seconds})
    return BenchReport(run=whole, comparison=confirm(found, compare(before, second)))


def sizes_of(suite: str, device: str) -> ProbeSizes:
    if suite == "quick":
        return QUICK
    has_gpu = device == "cuda" or (device == "auto" and bool(gpu_names()) and "+cpu" not in version("torch"))
    return FULL_ON_GPU if has_gpu else FULL
