"""How long the rest of a prompt takes, by what its chunks took so far: a token costs more the more it attends to."""

from __future__ import annotations

from dataclasses import dataclass

# How much the first chunk counts, which also pays for what is done once in a process.
FIRST_WEIGHT = 0.1


@dataclass(slots=True)
class Pace:
    """Fits the seconds of a token as a line over its position, by least squares, while chunks are read."""

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
        at_start, per_position = self._line()
        past = at_start * self.num_tokens + per_position * self.positions
        num_left = num_total - num_done
        rest = at_start * num_left + per_position * num_left * (num_done + num_total) / 2
        return elapsed_s * rest / past if past > 0 else 0.0

    def _line(self) -> tuple[float, float]:
        """Finds (seconds of a token at position 0, what each position adds); neither is below 0."""
        spread = self._weight * self._xx - self._x * self._x
        slope = 0.0 if spread <= 0 else (self._weight * self._xy - self._x * self._y) / spread
        if slope <= 0:  # one chunk, or times that do not grow: all tokens count alike
            return 1.0, 0.0
        at_start = (self._y - slope * self._x) / self._weight
        return max(0.0, at_start), slope
