"""Reads last.json and writes its tables into README.md.

`penstock bench cpu --peers transformers,llama.cpp --json > benchmarks/cpu/last.json` measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.bench.cpu import OURS, OWN_ROUNDS, CpuReport, Row

HERE = Path(__file__).parent
MARK = "<!-- tables -->"
THEIRS = ("transformers", "llama.cpp")


def main() -> None:
    report = CpuReport.model_validate_json((HERE / "last.json").read_text(encoding="utf-8"))
    readme = HERE / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8"), report), encoding="utf-8")


def with_tables(page: str, report: CpuReport) -> str:
    before, _, after = page.split(MARK)
    return f"{before}{MARK}\n{tables(report)}\n{MARK}{after}"


def tables(report: CpuReport) -> str:
    return "\n\n".join((_head(report), *_speeds(report), _memory(report), _quality(report)))


def _head(report: CpuReport) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    limits = report.limits
    return (
        f"{report.started_at[:10]}, {report.processor}, {report.threads} threads, {versions}. "
        f"Medians of {report.repeats}, of {report.repeats * OWN_ROUNDS} where Penstock is compared with itself. "
        "The limits of the processor, from the same run: "
        f"{limits.product_gflops:.0f} GFLOP/s in bfloat16 products, {limits.read_gb_per_s:.0f} GB/s read."
    )


def _speeds(report: CpuReport) -> Iterator[str]:
    by_work: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report.rows:
        by_work.setdefault((row.part, row.what), {})[row.who] = row
    head = ("tokens per second", *OURS, *(f"{name}, best" for name in THEIRS), *(f"x {name}" for name in THEIRS))
    lines = []
    for (part, what), rows in by_work.items():
        if part in ("reading", "writing", "qwen3"):
            best = {name: _best(rows.values(), name) for name in ("penstock", *THEIRS)}
            lines.append(
                (
                    f"{part}, {what}",
                    *(_speed(rows.get(name)) for name in OURS),
                    *(_speed(best[name]) for name in THEIRS),
                    *(_ratio(best["penstock"], best[name]) for name in THEIRS),
                )
            )
    yield _table(head, lines)
    chunks = [row for row in report.rows if row.part == "chunks"]
    best_chunk = _best(chunks, "penstock")
    yield _table(
        ("reading in chunks", "tokens per second", "x the best"),
        [(f"{row.what}, {row.who}", _speed(row), _ratio(row, best_chunk)) for row in chunks],
    )
    streams = [row for row in report.rows if row.part == "streams"]
    first = {row.who: row for row in reversed(streams)}
    yield _table(
        ("writing streams", "tokens per second", "x one stream"),
        [(f"{row.what}, {row.who}", _speed(row), _ratio(row, first[row.who])) for row in streams],
    )


def _memory(report: CpuReport) -> str:
    rows = [
        (f"{row.num_tokens} tokens, {row.who}", f"{row.peak_bytes / 1e6:,.0f} MB", f"{row.base_bytes / 1e6:,.0f} MB")
        for row in report.memory
    ]
    return _table(("memory", "peak", "of it libraries"), rows)


def _quality(report: CpuReport) -> str:
    rows = [
        (row.weights, f"{row.perplexity:.4f}", f"{row.mean_error:.4f}", f"{row.largest_error:.3f}")
        for row in report.quality
    ]
    return _table(("weights", "perplexity", "log-probability off by, on average", "at most"), rows)


def _best(rows: Iterable[Row], name: str) -> Row | None:
    return max((row for row in rows if row.who.startswith(name)), key=lambda row: row.tokens_per_s, default=None)


def _speed(row: Row | None) -> str:
    return "" if row is None else f"{row.tokens_per_s:,.1f}"


def _ratio(row: Row | None, other: Row | None) -> str:
    return "" if row is None or other is None else f"{row.tokens_per_s / other.tokens_per_s:.2f}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
