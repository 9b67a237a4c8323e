"""Readings of the same prompts held against each other: how far they are apart, and what three prompts together say."""

# T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from penstock.errors import first_line
from penstock.proof.verdict import Finding

TOLERANCE = 1e-4  # times the deviation of the values, where that is above 1
LOW_PRECISION_STEPS = 8  # roundings of the largest value; less cannot be told from rounding
MAX_FAILURES = 1  # of three prompts: near-tied routers flip on rounding
LOW_PRECISION_FACTOR = 1.5  # times the distance that the whole prompt has from float32
INFINITE = float("inf")

# sizes of chunks, without end -> the rows of all of them
Read = Callable[[Iterator[int]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt: what the model gives for it whole, how it is read in chunks, and how far apart both may be."""

    whole: torch.Tensor  # [T, V] logits, or the states of a source
    read: Read
    allowed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Tells how far one prompt is off: the largest difference over its rows, and what is allowed."""

    largest: float
    allowed: float

    @property
    def is_exact(self) -> bool:
        return self.largest <= self.allowed


def compared(
    cases: Iterable[Case],
    chunkings: Sequence[tuple[int, ...]],
    *,
    what: str,
    against: str,
    first_may_decide: bool = False,
) -> Finding:
    """Awkward chunkings of each prompt. `first_may_decide`: if it is exact, no other is tried, because each is dear."""
    worst: list[Difference] = []
    try:
        for case in cases:
            read = (largest_difference(case.read(cycle(sizes)), case.whole) for sizes in chunkings)
            worst.append(worst_of(Difference(largest=one, allowed=case.allowed) for one in read))
            if num_failed(worst) > MAX_FAILURES or (first_may_decide and worst[0].is_exact):
                break
    except Exception as error:  # a model fails in ways of its own
        return Finding.unmeasured(f"{what} cannot be had: {first_line(error)}")
    return judged(worst, what, against)


def held_to_float32(
    cases: Iterable[tuple[Case, torch.Tensor]], chunking: tuple[int, ...], dtype: torch.dtype
) -> Finding:
    """Holds chunks in a narrow dtype to be no further from float32 than the whole prompt is, give or take a half.

    Beside each case stands what the same model gives in float32.
    """
    found: list[Difference] = []
    for case, exact in cases:
        yardstick = largest_difference(case.whole, exact)
        largest = largest_difference(case.read(cycle(chunking)), exact)
        found.append(Difference(largest=largest, allowed=LOW_PRECISION_FACTOR * yardstick))
    worst = max(found, key=lambda one: one.largest / one.allowed if one.allowed else one.largest)
    name = str(dtype).removeprefix("torch.")
    yardstick = worst.allowed / LOW_PRECISION_FACTOR
    reason = f"in {name}, chunks are {worst.largest:.2g} from float32 and the whole prompt {yardstick:.2g}"
    is_exact = num_failed(found) <= min(MAX_FAILURES, len(found) - 1)
    return Finding(exact=is_exact, max_difference=worst.largest, reason=reason)


def exact_limit(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference from these values that is rounding."""
    limit = TOLERANCE * max(1.0, values.float().std().item())
    if dtype == torch.float32:
        return limit
    return max(limit, LOW_PRECISION_STEPS * torch.finfo(dtype).eps * values.abs().max().item())


def difference(values: torch.Tensor, whole: torch.Tensor) -> Difference:
    return Difference(largest=largest_difference(values, whole), allowed=exact_limit(whole))


def largest_difference(values: torch.Tensor, others: torch.Tensor) -> float:
    largest = (values.float() - others.float()).abs().max().item()
    return INFINITE if largest != largest else largest


def worst_of(differences: Iterable[Difference]) -> Difference:
    """The largest, or the first that is too large: then the rest need not be computed."""
    worst = Difference(largest=0.0, allowed=0.0)
    for one in differences:
        worst = max(worst, one, key=lambda each: each.largest)
        if not worst.is_exact:
            break
    return worst


def spans(num_tokens: int, sizes: Iterator[int]) -> list[tuple[int, int]]:
    """Cuts so many tokens into pieces [start, end) of these sizes."""
    found, start = [], 0
    while start < num_tokens:
        end = min(start + next(sizes), num_tokens)
        found.append((start, end))
        start = end
    return found


def num_failed(worst: Sequence[Difference]) -> int:
    return sum(not one.is_exact for one in worst)


def judged(worst: Sequence[Difference], what: str, against: str) -> Finding:
    """Wrong if two of three prompts are."""
    if num_failed(worst) > min(MAX_FAILURES, len(worst) - 1):
        largest = max(one.largest for one in worst)
        allowed = min(one.allowed for one in worst)
        if largest == INFINITE:
            return Finding.unmeasured(f"{what} are not numbers")
        reason = f"{what} differ from {against} by {largest:.1e}, {allowed:.0e} is allowed"
        return Finding(exact=False, max_difference=largest, reason=reason)
    largest = max(one.largest for one in worst if one.is_exact)
    return Finding(exact=True, max_difference=largest, reason=f"{what} agree with {against} to {largest:.1e}")
