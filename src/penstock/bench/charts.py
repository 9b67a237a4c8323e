"""Charts of what probes measured: axes from zero, every sample a dot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.ledger import BenchRun
from penstock.bench.samples import ProbeResult
from penstock.config import MB
from penstock.simulate.plot import pyplot
from penstock.trace.percentile import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#1f6f8b", "#b3432b", "#5a8f29", "#7a5195")
DASHES = ("-", "--", ":")

Chart = Callable[[ProbeResult, str, Path], None]  # what was measured, what stands below its title, where it is drawn


def draw(run: BenchRun, folder: Path) -> list[Path]:
    """One PNG for each probe that has a chart, and beside it what it shows, as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for result in run.probes:
        if result.name in CHARTS:
            paths.append(folder / f"{result.name}.png")
            CHARTS[result.name](result, _subtitle(run, result.name), paths[-1])
            paths[-1].with_suffix(".json").write_text(run.model_copy(update={"probes": (result,)}).model_dump_json())
    return paths


def _subtitle(run: BenchRun, probe: str) -> str:
    """What was measured, and where."""
    sizes, machine = run.sizes, run.fingerprint
    work = {
        "chunk-sweep": f"{sizes.sweep_tokens:,} tokens; ",
        "concurrency": f"{sizes.beside_tokens:,} tokens beside {sizes.num_streams} streams; ",
        "chat-growth": f"{sizes.turn_tokens + sizes.answer_tokens} tokens more in each turn; ",
    }
    place = machine.gpus[0] if machine.gpus and run.settings.device != "cpu" else machine.processor
    threads = run.settings.threads or machine.num_cores
    return f"{work.get(probe, '')}{Path(run.settings.model).name}, {place}, {threads} threads"


def chunk_chart(result: ProbeResult, subtitle: str, path: Path) -> None:
    """Time and peak, one below the other, over the same sizes; the whole prompt stands at the end."""
    figure, (above, below) = pyplot().subplots(2, 1, figsize=(7.2, 6.4), sharex=True, layout="constrained")
    variant = result.variants("read_s")[0]
    for axis, quantity, scale, label in (
        (above, "read_s", 1.0, "time to read (s)"),
        (below, "peak_bytes", 1 / MB, "peak resident memory (MB)"),
    ):
        measures = sorted(result.series(variant, quantity), key=lambda measure: measure.x or float("inf"))
        places = list(range(len(measures)))
        axis.bar(places, [m.median * scale for m in measures], width=0.6, color=COLORS[0], alpha=0.85)
        for place, measure in zip(places, measures, strict=True):
            samples = [sample * scale for sample in measure.samples]
            axis.plot([place] * len(samples), samples, ".", color="black", markersize=4)
            axis.annotate(
                f"{measure.median * scale:,.{1 if scale == 1.0 else 0}f}",
                (place, max(samples)),
                textcoords="offset points",
                xytext=(0, 4),
                ha="center",
                fontsize=9,
            )
        axis.set_ylabel(label)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        below.set_xticks(places, [f"{m.x:,}" if m.x else "whole prompt" for m in measures])
    below.set_xlabel("chunk size (tokens)")
    above.set_title(f"One prompt, read in chunks of several sizes\n{subtitle}", fontsize=11)
    _save(figure, path)


def gaps_chart(result: ProbeResult, subtitle: str, path: Path) -> None:
    """The longest gap decides whether a stream stalls; half of the gaps are shorter than the median."""
    variants = result.variants("gap_s")
    figure, axis = pyplot().subplots(figsize=(7.2, 1.6 + 0.9 * len(variants)), layout="constrained")
    height = 0.25
    marks: tuple[tuple[str, float], ...] = (("median gap", 0.5), ("99 of 100 are shorter", 0.99), ("longest", 1.0))
    for row, (name, share) in enumerate(marks):
        values = [percentile(result.measure(variant, "gap_s").samples, share) * 1e3 for variant in variants]
        places = [index + (row - 1) * height for index in range(len(variants))]
        axis.barh(places, values, height=height * 0.9, color=COLORS[row], label=name)
        for place, value in zip(places, values, strict=True):
            axis.annotate(
                f"{value:,.0f}", (value, place), textcoords="offset points", xytext=(4, 0), va="center", fontsize=9
            )
    axis.set_yticks(range(len(variants)), variants)
    axis.invert_yaxis()
    axis.set_xlim(0, axis.get_xlim()[1] * 1.1)
    axis.set_xlabel("gap between two tokens of a running stream (ms)")
    axis.set_title(f"Gaps of running streams while a long prompt is read beside them\n{subtitle}", fontsize=11)
    axis.legend(loc="upper right", fontsize=9)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    _save(figure, path)


def _lines(quantity: str, title: str, x_label: str, y_label: str, *, scale: float = 1.0) -> Chart:
    """Draws one quantity against the axis of its probe."""

    def draw_lines(result: ProbeResult, subtitle: str, path: Path) -> None:
        figure, axis = pyplot().subplots(figsize=(7.2, 5.2), layout="constrained")
        _plot(axis, result, quantity, scale)
        axis.set_title(f"{title}\n{subtitle}", fontsize=11)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.set_xlim(0, None)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
        xs = [measure.x or 0 for measure in result.series(result.variants(quantity)[0], quantity)]
        ticks = _far_apart([0, *xs])
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        _save(figure, path)

    return draw_lines


def _scaling(quantity: str, verb: str, noun: str) -> Chart:
    title = f"Time to {verb} against the length of the {noun}"
    return _lines(quantity, title, f"{noun} (tokens)", f"time to {verb} it (s)")


CHARTS: dict[str, Chart] = {
    "memory": _lines(
        "peak_bytes",
        "Peak memory of the process against prompt length",
        "prompt (tokens)",
        "peak resident memory (MB)",
        scale=1 / MB,
    ),
    "prompt-scaling": _scaling("read_s", "read", "prompt"),
    "output-scaling": _scaling("write_s", "write", "answer"),
    "chunk-sweep": chunk_chart,
    "concurrency": gaps_chart,
    "chat-growth": _lines(
        "ttft_s", "Time to first token in a conversation that grows", "turn", "time to first token (s)"
    ),
}


def _plot(axis: Axes, result: ProbeResult, quantity: str, scale: float) -> None:
    """Medians as lines, samples as dots. A library has one color, its ways to read have dashes of their own."""
    ways: dict[str, int] = {}
    for variant in result.variants(quantity):
        library = variant.replace(",", "").split()[0]
        way = ways[library] = ways.get(library, -1) + 1
        color, measures = COLORS[list(ways).index(library) % len(COLORS)], result.series(variant, quantity)
        medians = [measure.median * scale for measure in measures]
        axis.plot(
            [m.x for m in measures], medians, DASHES[way % len(DASHES)], color=color, linewidth=1.6, label=variant
        )
        for measure in measures:
            samples = [sample * scale for sample in measure.samples]
            axis.plot([measure.x] * len(samples), samples, ".", color=color, markersize=5)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def _far_apart(ticks: Sequence[int]) -> list[int]:
    """Keeps the ticks whose labels do not touch, from the largest down."""
    kept: list[int] = []
    for tick in sorted(set(ticks), reverse=True):
        if not kept or kept[-1] - tick >= max(ticks) / 10:
            kept.append(tick)
    return kept
