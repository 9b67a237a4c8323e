"""How `penstock bench cpu` looks: speeds, and their ratios to the best of the others."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from penstock.bench.cpu import CpuReport, Row

WIDTH = 120


def show_cpu(report: CpuReport) -> None:
    console = Console(highlight=False, width=None if Console().is_terminal else WIDTH)
    limits = report.limits
    console.print(
        f"{report.model}, {report.threads} threads, medians of {report.repeats} or more; limits here: "
        f"{limits.product_gflops:.0f} GFLOP/s in bfloat16 products, {limits.read_gb_per_s:.0f} GB/s read"
    )
    if report.rows:
        console.print(_speeds(report))
    for row in report.memory:
        own = row.peak_bytes - row.base_bytes
        console.print(f"peak {row.who:<26} {row.peak_bytes / 1e6:>7.0f} MB, {own / 1e6:.0f} of it beyond its libraries")
    for row in report.quality:
        console.print(
            f"weights {row.weights:<9} perplexity {row.perplexity:.4f}; log-probabilities off by {row.mean_error:.4f} "
            f"on average, {row.largest_error:.3f} at most"
        )


def _speeds(report: CpuReport) -> Table:
    table = Table(title_justify="left")
    for name in ("part", "what", "who"):
        table.add_column(name)
    for name in ("tok/s", "x transformers", "x llama.cpp", "x our best", "of the limit"):
        table.add_column(name, justify="right")
    for row in report.rows:
        beside = [other for other in report.rows if (other.part, other.what) == (row.part, row.what)]
        ratios = [_ratio(row, beside, who) for who in ("transformers", "llama.cpp", "penstock")]
        share = "" if row.share_of_limit is None else f"{row.share_of_limit:.0%}"
        table.add_row(row.part, row.what, row.who, f"{row.tokens_per_s:,.1f}", *ratios, share)
    return table


def _ratio(row: Row, beside: list[Row], who: str) -> str:
    """To the best of those whose name begins so; empty where there is none, or for another's row."""
    best = max((other.tokens_per_s for other in beside if other.who.startswith(who)), default=None)
    return "" if best is None or not row.who.startswith("penstock") else f"{row.tokens_per_s / best:.2f}"
