"""Prompts that go from layer to layer, and may stop between any two: how wide, how far in a step, when that pays."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from penstock.config import SWEEP_TOKENS, TILE_TOKENS
from penstock.request import Chunk, LayerGroup
from penstock.schedule.budget import StepCost, StepLoad

# Of the time that chunks would take: what is predicted to gain less is not worth memory and a late first piece.
WORTHWHILE = 0.9
# And the most that a sweep may take where no chunk is short enough for the target, and layers are.
DEAREST = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """Decides by prediction; a step then takes a wide chunk through some layers, beside tokens that go through all."""

    num_layers: int
    most_tokens: int = SWEEP_TOKENS
    are_forced: bool = False  # wherever they can be, for comparisons

    def taken_on(self, cost: StepCost, load: StepLoad, chunk: Chunk, limit_s: float, *, least: int) -> Chunk | None:
        """Takes a chunk through as many more layers as a step of that load has time for; None: through none."""
        first = 0 if chunk.layers is None else chunk.layers.end
        ends = range(first + 1, self.num_layers + 1)
        num_fitting = bisect_right(ends, limit_s, key=lambda end: cost.predict(load.with_chunks(self._in(chunk, end))))
        count = min(max(num_fitting, least), len(ends))
        return self._in(chunk, first + count) if count else None

    def begun(self, cost: StepCost, load: StepLoad, chunk: Chunk, most_tokens: int, limit_s: float) -> Chunk | None:
        """Begins a sweep where a chunk does; None: the chunk is better."""

        def seconds_of_layer(num_tokens: int) -> float:
            return cost.predict(load.with_chunks(self._in(replace(chunk, end=chunk.start + num_tokens), 1)))

        width = bisect_right(range(1, most_tokens + 1), limit_s, key=seconds_of_layer)
        if TILE_TOKENS < width < most_tokens:
            width -= width % TILE_TOKENS
        before, size = chunk.num_before, chunk.num_tokens
        swept = self.taken_on(cost, load, replace(chunk, end=chunk.start + width), limit_s, least=1)
        if width <= size or swept is None or swept.layers is None:
            return None
        sweep_s = self.num_layers / swept.layers.end * cost.predict(load.with_chunks(swept))
        most = DEAREST if cost.predict(load.with_chunk(before, size)) > limit_s else WORTHWHILE
        chunks_s = width / size * cost.predict(load.with_chunk(before + (width - size) // 2, size))
        return swept if self.are_forced or sweep_s < most * chunks_s else None

    def _in(self, chunk: Chunk, end: int) -> Chunk:
        first = 0 if chunk.layers is None else chunk.layers.end
        return replace(chunk, layers=LayerGroup(first=first, end=end, num_layers=self.num_layers))
