"""What changed between two runs of the same work, and whether the change is larger than their noise.

What interferes with a sample only ever adds to it, so noise is measured among the better half: the spread of a measure
is how far its median lies above its smallest sample. A change counts when the smallest samples and the medians both
differ by more than a limit, and the smallest sample of one run lies beyond the median of the other. The limit is a
floor, either run's own spread, or the usual spread of that probe three times over, whichever is largest. The yardstick
of each probe, fixed work timed between its samples, widens it by as much as the machine itself changed; it never
narrows it. Whoever finds a change measures again before saying so: see `confirm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Literal

from penstock.bench.ledger import BenchRun
from penstock.bench.samples import Measure, ProbeResult, Unit
from penstock.document import Document

# Under these shares, or this much, nothing is a change. Where a run's objects lie in memory decides a tenth of its
# time, and the libraries' own pages are resident or not, as the system likes.
FLOORS: dict[Unit, float] = {"s": 0.15, "bytes": 0.15, "tokens": 0.01}
LEAST: dict[Unit, float] = {"s": 0.0005, "bytes": 0, "tokens": 0}
FEWEST_SAMPLES: dict[Unit, int] = {"s": 5, "bytes": 1, "tokens": 1}
USUAL_SPREADS = 3

Verdict = Literal["slower", "faster", "larger", "smaller", "same"]
WORSE: dict[Unit, Verdict] = {"s": "slower", "bytes": "larger", "tokens": "larger"}
BETTER: dict[Unit, Verdict] = {"s": "faster", "bytes": "smaller", "tokens": "smaller"}


class Change(Document):
    probe: str
    variant: str
    quantity: str
    x: int | None
    before: float  # medians
    after: float
    limit: float  # the factor that the change had to pass, in the direction that it has
    machine: float  # how much longer the yardstick took
    verdict: Verdict

    @property
    def is_worse(self) -> bool:
        return self.verdict in WORSE.values()

    @property
    def factor(self) -> float:
        return self.after / self.before if self.before else float("inf")

    @property
    def name(self) -> str:
        place = "" if self.x is None else f" at {self.x:,}"
        return f"{self.probe}: {self.variant} {self.quantity}{place}"


class Comparison(Document):
    before: str  # when that run began
    versions: dict[str, str]  # of that run, where they differ
    changes: tuple[Change, ...]  # of every measure that both runs have

    @property
    def flagged(self) -> list[Change]:
        return [change for change in self.changes if change.verdict != "same"]


class BenchReport(Document):
    """What `bench --json` prints."""

    run: BenchRun
    comparison: Comparison | None  # None: the first run of this work on this machine

    @property
    def is_worse(self) -> bool:
        return self.comparison is not None and any(change.is_worse for change in self.comparison.flagged)


def compare(before: BenchRun, after: BenchRun) -> Comparison:
    changes: list[Change] = []
    old_probes = {probe.name: probe for probe in before.probes}
    for probe in after.probes:
        if probe.name in old_probes:
            changes += _changes(old_probes[probe.name], probe)
    different = {name: value for name, value in before.versions.items() if after.versions.get(name) != value}
    return Comparison(before=before.started_at, versions=different, changes=tuple(changes))


def confirm(found: Comparison, again: Comparison) -> Comparison:
    """What both of two measurements say; `again` holds the probes in which the first found something."""
    verdicts = {change.name: change.verdict for change in again.changes}
    confirmed = tuple(
        change
        if change.verdict in ("same", verdicts.get(change.name))
        else change.model_copy(update={"verdict": "same"})
        for change in found.changes
    )
    return found.model_copy(update={"changes": confirmed})


def _changes(before: ProbeResult, after: ProbeResult) -> Iterator[Change]:
    machine = median(after.yardstick_s) / median(before.yardstick_s)
    old = {measure.key: measure for measure in before.measures if measure.is_compared}
    pairs = [(old[new.key], new) for new in after.measures if new.is_compared and new.key in old]
    for old_measure, new_measure in pairs:
        alike = [m for pair in pairs for m in pair if m.quantity == new_measure.quantity and len(m.samples) > 1]
        usual = median(measure.spread for measure in alike) if alike else 0.0
        yield _change(before.name, old_measure, new_measure, usual_spread=usual, machine=machine)


def _change(probe: str, before: Measure, after: Measure, *, usual_spread: float, machine: float) -> Change:
    unit = after.unit
    is_more = after.median > before.median
    limit = max(1 + FLOORS[unit], 1 + before.spread, 1 + after.spread, (1 + usual_spread) ** USUAL_SPREADS)
    if unit == "s":
        limit *= max(1.0, machine if is_more else 1 / machine)
    low, high = (before, after) if is_more else (after, before)
    has_enough = min(len(low.samples), len(high.samples)) >= FEWEST_SAMPLES[unit]
    is_apart = low.median < min(high.samples)
    is_beyond = high.median > max(limit * low.median, low.median + LEAST[unit]) and min(high.samples) > limit * min(
        low.samples
    )
    is_change = has_enough and is_apart and is_beyond
    return Change.from_fields_of(
        after,
        probe=probe,
        before=before.median,
        after=after.median,
        limit=limit,
        machine=machine,
        verdict=(WORSE if is_more else BETTER)[unit] if is_change else "same",
    )
