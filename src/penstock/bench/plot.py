"""Time to first token against the gaps of the others, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.report import TARGETS_S, Summary
from penstock.config import PrefillPriority
from penstock.errors import InvalidSetting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    PrefillPriority.PREFILL_FIRST: ("#b3432b", "s"),
    PrefillPriority.INTERLEAVED: ("#1f6f8b", "o"),
    PrefillPriority.DECODE_PRIORITY: ("#5a8f29", "^"),
}


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """One panel per scenario and machine, axes from zero."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise InvalidSetting(f"--plot is {str(path)!r}; the file must end in .png or .svg.")
    try:
        import matplotlib
    except ImportError:
        raise InvalidSetting("--plot needs matplotlib. Install it with: pip install 'penstock[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((s.machine, s.scenario) for s in summaries))
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure, axes = pyplot.subplots(
        num_rows, num_columns, figsize=(6.8 * num_columns, 4.6 * num_rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (machine, scenario) in zip(axes.flat, panels, strict=False):
        _panel(axis, [s for s in summaries if (s.machine, s.scenario) == (machine, scenario)])
        axis.set_title(f"{scenario} ({machine})")
    axes.flat[0].legend(loc="upper right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panel(axis: Axes, summaries: list[Summary]) -> None:
    has_long_prompt = summaries[0].long_prompt_ttft_s is not None and summaries[0].scenario == "beside-64k"
    placed: set[tuple[float, float, str]] = set()
    for priority, (color, marker) in STYLES.items():
        points: dict[tuple[float, float], list[str]] = {}
        for s in (s for s in summaries if s.priority is priority):
            label = "none" if s.target_ms is None else f"{s.target_ms:g} ms"
            points.setdefault((round(s.gap_p99_ms, 1), round(s.ttft_p50_s, 2)), []).append(label)
        line = sorted(points)
        axis.plot(*zip(*line, strict=True), color=color, marker=marker, label=priority.value, alpha=0.8, linewidth=1)
        for point, labels in points.items():
            text = "every target" if len(labels) == len(TARGETS_S) else ", ".join(labels)
            if (*point, text) not in placed:  # two priorities that agree share a label
                placed.add((*point, text))
                axis.annotate(text, point, textcoords="offset points", xytext=(6, 5), fontsize=8, color=color)
    axis.set_xlabel("p99 gap between tokens (ms, logarithmic above 50)")
    axis.set_ylabel("TTFT of the long prompt (s)" if has_long_prompt else "TTFT, median (s)")
    # From zero, and still a place for 20 ms beside 20 s.
    axis.set_xscale("symlog", linthresh=50)
    axis.set_xlim(0, axis.get_xlim()[1] * 2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xticks([0, 20, 50, 100, 200, 500, 1_000, 5_000, 20_000])
    axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
    axis.grid(alpha=0.3)
