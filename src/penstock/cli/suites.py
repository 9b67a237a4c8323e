"""`penstock bench quick|full|PROBE`: probes, the ledger, what changed, and charts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.flags import (
    Device,
    Dtype,
    Json,
    LaneId,
    LlamaPython,
    Peers,
    Threads,
    TraceFile,
    chosen_peers,
    require_trace,
)
from penstock.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.changes import BenchReport
    from penstock.bench.samples import Measure, ProbeResult
    from penstock.bench.workbench import BenchSettings

EXIT_WORSE = 1
# The probes by name, so that `--help` need not import them. A test holds the two to each other.
SUITES = {
    "quick": "Every probe, small: a few minutes on two cores.",
    "full": "Every probe at the sizes that the documentation shows: about half an hour on two cores.",
    "cold-load": "From nothing to the first token, in a fresh process each time.",
    "memory": "Peak memory against prompt length, in chunks and whole, a fresh process for each.",
    "warm-ttft": "Time to first token of a short prompt on an engine that is ready.",
    "prompt-scaling": "Time to read against the length of the prompt.",
    "output-scaling": "Time to write against the length of the answer.",
    "chunk-sweep": "Time and peak of one prompt against the chunk size.",
    "concurrency": "Gaps of running streams while a long prompt is read beside them.",
    "chat-growth": "Time to first token in each turn of a conversation, its earlier turns kept or read again.",
    "reopen": "A prompt that was cancelled half-way and comes again.",
}


def add_suites(bench: typer.Typer) -> None:
    for name, description in SUITES.items():
        _add(bench, name, description)


def _add(bench: typer.Typer, suite: str, description: str) -> None:
    @bench.command(suite, help=description)
    def run(
        model: Annotated[str, typer.Option(help="smollm2, a folder, a .gguf file or a hub id.")] = DEFAULT_MODEL,
        peers: Peers = "",
        llama_python: LlamaPython = None,
        seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
        dtype: Dtype = None,
        threads: Threads = None,
        device: Device = None,
        lane: LaneId = None,
        ledger: Annotated[
            Path | None, typer.Option(help="Folder of the earlier runs; in the user's data folder unless given.")
        ] = None,
        plot: Annotated[Path | None, typer.Option(help="Draw charts into this folder.")] = None,
        trace: TraceFile = None,
        json: Json = False,
    ) -> None:
        from penstock.bench.workbench import BenchSettings

        settings = BenchSettings(
            model=model,
            peers=chosen_peers(peers, llama_python),
            seed=seed,
            dtype=dtype or "auto",
            threads=threads,
            device=device or "auto",
            lane=lane,
        )
        raise typer.Exit(_run(suite, settings, folder=ledger, plot=plot, trace=require_trace(trace), as_json=json))


def _run(
    suite: str, settings: BenchSettings, *, folder: Path | None, plot: Path | None, trace: Path | None, as_json: bool
) -> int:
    from rich.console import Console

    from penstock.bench.changes import BenchReport
    from penstock.bench.ledger import Ledger
    from penstock.bench.suites import compare_twice, run_suite, sizes_of
    from penstock.bench.workbench import Workbench

    if plot is not None:
        from penstock.bench.plot import pyplot

        pyplot()  # refuses before anything is measured
    out = Console(highlight=False, stderr=as_json, width=None if sys.stdout.isatty() else 150)
    ledger = Ledger(folder)
    with Workbench(settings, sizes_of(suite, settings.device), trace=trace) as bench:
        report = BenchReport(run=run_suite(suite, bench, on_probe=lambda result: _show(out, result)), comparison=None)
        if before := ledger.last_like(report.run):
            report = compare_twice(before, report.run, bench, on_probe=lambda result: _show(out, result))
    ledger.append(report.run)
    if plot is not None:
        from penstock.bench.charts import draw

        for path in draw(report.run, plot):
            out.print(f"drawn: {path}")
    _show_changes(out, report, ledger.path(report.run.fingerprint))
    if as_json:
        print(report.model_dump_json(indent=2))
    return EXIT_WORSE if report.is_worse else 0


def _show(out: Console, result: ProbeResult) -> None:
    from rich.table import Table

    table = Table(title=f"{result.name} ({result.seconds:.0f} s)", title_justify="left")
    table.add_column("variant")
    table.add_column("quantity")
    for column in (result.axis or "", "median", "smallest", "largest", "samples"):
        table.add_column(column, justify="right")
    for measure in result.measures:
        samples = measure.samples
        table.add_row(
            measure.variant,
            measure.quantity.rsplit("_", 1)[0].replace("_", " "),
            "whole" if measure.x == 0 else "" if measure.x is None else f"{measure.x:,}",
            *(_amount(measure, value) for value in (measure.median, min(samples), max(samples))),
            str(len(samples)),
        )
    out.print(table)


def _amount(measure: Measure, value: float) -> str:
    if measure.unit == "bytes":
        return f"{value / 1e6:,.0f} MB"
    if measure.unit == "tokens":
        return f"{value:,.0f} tokens"
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"


def _show_changes(out: Console, report: BenchReport, path: Path) -> None:
    run, comparison = report.run, report.comparison
    out.print(f"{run.suite}: {run.seconds:.0f} s; kept in {path}")
    if comparison is None:
        out.print("This is the first run of this work on this machine; the next is compared with it.")
        return
    for change in comparison.flagged:
        out.print(
            f"{'FLAG' if change.is_worse else 'good'} {change.name}: {change.verdict}, {change.factor:.2f} x of before "
            f"(counts beyond {change.limit:.2f} x or {1 / change.limit:.2f} x)"
        )
    num_worse = sum(change.is_worse for change in comparison.flagged)
    out.print(
        f"Compared with {comparison.before}: {num_worse} worse, {len(comparison.flagged) - num_worse} better, "
        f"{len(comparison.changes) - len(comparison.flagged)} the same within the spread of their samples."
    )
