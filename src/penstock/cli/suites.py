"""`penstock bench quick|full|PROBE`: probes, the ledger, what changed, and charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import Json, LlamaPython, Peers, TraceFile, chosen_peers
from penstock.cli.settings import given, with_settings
from penstock.cli.terminal import report_console, table_of
from penstock.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.changes import BenchReport
    from penstock.bench.samples import Measure, ProbeResult
    from penstock.bench.workbench import Workbench

EXIT_WORSE = 1
# The probes by name, so that `--help` need not import them. A test holds the two to each other.
SUITES = {
    "quick": "Every probe, small: a few minutes on two cores.",
    "full": "Every probe at the sizes that the documentation shows: about half an hour on two cores.",
    "start-up": "Wall time of `penstock --help` and `penstock plan`, a fresh process each time.",
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
    @with_settings({"seed": ("dtype", "threads", "device", "lane")})
    def run(
        model: Annotated[str, typer.Option(help="smollm2, a folder, a .gguf file or a hub id.")] = DEFAULT_MODEL,
        peers: Peers = "",
        llama_python: LlamaPython = None,
        seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
        ledger: Annotated[
            Path | None, typer.Option(help="Folder of the earlier runs; in the user's data folder unless given.")
        ] = None,
        plot: Annotated[Path | None, typer.Option(help="Draw charts into this folder.")] = None,
        trace: TraceFile = None,
        json: Json = False,
        **settings: Any,
    ) -> None:
        from penstock.bench.suites import sizes_of
        from penstock.bench.workbench import BenchSettings, Workbench

        asked = BenchSettings(model=model, peers=chosen_peers(peers), seed=seed, **given(settings))
        workbench = Workbench(asked, sizes_of(suite, asked.device), trace=trace, llama_python=llama_python)
        raise typer.Exit(_run(suite, workbench, folder=ledger, plot=plot, as_json=json))


def _run(suite: str, workbench: Workbench, *, folder: Path | None, plot: Path | None, as_json: bool) -> int:
    from penstock.bench.changes import BenchReport
    from penstock.bench.ledger import Ledger
    from penstock.bench.suites import compare_twice, run_suite

    if plot is not None:
        from penstock.simulate.plot import pyplot

        pyplot()  # refuses before anything is measured
    out = report_console(stderr=as_json)
    ledger = Ledger(folder)
    with workbench as bench:
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
    numbers = (result.axis or "", "median", "smallest", "largest", "samples")
    table = table_of(f"{result.name} ({result.seconds:.0f} s)", ("variant", "quantity"), numbers)
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
