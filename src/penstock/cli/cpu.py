"""`penstock bench cpu`: speeds, and their ratios to the best of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import Json, LlamaPython, Model, Peers, chosen, chosen_peers
from penstock.cli.settings import with_settings
from penstock.cli.terminal import report_console, table_of
from penstock.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.bench.cpu import CpuReport, Row

CPU_PARTS = ("reading", "chunks", "writing", "streams", "memory", "quality", "qwen3")


@with_settings({"length": ("threads",)})
def cpu(
    model: Model = DEFAULT_MODEL,
    peers: Peers = "",
    llama_python: LlamaPython = None,
    only: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CPU_PARTS)}; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each goes through all.")] = 3,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; may be repeated.")] = None,
    json: Json = False,
    **settings: Any,
) -> None:
    """Measure reading and writing on this processor beside other programs, in turns, each in its own process."""
    from penstock.bench.cpu import CpuBench

    parts = chosen("--only", only, CPU_PARTS)
    bench = CpuBench(
        model, peers=chosen_peers(peers), repeats=repeats, lengths=length, llama_python=llama_python, **settings
    )
    report = bench.run(parts)
    if json:
        print(report.model_dump_json(indent=2))
    else:
        show_cpu(report)


def show_cpu(report: CpuReport) -> None:
    console = report_console()
    limits = report.limits
    console.print(
        f"{report.model}, {report.threads} threads, medians of {report.repeats} or more; limits here: "
        f"{limits.product_gflops:.0f} GFLOP/s in bfloat16 products, {limits.read_gb_per_s:.0f} GB/s read"
    )
    if report.rows:
        console.print(_speeds(report))
    for fault in report.limit_faults:
        console.print(f"FAULT {fault}")
    for row in report.memory:
        own = row.peak_bytes - row.base_bytes
        console.print(f"peak {row.who:<26} {row.peak_bytes / 1e6:>7.0f} MB, {own / 1e6:.0f} of it beyond its libraries")
    for row in report.quality:
        console.print(
            f"weights {row.weights:<9} perplexity {row.perplexity:.4f}; log-probabilities off by {row.mean_error:.4f} "
            f"on average, {row.largest_error:.3f} at most"
        )


def _speeds(report: CpuReport) -> Table:
    ratios = ("x transformers", "x llama.cpp", "x our best")
    table = table_of(None, ("part", "what", "who"), ("tok/s", *ratios, "of the limit"))
    for row in report.rows:
        beside = [other for other in report.rows if (other.part, other.what) == (row.part, row.what)]
        ratios = [_ratio(row, beside, who) for who in ("transformers", "llama.cpp", "penstock")]
        table.add_row(row.part, row.what, row.who, f"{row.tokens_per_s:,.1f}", *ratios, _share(row))
    return table


def _share(row: Row) -> str:
    """Shows the share of the limit; nothing can be beyond one, so what seems to be is no share."""
    if row.share_of_limit is None:
        return ""
    return f"{row.share_of_limit:.0%}" if row.share_of_limit <= 1 else "limit wrong"


def _ratio(row: Row, beside: list[Row], who: str) -> str:
    """Compares with the best whose name begins so; empty where there is none, or for another's row."""
    best = max((other.tokens_per_s for other in beside if other.who.startswith(who)), default=None)
    return "" if best is None or not row.who.startswith("penstock") else f"{row.tokens_per_s / best:.2f}"
