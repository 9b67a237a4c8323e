"""`penstock bench schedule`, `fleet` and `scheduling-cost`: the scheduler and fleets in virtual time; its own cost."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.flags import Json, chosen
from penstock.cli.terminal import progress_console, report_console, table_of
from penstock.errors import InvalidSetting

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.simulate.report import Check, RunSummary

EXIT_CHECK_FAILED = 1
SCENARIO_NAMES = ("beside-64k", "questions", "bursts", "day")
COST_NAMES = ("h200", "cpu")
MAX_US_AT_256 = 1_000.0


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
    from concurrent.futures import ProcessPoolExecutor

    from penstock.plan.machine import num_physical_cores
    from penstock.simulate.costs import MACHINES
    from penstock.simulate.report import Report, check_all, check_lone_question, run_all
    from penstock.simulate.workloads import SCENARIOS, SIZES

    out, progress = report_console(), progress_console()
    out.quiet = json
    runs: list[RunSummary] = []
    checks: list[Check] = []
    titles: dict[str, str] = {}
    with ProcessPoolExecutor(jobs or num_physical_cores()) as pool:
        for machine in (MACHINES[name] for name in costs):
            out.print(f"{machine.name}: costs fitted to {machine.source}; scenarios {machine.scale}; ", end="")
            out.print(f"at most {machine.ceiling:,} tokens per step, floor {machine.floor}")
            for name in scenarios:
                began = time.perf_counter()
                found = run_all(pool, machine.name, name, seed)
                runs += found
                title = titles[f"{machine.name} {name}"] = SCENARIOS[name](SIZES[machine.name], Random(seed)).title
                out.print(_table(f"{machine.name}, {name}: {title}", found))
                progress.print(f"{machine.name} {name}: {len(found)} runs in {time.perf_counter() - began:.1f} s")
            if "questions" in scenarios:
                checks += check_lone_question(machine, seed=seed)
    checks += check_all(runs)
    if plot is not None:
        from penstock.simulate.plot import plot as draw

        draw(runs, plot)
    if json:
        sources = {name: MACHINES[name].source for name in costs}
        print(Report(seed=seed, sources=sources, titles=titles, runs=runs, checks=checks).model_dump_json(indent=2))
    _end(checks, as_json=json)


def fleet(
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Replicas of the fleet; may be repeated, 100 unless given.")
    ] = None,
    sessions_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="New sessions of agents; one per replica and second unless given.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 20_000,
    cost: Annotated[list[str] | None, typer.Option(help="h200 or cpu; h200 unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sessions.")] = 1,
    json: Json = False,
) -> None:
    """Simulate replicas behind a router, with agents whose prompts grow: which router finds what is cached."""
    (machine,) = chosen("--cost", cost or ["h200"], COST_NAMES)[:1]
    from pydantic_core import to_json

    from penstock.simulate.fleet import ROUTERS, Traffic, simulate_fleet

    columns = ("sessions/s", "hit tokens", "TTFT p50 s", "p99", "busy")
    table = table_of(f"{machine}, {requests:,} requests", ["replicas", "router"], columns)
    found = []
    for number in replicas or [100]:
        traffic = Traffic(sessions_per_s=sessions_per_s or number)
        for router in ROUTERS:
            run = simulate_fleet(
                router, num_replicas=number, num_requests=requests, traffic=traffic, machine=machine, seed=seed
            )
            found.append(run)
            hits, busy = f"{run.hit_share:.1%}", f"{run.busy_share:.0%}"
            times = (f"{run.ttft_p50_s:.3f}", f"{run.ttft_p99_s:.3f}")
            table.add_row(f"{number:,}", router, f"{run.sessions_per_s:g}", hits, *times, busy)
            progress_console().print(f"{number:,} replicas, {router}: {run.simulated_s:.0f} simulated seconds")
    if json:
        print(to_json(found, indent=2).decode())
    else:
        report_console().print(table)


def scheduling_cost(json: Json = False) -> None:
    """Time the scheduler itself, per step, with 16 to 1024 running sequences beside one long prompt."""
    from pydantic_core import to_json

    from penstock.simulate.report import Check
    from penstock.simulate.scheduling_cost import NUM_SEQUENCES, measure

    costs = {number: measure(number) for number in NUM_SEQUENCES}
    if json:
        print(to_json(list(costs.values()), indent=2).decode())
    else:
        for cost in costs.values():
            print(
                f"{cost.num_sequences:5} sequences: {cost.us_per_step:8.0f} us per step, "
                f"{cost.us_per_sequence:6.2f} us per sequence"
            )
    at_256, most = costs[256], costs[NUM_SEQUENCES[-1]]
    ratio = most.us_per_sequence / at_256.us_per_sequence
    is_fast = Check(
        name="at most 1 ms per step with 256",
        holds=at_256.us_per_step <= MAX_US_AT_256,
        found=f"{at_256.us_per_step:.0f} us",
    )
    # A sequence costs no more among 1024 than among 256, but for the noise of a machine.
    is_linear = Check(name=f"grows linearly to {most.num_sequences}", holds=ratio <= 1.5, found=f"{ratio:.2f} x")
    _end([is_fast, is_linear], as_json=json)


def _table(title: str, summaries: list[RunSummary]) -> Table:
    columns = ("target", "TTFT p50 s", "p99", "long prompt", "gap p50 ms", "p99", "read tok/s", "written tok/s")
    table = table_of(title, ["priority", "read in"], (*columns, "preempted", "longest wait s"))
    for index, s in enumerate(summaries):
        if index and s.priority is not summaries[index - 1].priority:
            table.add_section()
        table.add_row(
            s.priority.value,
            s.reading,
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
    return table


def _end(checks: list[Check], *, as_json: bool) -> None:
    """Says what holds, beside a JSON document on stderr, and ends the command."""
    for check in checks:
        line = f"{'PASS' if check.holds else 'FAIL'} {check.name}: {check.found}"
        print(line, file=sys.stderr if as_json else sys.stdout)
    raise typer.Exit(0 if all(check.holds for check in checks) else EXIT_CHECK_FAILED)
