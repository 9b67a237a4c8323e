"""What to ask for, given what steps take. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.schedule.budget import StepCost, StepLoad

SIZES = (16, 64, 128, 256, 512, 1024)  # chunks that are tried
NUM_STREAMS = 4
CONTEXT = 1024  # at which speeds are told
NEARLY = 0.95  # of the fastest reading: a smaller chunk is worth so much
TARGETS_MS = (20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000)


def nearly_fastest(rates: Mapping[int, float]) -> int:
    """The smallest chunk that reads nearly as fast as any: smaller ones use less memory and stall others less."""
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= NEARLY * best)


def latency_target_ms(cost: StepCost, best_rate: float, context: int) -> int | None:
    """The shortest target under which a prompt beside four answers still reads at half its speed."""
    load = StepLoad()
    for _ in range(NUM_STREAMS):
        load = load.with_decode(context)
    for target in TARGETS_MS:
        chunk = max((size for size in SIZES if cost.predict(load.with_chunk(CONTEXT, size)) <= target / 1e3), default=0)
        if chunk / (target / 1e3) >= best_rate / 2:
            return target
    return None
