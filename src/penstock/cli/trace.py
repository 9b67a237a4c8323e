"""`penstock trace`: where the time of a trace went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.flags import Json
from penstock.config import MB

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.trace.document import Trace
    from penstock.trace.summary import Spread, Summary


def trace(
    file: Annotated[Path, typer.Argument(help="What --trace or a server's /trace wrote.", metavar="FILE")],
    slowest: Annotated[int, typer.Option(min=0, help="How many of the slowest steps to explain.")] = 5,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write it in the trace event format, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    json: Json = False,
) -> None:
    """Say where the time of a trace went: requests, gaps, memory, and the slowest steps with their reasons."""
    from rich.console import Console

    from penstock.trace.document import Trace
    from penstock.trace.perfetto import write_perfetto
    from penstock.trace.summary import summarize

    recorded = Trace.read(file)
    if perfetto is not None:
        write_perfetto(recorded, perfetto)
    summary = summarize(recorded, num_slowest=slowest)
    if json:
        print(summary.model_dump_json(indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    _show_head(console, recorded)
    _show_work(console, summary)
    _show_requests(console, summary)
    for adjustment in summary.adjustments:
        console.print(f"adjusted: {adjustment}", style="yellow", markup=False)
    _show_slowest(console, summary)
    if perfetto is not None:
        console.print(f"{perfetto} is for ui.perfetto.dev or chrome://tracing.", markup=False)


def _show_head(console: Console, trace: Trace) -> None:
    where, model, lane = trace.environment, trace.model, trace.lane
    console.print(f"{model.name} ({model.dtype}), {trace.began_at}", style="bold", markup=False)
    source = "" if where.commit is None else f" at {where.commit.partition('+')[0][:12]}"
    changes = " with changes" if where.commit is not None and "+" in where.commit else ""
    console.print(
        f"penstock {where.penstock}{source}{changes}, torch {where.torch}, {where.device}, {where.num_threads} threads "
        f"on {where.processor}",
        markup=False,
    )
    applied = "in chunks" if lane.applied else "not in chunks"
    console.print(f"lane {lane.id}: prompts were read {applied}; {lane.reason}", markup=False)


def _show_work(console: Console, summary: Summary) -> None:
    dropped = f" ({summary.num_dropped_steps:,} earlier ones were not kept)" if summary.num_dropped_steps else ""
    console.print(
        f"{summary.num_steps:,} steps{dropped} in {summary.seconds:,.1f} s, busy {summary.busy_share:.0%}; "
        f"{summary.read_tokens:,} tokens read at {summary.read_tokens_per_s:,.0f} per second, "
        f"{summary.cached_tokens:,} from the cache, {summary.written_tokens:,} written"
    )
    memory = summary.memory
    console.print(
        f"memory: peak {memory.peak_bytes / MB:,.0f} MB, predicted {memory.predicted_bytes / MB:,.0f}, "
        f"budget {memory.budget_bytes / MB:,.0f}"
    )
    _show_spread(console, "step", summary.step_ms)
    if summary.prediction_error is not None:
        console.print(f"step times were predicted within {summary.prediction_error.p50:.0%} (median)")


def _show_requests(console: Console, summary: Summary) -> None:
    outcomes = ", ".join(f"{number:,} {outcome}" for outcome, number in summary.requests.items())
    console.print(f"requests: {outcomes or 'none'}; {summary.num_preemptions:,} preemptions")
    _show_spread(console, "queue", summary.queue_ms)
    _show_spread(console, "first token", summary.ttft_ms)
    _show_spread(console, "gap between tokens", summary.gap_ms)
    if gap := summary.longest_gap:
        during = "" if gap.step is None else f", ended by step {gap.step:,}"
        console.print(f"  the longest gap is of request {gap.request_id}{during}")


def _show_spread(console: Console, name: str, spread: Spread | None) -> None:
    if spread is not None:
        console.print(f"{name}: median {spread.p50:,.1f} ms, 99 % below {spread.p99:,.1f}, longest {spread.max:,.1f}")


def _show_slowest(console: Console, summary: Summary) -> None:
    if not summary.slowest:
        return
    console.print("\nslowest steps", style="bold")
    for step in summary.slowest:
        predicted = "" if step.predicted_ms is None else f", predicted {step.predicted_ms:,.1f}"
        console.print(f"  step {step.step:,} at {step.started_s:,.2f} s: {step.elapsed_ms:,.1f} ms{predicted}")
        for reason in step.why:
            console.print(f"    {reason}", style="dim")
