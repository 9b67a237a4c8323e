"""Seeded arrival traces: who comes when, with how long a prompt, and how much is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    num_prompt_tokens: int
    num_generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """`running` decode when the trace begins. `watched` indexes the long prompt among the arrivals, if there is one."""

    title: str
    arrivals: tuple[Arrival, ...]
    running: tuple[Arrival, ...] = ()
    watched: int | None = None
    gaps_end_with_watched: bool = False  # count only the gaps beside the long prompt
    num_blocks: int | None = None  # None: the machine's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the scenarios are on a machine."""

    num_decodes: int
    decode_context: int
    num_decoded: int
    prompt: int
    document: int
    questions_per_s: float
    questions_s: float
    burst_requests: int
    num_bursts: int
    burst_every_s: float
    burst_prompts: tuple[int, ...]
    burst_blocks: int
    day_requests: int
    day_s: float
    day_median_prompt: int
    day_longest_prompt: int
    day_mean_generated: int


SIZES = {
    "h200": Sizes(
        num_decodes=32,
        decode_context=2_048,
        num_decoded=1_024,
        prompt=65_536,
        document=524_288,
        questions_per_s=0.5,
        questions_s=200.0,
        burst_requests=48,
        num_bursts=5,
        burst_every_s=15.0,
        burst_prompts=(200, 200, 200, 1_000, 1_000, 4_000, 16_000),
        burst_blocks=7_000,
        day_requests=10_000,
        day_s=3_600.0,
        day_median_prompt=500,
        day_longest_prompt=65_536,
        day_mean_generated=128,
    ),
    "cpu": Sizes(
        num_decodes=8,
        decode_context=512,
        num_decoded=512,
        prompt=6_144,
        document=51_200,
        questions_per_s=0.02,
        questions_s=2_000.0,
        burst_requests=12,
        num_bursts=4,
        burst_every_s=90.0,
        burst_prompts=(50, 50, 200, 200, 800, 2_000),
        burst_blocks=320,
        day_requests=10_000,
        day_s=43_200.0,
        day_median_prompt=120,
        day_longest_prompt=6_144,
        day_mean_generated=48,
    ),
}


def beside(sizes: Sizes, rng: Random) -> Arrivals:
    """One long prompt arrives beside running decodes."""
    one = Arrival(at_s=0.0, num_prompt_tokens=sizes.decode_context, num_generated=sizes.num_decoded)
    # Not at once: the decodes have found their rhythm.
    long = Arrival(at_s=rng.uniform(0.3, 0.5), num_prompt_tokens=sizes.prompt, num_generated=16)
    title = f"{sizes.num_decodes} decodes at context {sizes.decode_context:,}, one prompt of {sizes.prompt:,} arrives"
    return Arrivals(
        title=title, arrivals=(long,), running=(one,) * sizes.num_decodes, watched=0, gaps_end_with_watched=True
    )


def questions(sizes: Sizes, rng: Random) -> Arrivals:
    """Short questions arrive as a Poisson process beside one very long document."""
    arrivals = [Arrival(at_s=0.0, num_prompt_tokens=sizes.document, num_generated=32)]
    at_s = rng.expovariate(sizes.questions_per_s)
    while at_s < sizes.questions_s:
        length, generated = rng.randint(150, 250), rng.randint(32, 64)
        arrivals.append(Arrival(at_s=at_s, num_prompt_tokens=length, num_generated=generated))
        at_s += rng.expovariate(sizes.questions_per_s)
    title = f"{len(arrivals) - 1} questions of about 200, one each {1 / sizes.questions_per_s:g} s, "
    return Arrivals(title=title + f"beside one document of {sizes.document:,}", arrivals=tuple(arrivals), watched=0)


def lone_question(sizes: Sizes, rng: Random) -> Arrivals:
    """One short question beside the document, while nobody else is there."""
    document = Arrival(at_s=0.0, num_prompt_tokens=sizes.document, num_generated=8)
    question = Arrival(at_s=rng.uniform(4.0, 8.0), num_prompt_tokens=200, num_generated=32)
    title = f"one question of 200 beside one document of {sizes.document:,}"
    return Arrivals(title=title, arrivals=(document, question), watched=0)


def bursts(sizes: Sizes, rng: Random) -> Arrivals:
    """Many at the same moment, mixed, into a pool of blocks that cannot hold them all."""
    arrivals = []
    for index in range(sizes.num_bursts):
        for _ in range(sizes.burst_requests):
            at_s = index * sizes.burst_every_s + rng.uniform(0.0, 0.2)
            length = round(rng.choice(sizes.burst_prompts) * rng.uniform(0.7, 1.3))
            generated = rng.randint(sizes.day_mean_generated, 4 * sizes.day_mean_generated)
            arrivals.append(Arrival(at_s=at_s, num_prompt_tokens=length, num_generated=generated))
    title = f"{sizes.num_bursts} bursts of {sizes.burst_requests}, one each {sizes.burst_every_s:g} s, prompts of "
    title += f"{min(sizes.burst_prompts):,} to {max(sizes.burst_prompts):,}, "
    title += f"{sizes.burst_blocks * 16:,} tokens of cache"
    ordered = sorted(arrivals, key=lambda arrival: arrival.at_s)
    return Arrivals(title=title, arrivals=tuple(ordered), num_blocks=sizes.burst_blocks)


def day(sizes: Sizes, rng: Random) -> Arrivals:
    """A night, a morning that fills up, a busy afternoon: the rate swings between 0.2 and 1.8 of its mean."""
    arrivals: list[Arrival] = []
    highest_rate = 1.8 * sizes.day_requests / sizes.day_s
    at_s = 0.0
    while len(arrivals) < sizes.day_requests:
        at_s += rng.expovariate(highest_rate)
        rate = 1 - 0.8 * math.cos(2 * math.pi * at_s / sizes.day_s)
        if rng.random() * 1.8 > rate:
            continue
        length = round(rng.lognormvariate(math.log(sizes.day_median_prompt), 1.2))
        generated = round(rng.lognormvariate(math.log(sizes.day_mean_generated) - 0.32, 0.8))
        arrivals.append(
            Arrival(
                at_s=at_s,
                num_prompt_tokens=min(max(8, length), sizes.day_longest_prompt),
                num_generated=min(max(1, generated), 8 * sizes.day_mean_generated),
            )
        )
    title = f"{sizes.day_requests:,} requests, a day's curve in {sizes.day_s / 3600:g} h, prompts of about "
    title += f"{sizes.day_median_prompt} and up to {max(a.num_prompt_tokens for a in arrivals):,}"
    return Arrivals(title=title, arrivals=tuple(arrivals))


SCENARIOS: dict[str, Callable[[Sizes, Random], Arrivals]] = {
    "beside-64k": beside,
    "questions": questions,
    "bursts": bursts,
    "day": day,
}
