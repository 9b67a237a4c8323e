"""Charts of what probes measured: axes from zero, every sample a dot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.ledger import BenchRun
from penstock.bench.plot import pyplot
from penstock.bench.samples import ProbeResult
from penstock.trace.summary import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MB = 1e6
COLORS = ("#1f6f8b", "#b3432b", "#5a8f29", "#7a5195")
DASHES = ("-", "--", ":")


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


def memory_chart(result: ProbeResult, subtitle: str, path: Path) -> None:
    figure, axis = _figure()
    _lines(axis, result, "peak_bytes", scale=1 / MB)
    axis.set_title(f"Peak memory of the process against prompt length\n{subtitle}", fontsize=11)
    axis.set_xlabel("prompt (tokens)")
    axis.set_ylabel("peak resident memory (MB)")
    _finish(
        figure, axis, path, xticks=[m.x or 0 for m in result.series(result.variants("peak_bytes")[0], "peak_bytes")]
    )


def scaling_chart(result: ProbeResult, subtitle: str, path: Path) -> None:
    quantity = result.measures[0].quantity
    figure, axis = _figure()
    _lines(axis, result, quantity, scale=1.0)
    verb, noun = ("read", "prompt") if quantity == "read_s" else ("write", "answer")
    axis.set_title(f"Time to {verb} against the length of the {noun}\n{subtitle}", fontsize=11)
    axis.set_xlabel(f"{noun} (tokens)")
    axis.set_ylabel(f"time to {verb} it (s)")
    _finish(figure, axis, path, xticks=[m.x or 0 for m in result.series(result.variants(quantity)[0], quantity)])


def chunk_chart(result: ProbeResult, subtitle: str, path: Path) -> None:
    """Time and peak, one below the other, over the same sizes; the whole prompt stands at the end."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.2, 6.4), sharex=True, layout="constrained")
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
    figure.savefig(path, dpi=130)
    plt.close(figure)


def gaps_chart(result: ProbeResult, subtitle: str, path: Path) -> None:
    """The longest gap decides whether a stream stalls; half of the gaps are shorter than the median."""
    plt = pyplot()
    variants = result.variants("gap_s")
    figure, axis = plt.subplots(figsize=(7.2, 1.6 + 0.9 * len(variants)), layout="constrained")
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
    figure.savefig(path, dpi=130)
    plt.close(figure)


def chat_chart(result: ProbeResult, subtitle: str, path: Path) -> None:
    figure, axis = _figure()
    _lines(axis, result, "ttft_s", scale=1.0)
    axis.set_title(f"Time to first token in a conversation that grows\n{subtitle}", fontsize=11)
    axis.set_xlabel("turn")
    axis.set_ylabel("time to first token (s)")
    turns = [m.x or 0 for m in result.series("prefix kept", "ttft_s")]
    _finish(figure, axis, path, xticks=turns)


CHARTS: dict[str, Callable[[ProbeResult, str, Path], None]] = {
    "memory": memory_chart,
    "prompt-scaling": scaling_chart,
    "output-scaling": scaling_chart,
    "chunk-sweep": chunk_chart,
    "concurrency": gaps_chart,
    "chat-growth": chat_chart,
}


def _figure() -> tuple[Any, Axes]:
    return pyplot().subplots(figsize=(7.2, 5.2), layout="constrained")


def _lines(axis: Axes, result: ProbeResult, quantity: str, *, scale: float) -> None:
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


def _finish(figure: Any, axis: Axes, path: Path, *, xticks: list[int]) -> None:
    axis.set_xlim(0, None)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
    ticks = _far_apart([0, *xticks])
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def _far_apart(ticks: Sequence[int]) -> list[int]:
    """From the largest down, those whose labels do not touch."""
    kept: list[int] = []
    for tick in sorted(set(ticks), reverse=True):
        if not kept or kept[-1] - tick >= max(ticks) / 10:
            kept.append(tick)
    return kept
