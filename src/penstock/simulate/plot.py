"""Time to first token against the gaps of the others, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import PrefillPriority
from penstock.errors import InvalidSetting
from penstock.simulate.report import TARGETS_S, RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

STYLES = {
    PrefillPriority.PREFILL_FIRST: ("#b3432b", "s"),
    PrefillPriority.INTERLEAVED: ("#1f6f8b", "o"),
    PrefillPriority.DECODE_PRIORITY: ("#5a8f29", "^"),
}

# The targets whose run lies at a point (p99 gap in ms, TTFT in s).
Points = dict[PrefillPriority, dict[tuple[float, float], list[str]]]


def plot(summaries: Sequence[RunSummary], path: Path) -> None:
    """One panel per scenario and machine, axes from zero."""
    plt = pyplot()
    panels = list(dict.fromkeys((s.machine, s.scenario) for s in summaries))
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(6.8 * num_columns, 4.6 * num_rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    drawn = []
    for axis, (machine, scenario) in zip(axes.flat, panels, strict=False):
        drawn.append(_panel(axis, [s for s in summaries if (s.machine, s.scenario) == (machine, scenario)]))
        axis.set_title(f"{scenario} ({machine})")
    axes.flat[0].legend(loc="upper right")
    figure.draw_without_rendering()  # settles where everything lies
    for axis, points in zip(axes.flat, drawn, strict=False):
        _label(axis, points)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def pyplot() -> Any:
    """The part of matplotlib that draws, without a screen."""
    try:
        import matplotlib
    except ImportError:
        raise InvalidSetting("--plot needs matplotlib. Install it with: pip install 'penstock[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as drawing

    return drawing


def _panel(axis: Axes, summaries: list[RunSummary]) -> Points:
    has_long_prompt = summaries[0].long_prompt_ttft_s is not None and summaries[0].scenario == "beside-64k"
    points: Points = {}
    for priority, (color, marker) in STYLES.items():
        found = points[priority] = {}
        for s in (s for s in summaries if s.priority is priority and s.reading == "chunks"):
            label = "none" if s.target_ms is None else f"{s.target_ms:g} ms"
            found.setdefault((round(s.gap_p99_ms, 1), round(s.ttft_p50_s, 2)), []).append(label)
        line = zip(*sorted(found), strict=True)
        axis.plot(*line, color=color, marker=marker, label=priority.value, alpha=0.8, linewidth=1)
    axis.set_xlabel("p99 gap between tokens (ms, logarithmic above 50)")
    axis.set_ylabel("TTFT of the long prompt (s)" if has_long_prompt else "TTFT, median (s)")
    # From zero, and still a place for 20 ms beside 20 s.
    axis.set_xscale("symlog", linthresh=50)
    axis.set_xlim(0, axis.get_xlim()[1] * 2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xticks([0, 20, 50, 100, 200, 500, 1_000, 5_000, 20_000])
    axis.set_ylim(0, axis.get_ylim()[1] * 1.15)
    axis.grid(alpha=0.3)
    return points


def _label(axis: Axes, points: Points) -> None:
    """Targets beside their points, each where no other label lies; one that has no such place is left out."""
    taken: list[Bbox] = []
    said: set[tuple[float, float, str]] = set()
    for priority, labels_by_point in points.items():
        for point, labels in labels_by_point.items():
            text = "every target" if len(labels) == len(TARGETS_S) else ", ".join(labels)
            if (*point, text) in said:  # two priorities that agree share a label
                continue
            said.add((*point, text))
            for side, offset in (("left", (6, 5)), ("left", (6, -12)), ("right", (-6, 5)), ("right", (-6, -12))):
                label = axis.annotate(
                    text,
                    point,
                    textcoords="offset points",
                    xytext=offset,
                    ha=side,
                    fontsize=8,
                    color=STYLES[priority][0],
                )
                box = label.get_window_extent()
                is_inside = axis.bbox.y0 <= box.y0 and box.x1 <= axis.bbox.x1
                if is_inside and not any(box.overlaps(other) for other in taken):
                    taken.append(box)
                    break
                label.remove()
