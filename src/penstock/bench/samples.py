"""`ProbeResult`: what a probe measured, sample by sample. Less is better of every quantity."""

from __future__ import annotations

from statistics import median
from typing import Literal

from pydantic import TypeAdapter

from penstock.document import Document

Unit = Literal["s", "bytes", "tokens"]
_UNIT: TypeAdapter[Unit] = TypeAdapter(Unit)


class Measure(Document):
    """One quantity of one variant, as often as it was taken."""

    variant: str
    quantity: str  # ends in its unit: read_s, peak_bytes
    x: int | None  # where it stands on the probe's axis; None: the probe has none
    samples: tuple[float, ...]
    is_compared: bool = True  # with earlier runs; what is only drawn is not

    @property
    def key(self) -> tuple[str, str, int | None]:
        return (self.variant, self.quantity, self.x)

    @property
    def unit(self) -> Unit:
        return _UNIT.validate_python(self.quantity.rsplit("_", 1)[-1])

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> float:
        """How far the median lies above the smallest sample, as a share of it. What interferes only ever adds."""
        return self.median / min(self.samples) - 1 if min(self.samples) > 0 else float("inf")


class ProbeResult(Document):
    name: str
    axis: str | None  # what `x` counts
    seed: int
    seconds: float
    yardstick_s: tuple[float, ...]  # fixed work, timed between the samples: how fast the machine itself was
    measures: tuple[Measure, ...]

    def measure(self, variant: str, quantity: str, x: int | None = None) -> Measure:
        return next(measure for measure in self.measures if measure.key == (variant, quantity, x))

    def series(self, variant: str, quantity: str) -> list[Measure]:
        """Lists the measures of one quantity along the axis."""
        found = [m for m in self.measures if (m.variant, m.quantity) == (variant, quantity)]
        return sorted(found, key=lambda measure: measure.x or 0)

    def variants(self, quantity: str) -> list[str]:
        return list(dict.fromkeys(m.variant for m in self.measures if m.quantity == quantity))

    def merged(self, other: ProbeResult) -> ProbeResult:
        """Joins two measurements of the same probe."""
        found = {measure.key: measure.samples for measure in other.measures}
        measures = tuple(
            measure.model_copy(update={"samples": measure.samples + found.get(measure.key, ())})
            for measure in self.measures
        )
        seconds, yardstick_s = self.seconds + other.seconds, self.yardstick_s + other.yardstick_s
        return self.model_copy(update={"seconds": seconds, "yardstick_s": yardstick_s, "measures": measures})
