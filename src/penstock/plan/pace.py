"""How long the rest of a prompt takes, by what its chunks took so far: a token costs more the more it attends to."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# How much the first chunk counts, which also pays for what is done once in a process.
FIRST_WEIGHT = 0.1
# How many tokens, as far from each other as the prompt is long, outweigh what the model's shape says of the growth.
GROWTH_WEIGHT = 256
EVERYTHING_BEFORE = ((1.0, inf),)  # what a token of an unknown shape attends to


@dataclass(slots=True)
class Pace:
    """Fits the seconds of a token as a line over what it attends to, by least squares, while chunks are read."""

    # By the shape: (what a position adds, as a share of a token at position 0; up to which position). (): not known.
    growth: tuple[tuple[float, float], ...] = ()
    num_tokens: int = 0
    attended: float = 0.0  # summed over the tokens
    _weight: float = 0.0
    _x: float = 0.0  # weighted sums over chunks: x what its tokens attend to, y the seconds of one of them
    _xx: float = 0.0
    _y: float = 0.0
    _xy: float = 0.0

    def note(self, start: int, end: int, seconds: float) -> None:
        num_tokens, attended = end - start, self._attended(start, end)
        x, y = attended / num_tokens, seconds / num_tokens
        weight = num_tokens if self.num_tokens else FIRST_WEIGHT * num_tokens
        self.num_tokens += num_tokens
        self.attended += attended
        self._weight += weight
        self._x += weight * x
        self._xx += weight * x * x
        self._y += weight * y
        self._xy += weight * x * y

    def seconds_left(self, num_done: int, num_total: int, elapsed_s: float) -> float:
        """Predicts the rest from the time that passed, pauses between chunks too; 0 where nothing was read."""
        at_start, per_attended = self._line(num_total)
        past = at_start * self.num_tokens + per_attended * self.attended
        rest = at_start * (num_total - num_done) + per_attended * self._attended(num_done, num_total)
        return elapsed_s * rest / past if past > 0 else 0.0

    def _line(self, num_total: int) -> tuple[float, float]:
        """Finds (seconds of a token that attends to nothing, what all that it attends to adds); neither is below 0."""
        # The error of the slope is taken in the middle of the prompt, where it is about that of the whole. A known
        # shape counts in shares of a token's cost: by it, the slope is the seconds of a token that attends to nothing.
        trust = GROWTH_WEIGHT * (self._attended(0, num_total) / num_total) ** 2 if self.growth else 0.0
        ones, both, squares = self._weight + trust, self._x - trust, self._xx + trust
        spread = ones * squares - both * both
        slope = 0.0 if spread <= 0 else (ones * self._xy - both * self._y) / spread
        if slope <= 0:  # one chunk of an unknown shape, or times that do not grow: all tokens count alike
            return 1.0, 0.0
        return max(0.0, (self._y - slope * both) / ones), slope

    def _attended(self, start: int, end: int) -> float:
        """Sums over the tokens what they attend to: positions, or shares of a token's cost where the shape is known."""
        return sum(
            share * (_area(end, reach) - _area(start, reach)) for share, reach in self.growth or EVERYTHING_BEFORE
        )


def _area(end: int, reach: float) -> float:
    """Sums positions below an end, each counted up to a reach."""
    near = min(end, reach)
    return near * near / 2 + (reach * (end - near) if near < end else 0.0)
