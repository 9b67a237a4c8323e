"""Gaps of running streams while a long prompt arrives beside them, on the real engine."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.config import PrefillPriority
from penstock.engine.engine import Engine
from penstock.request import PrefillProgress, Token
from penstock.trace.summary import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSettings:
    model: str
    num_decodes: int
    decode_context: int
    prompt_tokens: int
    target_ms: float
    threads: int | None
    dtype: str
    most_seconds: float  # for one variant: a priority may keep the prompt waiting for very long


@dataclass(frozen=True, slots=True, kw_only=True)
class StallResult:
    """Gaps are times between two tokens of one stream, from the long prompt's arrival to its first token."""

    name: str
    num_gaps: int
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    num_read: int  # of the long prompt; less than all of it where the time ran out
    seconds: float  # to its first token, or until the time ran out
    tokens_per_s: float  # prompt tokens read and tokens written, together


def measure_stalls(settings: StallSettings) -> Iterator[StallResult]:
    """One engine; the variants differ only in how a step is shared."""
    engine = Engine.load(
        settings.model,
        latency_target_ms=settings.target_ms,
        threads=settings.threads,
        dtype=settings.dtype,
        prefix_cache=False,
        context=settings.prompt_tokens + 16_384,
    )
    with engine:
        ceiling = engine.scheduler.budget.ceiling
        for priority in PrefillPriority:
            engine.set_priority(priority)
            yield _measure(engine, settings, f"{priority.value}, target {settings.target_ms:.0f} ms")
        engine.scheduler.budget.target_s = None
        engine.set_priority(PrefillPriority.INTERLEAVED)
        yield _measure(engine, settings, f"interleaved, chunks of {ceiling}, no target")
        engine.scheduler.budget.ceiling = 0
        yield _measure(engine, settings, "chunking off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What running streams saw of a long prompt, from its arrival to its first token."""

    gaps_s: tuple[float, ...]  # of all streams; one that got nothing has one gap, the whole wait
    num_written: int
    num_read: int
    seconds: float


def read_beside(
    engine: Engine,
    *,
    num_streams: int,
    stream_context: int,
    prompt_tokens: int,
    most_seconds: float,
    generator: random.Random,
) -> Beside:
    vocabulary = engine.model.spec.vocab_size

    def submit(length: int, max_tokens: int) -> int:
        tokens = [generator.randrange(vocabulary) for _ in range(length)]
        return engine.submit(tokens, max_tokens=max_tokens, ignore_eos=True)

    most_written = min(16_000, engine.scheduler.capacity - stream_context)
    streams = [submit(stream_context, most_written) for _ in range(num_streams)]
    while any(sequence.num_generated < 4 for sequence in engine.scheduler.sequences.values()):
        engine.step()
    arrived_at = now = time.perf_counter()
    last_token_at = dict.fromkeys(streams, arrived_at)
    long_prompt = submit(prompt_tokens, 1)
    gaps: list[float] = []
    num_read = 0
    while num_read < prompt_tokens and now - arrived_at < most_seconds:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token) and event.request_id in last_token_at:
                gaps.append(now - last_token_at[event.request_id])
                last_token_at[event.request_id] = now
            elif isinstance(event, PrefillProgress) and event.request_id == long_prompt:
                num_read = event.num_computed
    num_written = len(gaps)
    gaps += [now - at for at in last_token_at.values() if at == arrived_at]
    for request_id in (*streams, long_prompt):
        engine.abort(request_id)
    return Beside(gaps_s=tuple(gaps), num_written=num_written, num_read=num_read, seconds=now - arrived_at)


def _measure(engine: Engine, settings: StallSettings, name: str) -> StallResult:
    beside = read_beside(
        engine,
        num_streams=settings.num_decodes,
        stream_context=settings.decode_context,
        prompt_tokens=settings.prompt_tokens,
        most_seconds=settings.most_seconds,
        generator=random.Random(0),
    )
    gaps = beside.gaps_s
    return StallResult(
        name=name,
        num_gaps=len(gaps),
        gap_p50_ms=percentile(gaps, 0.5) * 1e3,
        gap_p99_ms=percentile(gaps, 0.99) * 1e3,
        gap_max_ms=max(gaps) * 1e3,
        num_read=beside.num_read,
        seconds=beside.seconds,
        tokens_per_s=(beside.num_read + beside.num_written) / beside.seconds,
    )
