"""How long the rest of a prompt takes, by what its chunks took so far: a token costs more the more it attends to."""

from __future__ import annotations

from dataclasses import dataclass

# How much the first chunk counts, which also pays for what is done once in a process.
FIRST_WEIGHT = 0.1
# How many tokens, as far from each other as the prompt is long, outweigh what the model's shape says of the growth.
GROWTH_WEIGHT = 256


@dataclass(slots=True)
class Pace:
    """Fits the seconds of a token as a line over its position, by least squares, while chunks are read."""

    growth: float = 0.0  # what a position adds, as a share of a token at position 0, by the shape; 0: not known
    num_tokens: int = 0
    positions: float = 0.0  # summed over the tokens
    _weight: float = 0.0
    _x: float = 0.0  # weighted sums over chunks: x the middle of a chunk, y the seconds of one of its tokens
    _xx: float = 0.0
    _y: float = 0.0
    _xy: float = 0.0

    def note(self, start: int, end: int, seconds: float) -> None:
        num_tokens, x = end - start, (start + end) / 2
        weight, y = num_tokens if self.num_tokens else FIRST_WEIGHT * num_tokens, seconds / num_tokens
        self.num_tokens += num_tokens
        self.positions += num_tokens * x
        self._weight += weight
        self._x += weight * x
        self._xx += weight * x * x
        self._y += weight * y
        self._xy += weight * x * y

    def seconds_left(self, num_done: int, num_total: int, elapsed_s: float) -> float:
        """Predicts the rest from the time that passed, pauses between chunks too; 0 where nothing was read."""
        at_start, per_position = self._line(num_total)
        past = at_start * self.num_tokens + per_position * self.positions
        num_left = num_total - num_done
        rest = at_start * num_left + per_position * num_left * (num_done + num_total) / 2
        return elapsed_s * rest / past if past > 0 else 0.0

    def _line(self, num_total: int) -> tuple[float, float]:
        """Finds (seconds of a token at position 0, what each position adds); neither is below 0."""
        # The error of the slope is taken in the middle of the prompt, where it is about that of the whole.
        trust = GROWTH_WEIGHT * (num_total / 2) ** 2 if self.growth else 0.0
        ones, both, squares = self._weight + trust * self.growth**2, self._x - trust * self.growth, self._xx + trust
        spread = ones * squares - both * both
        slope = 0.0 if spread <= 0 else (ones * self._xy - both * self._y) / spread
        if slope <= 0:  # one chunk of an unknown shape, or times that do not grow: all tokens count alike
            return 1.0, 0.0
        return max(0.0, (self._y - slope * both) / ones), slope
