"""`penstock bench`: suites of probes, the scheduler in virtual time, and what scheduling costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import Dtype, Json, LaneId, LlamaPython, Model, Peers, Threads, chosen, chosen_peers
from penstock.cli.suites import add_suites
from penstock.config import DEFAULT_MODEL
from penstock.errors import InvalidSetting

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.report import Summary

bench = typer.Typer(help="Measurements that anyone can repeat.", no_args_is_help=True)
add_suites(bench)

EXIT_CHECK_FAILED = 1
SCENARIO_NAMES = ("beside-64k", "questions", "bursts", "day")
COST_NAMES = ("h200", "cpu")
CPU_PARTS = ("reading", "chunks", "writing", "streams", "memory", "quality", "qwen3")
MOST_US_AT_256 = 1_000.0
GPU_CONTEXT, GPU_VOCABULARY = 140_000, 150_000  # what the peers are given


@bench.command()
def schedule(
    scenario: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SCENARIO_NAMES)}; may be repeated, all unless given.")
    ] = None,
    cost: Annotated[list[str] | None, typer.Option(help="h200 or cpu; may be repeated, both unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals and the noise.")] = 1,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once; one per core unless given.")] = None,
    json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Draw TTFT against gaps into this .png or .svg file.")] = None,
) -> None:
    """Replay arrivals through the real scheduler in virtual time, with measured costs in place of a model."""
    scenarios = chosen("--scenario", scenario, SCENARIO_NAMES)
    costs = chosen("--cost", cost, COST_NAMES)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise InvalidSetting(f"--plot is {str(plot)!r}; the file must end in .png or .svg.")
    raise typer.Exit(_schedule(scenarios, costs, seed=seed, num_jobs=jobs, as_json=json, plot=plot))


@bench.command("scheduling-cost")
def scheduling_cost(json: Json = False) -> None:
    """Time the scheduler itself, per step, with 16 to 1024 running sequences beside one long prompt."""
    raise typer.Exit(_scheduling_cost(as_json=json))


@bench.command()
def stalls(
    model: Model = DEFAULT_MODEL,
    decodes: Annotated[int, typer.Option(help="Streams that run when the long prompt arrives.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the long prompt.")] = 6000,
    latency_target_ms: Annotated[float, typer.Option(help="The target that the priorities are measured under.")] = 150,
    threads: Threads = None,
    dtype: Dtype = None,
    most_seconds: Annotated[float, typer.Option(help="Time for one variant; then it says how far it came.")] = 90,
    json: Json = False,
) -> None:
    """Measure the gaps of running streams while a long prompt is read beside them, on the real engine."""
    from pydantic import TypeAdapter

    from penstock.bench.stalls import StallResult, StallSettings, measure_stalls

    settings = StallSettings(
        model=model,
        num_decodes=decodes,
        decode_context=100,
        prompt_tokens=prompt_tokens,
        target_ms=latency_target_ms,
        threads=threads,
        dtype=dtype or "auto",
        most_seconds=most_seconds,
    )
    results = []
    for result in measure_stalls(settings):
        results.append(result)
        if not json:
            print(
                f"{result.name:<38} gap p50 {result.gap_p50_ms:>8.0f} ms  p99 {result.gap_p99_ms:>8.0f} ms  "
                f"max {result.gap_max_ms:>8.0f} ms  read {result.num_read:>6} in {result.seconds:>6.1f} s  "
                f"{result.tokens_per_s:>6.0f} tok/s",
                flush=True,
            )
    if json:
        print(TypeAdapter(list[StallResult]).dump_json(results, indent=2).decode())


@bench.command()
def gpu(
    model: Annotated[str | None, typer.Argument(help="A model to measure; or give --random-weights.")] = None,
    random_weights: Annotated[bool, typer.Option(help="The shape of Qwen3-8B with random weights, no file.")] = False,
    parts: Annotated[
        str, typer.Option(help="p prompts, d decodes, m 65k beside 32 decodes, o full queue, b bytes against the plan.")
    ] = "pdmo",
    target: Annotated[list[float] | None, typer.Option(help="m again under this latency target, in ms.")] = None,
    chunk_size: Annotated[int, typer.Option(help="The most prompt tokens of a step.")] = 8192,
    memory: Annotated[str | None, typer.Option(help="Budget, such as 100GiB; most of the card unless given.")] = None,
    profile: Annotated[bool, typer.Option(help="Also show which kernels take the time.")] = False,
    lane: LaneId = None,
) -> None:
    """Measure a GPU over fixed work that other engines can be given too; the last line is RESULT and JSON."""
    if (model is None) != random_weights:
        raise InvalidSetting("Give a model or --random-weights, and not both.")
    if random_weights and lane is not None:
        raise InvalidSetting("--random-weights are those of our own decoder; --lane takes a model.")
    if wrong := set(parts) - set("pdmob"):
        raise InvalidSetting(f"--parts has {''.join(sorted(wrong))!r}; the parts are p, d, m, o and b.")
    asked = {"chunk_size": chunk_size, "memory": memory, "lane": lane}
    _gpu(model, parts, target or [], asked, with_profile=profile)


def _gpu(model: str | None, parts: str, targets: list[float], asked: Mapping[str, Any], *, with_profile: bool) -> None:
    import gc

    import torch
    from pydantic_core import to_json

    from penstock.bench.gpu import GpuBench, Work, bytes_against_plan
    from penstock.bench.versions import versions
    from penstock.engine.engine import Engine
    from penstock.engine.planning import require_device
    from penstock.engine.random_model import QWEN3_8B, random_engine
    from penstock.plan.machine import process_age_s

    def report(name: str, value: object) -> None:
        print(f"{name}: {value}", flush=True)

    require_device("cuda", has_cuda=torch.cuda.is_available())
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "block_size": 64,
        "context": GPU_CONTEXT,
        "max_running": 256,
        "prefix_cache": False,
        **asked,
    }

    def load(**others: Any) -> Engine:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        settings_now = settings | others
        return random_engine(QWEN3_8B, **settings_now) if model is None else Engine.load(model, **settings_now)

    with load() as engine:
        report("engine up", f"{process_age_s():.1f} s after the process began")
        work = Work(vocabulary=min(GPU_VOCABULARY, engine.model.spec.vocab_size))
        measured = GpuBench(engine, work, report)
        after_loading_s = measured.seconds([work.tokens(128, 0)], [1])
        first_token_s = process_age_s()
        report("first token", f"{first_token_s:.1f} s, of which {after_loading_s:.1f} s after loading")
        measured.warm_up()
        report("warm", f"{process_age_s():.1f} s")
        found = measured.run(parts.replace("b", ""), targets)
        if with_profile:
            measured.profile()
        facts = {
            "engine": "penstock",
            "lane": engine.model.lane.facts.id,
            "batched": asked["chunk_size"],
            "device": torch.cuda.get_device_name(),
            "versions": versions(),
            "first_token_s": first_token_s,
        }
    peak_bytes = torch.cuda.max_memory_allocated()
    del engine, measured
    if "b" in parts:
        found |= bytes_against_plan(load, work.prompt_lengths[1:], work, torch.cuda.max_memory_allocated, report)
    print("RESULT", to_json({**facts, "peak_bytes": peak_bytes, **found}).decode())


@bench.command()
def cpu(
    model: Model = DEFAULT_MODEL,
    peers: Peers = "",
    llama_python: LlamaPython = None,
    only: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CPU_PARTS)}; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each goes through all.")] = 3,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; may be repeated.")] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure reading and writing on this processor beside other programs, in turns, each in its own process."""
    from penstock.bench.cpu import default_settings, measure_cpu
    from penstock.cli.cpu_table import show_cpu

    settings = default_settings(
        model=model,
        parts=tuple(chosen("--only", only, CPU_PARTS)),
        peers=chosen_peers(peers, llama_python),
        repeats=repeats,
        lengths=tuple(length) if length else None,
        threads=threads,
    )
    report = measure_cpu(settings)
    if json:
        print(report.model_dump_json(indent=2))
    else:
        show_cpu(report)


def _schedule(
    scenarios: list[str], costs: list[str], *, seed: int, num_jobs: int | None, as_json: bool, plot: Path | None
) -> int:
    from concurrent.futures import ProcessPoolExecutor

    from rich.console import Console

    from penstock.bench.costs import MACHINES
    from penstock.bench.report import Case, Check, Report, all_cases, check_all, check_lone_question
    from penstock.bench.workloads import SCENARIOS, SIZES
    from penstock.cli.terminal import report_console
    from penstock.plan.machine import num_physical_cores

    out, progress = report_console(), Console(stderr=True, highlight=False)
    runs: list[Summary] = []
    checks: list[Check] = []
    titles: dict[str, str] = {}
    with ProcessPoolExecutor(num_jobs or num_physical_cores()) as pool:
        for machine in (MACHINES[name] for name in costs):
            if not as_json:
                out.print(f"{machine.name}: costs fitted to {machine.source}; scenarios {machine.scale}; ", end="")
                out.print(f"at most {machine.ceiling:,} tokens per step, floor {machine.floor}")
            for name in scenarios:
                began = time.perf_counter()
                found = list(pool.map(Case.run, all_cases(machine.name, name, seed=seed)))
                runs += found
                title = titles[f"{machine.name} {name}"] = SCENARIOS[name](SIZES[machine.name], Random(seed)).title
                if not as_json:
                    _show(out, f"{machine.name}, {name}: {title}", found)
                progress.print(f"{machine.name} {name}: {len(found)} runs in {time.perf_counter() - began:.1f} s")
            if "questions" in scenarios:
                checks += check_lone_question(machine, seed=seed)
    checks += check_all(runs)
    if plot is not None:
        from penstock.bench.plot import plot as draw

        draw(runs, plot)
    if as_json:
        sources = {name: MACHINES[name].source for name in costs}
        print(Report(seed=seed, sources=sources, titles=titles, runs=runs, checks=checks).model_dump_json(indent=2))
    for check in checks:
        line = f"{'PASS' if check.holds else 'FAIL'} {check.name}: {check.found}"
        print(line, file=sys.stderr if as_json else sys.stdout)
    return 0 if all(check.holds for check in checks) else EXIT_CHECK_FAILED


def _show(out: Console, title: str, summaries: list[Summary]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    columns = ("target", "TTFT p50 s", "p99", "long prompt", "gap p50 ms", "p99", "read tok/s", "written tok/s")
    table.add_column("priority")
    for column in (*columns, "preempted", "longest wait s"):
        table.add_column(column, justify="right")
    for index, s in enumerate(summaries):
        if index and s.priority is not summaries[index - 1].priority:
            table.add_section()
        table.add_row(
            s.priority.value,
            "none" if s.target_ms is None else f"{s.target_ms:g}",
            f"{s.ttft_p50_s:.2f}",
            f"{s.ttft_p99_s:.2f}",
            "" if s.long_prompt_ttft_s is None else f"{s.long_prompt_ttft_s:.2f}",
            f"{s.gap_p50_ms:.1f}",
            f"{s.gap_p99_ms:.1f}",
            f"{s.prompt_tokens_per_s:,.0f}",
            f"{s.generated_tokens_per_s:,.0f}",
            f"{s.num_preemptions:,}",
            f"{s.longest_wait_s:.2f}" if s.is_complete else "given up",
        )
    out.print(table)


def _scheduling_cost(*, as_json: bool) -> int:
    from pydantic import TypeAdapter

    from penstock.bench.scheduling_cost import NUM_SEQUENCES, SchedulingCost, measure

    costs = [measure(number) for number in NUM_SEQUENCES]
    if as_json:
        print(TypeAdapter(list[SchedulingCost]).dump_json(costs, indent=2).decode())
    else:
        for cost in costs:
            print(
                f"{cost.num_sequences:5} sequences: {cost.us_per_step:8.0f} us per step, "
                f"{cost.us_per_sequence:6.2f} us per sequence"
            )
    at_256 = next(cost for cost in costs if cost.num_sequences == 256)
    largest = costs[-1]
    is_fast = at_256.us_per_step <= MOST_US_AT_256
    # Linear: a sequence costs no more among 1024 than among 256, but for the noise of a machine.
    is_linear = largest.us_per_sequence <= 1.5 * at_256.us_per_sequence
    stream = sys.stderr if as_json else sys.stdout
    print(f"{'PASS' if is_fast else 'FAIL'} at most 1 ms per step with 256: {at_256.us_per_step:.0f} us", file=stream)
    ratio = largest.us_per_sequence / at_256.us_per_sequence
    print(f"{'PASS' if is_linear else 'FAIL'} grows linearly to {largest.num_sequences}: {ratio:.2f} x", file=stream)
    return 0 if is_fast and is_linear else EXIT_CHECK_FAILED
