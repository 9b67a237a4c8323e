"""What a trace shows: where the time went, and the slowest steps with the reason of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from penstock.document import Document
from penstock.trace.document import Trace, TraceLane, TraceRequest, TraceStep
from penstock.trace.percentile import percentile

NUM_SLOWEST = 5
LEAST_LIKE = 3  # steps that a comparison needs
SLOW = 1.5  # times the median of its like, or the prediction
LARGE_SHARE = 0.5


class Spread(Document):
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None where there are no values."""
        found = list(values)
        return cls(p50=percentile(found, 0.5), p99=percentile(found, 0.99), max=max(found)) if found else None


class SlowStep(Document):
    step: int
    started_s: float
    elapsed_ms: float
    predicted_ms: float | None
    num_tokens: int
    why: tuple[str, ...]


class Memory(Document):
    peak_bytes: int
    predicted_bytes: int
    budget_bytes: int


class LongestGap(Document):
    request_id: int
    gap_ms: float
    step: int | None  # the one that ended it; None: not among those kept


class Summary(Document):
    model: str
    lane: TraceLane
    seconds: float
    num_steps: int
    num_dropped_steps: int
    busy_share: float  # of the time between the first step and the last
    read_tokens: int
    cached_tokens: int
    written_tokens: int
    read_tokens_per_s: float  # by the time of steps that read
    step_ms: Spread | None
    prediction_error: Spread | None  # |measured / predicted - 1|
    memory: Memory
    requests: dict[str, int]  # by outcome; "running" where the trace was taken before
    num_preemptions: int
    queue_ms: Spread | None
    ttft_ms: Spread | None
    gap_ms: Spread | None
    longest_gap: LongestGap | None
    slowest: tuple[SlowStep, ...]
    adjustments: tuple[str, ...]


def summarize(trace: Trace, *, num_slowest: int = NUM_SLOWEST) -> Summary:
    steps, requests = trace.steps, trace.requests
    read_tokens = sum(step.num_read for step in steps)
    read_s = sum(step.elapsed_ms for step in steps if step.num_read) / 1e3
    seconds = steps[-1].ended_s - steps[0].started_s if steps else 0.0
    errors = [abs(step.elapsed_ms / step.predicted_ms - 1) for step in steps if step.predicted_ms]
    return Summary(
        model=trace.model.name,
        lane=trace.lane,
        seconds=round(seconds, 3),
        num_steps=len(steps),
        num_dropped_steps=trace.num_dropped_steps,
        busy_share=round(min(1.0, sum(step.elapsed_ms for step in steps) / 1e3 / seconds), 4) if seconds else 0.0,
        read_tokens=read_tokens,
        cached_tokens=sum(request.cached_tokens for request in requests),
        written_tokens=sum(request.written_tokens for request in requests),
        read_tokens_per_s=round(read_tokens / read_s, 1) if read_s else 0.0,
        step_ms=Spread.of(step.elapsed_ms for step in steps),
        prediction_error=Spread.of(errors),
        memory=Memory(
            peak_bytes=max((step.peak_bytes for step in steps), default=0),
            predicted_bytes=max((step.predicted_bytes for step in steps), default=0),
            budget_bytes=trace.limits.memory_budget_bytes,
        ),
        requests=dict(Counter(request.outcome or "running" for request in requests)),
        num_preemptions=sum(request.num_preemptions for request in requests),
        queue_ms=Spread.of(request.queue_ms for request in requests if request.queue_ms is not None),
        ttft_ms=Spread.of(request.ttft_ms for request in requests if request.ttft_ms is not None),
        gap_ms=Spread.of(gap for request in requests for gap in request.gaps_ms),
        longest_gap=_longest_gap(steps, requests),
        slowest=_slowest(steps, num_slowest),
        adjustments=tuple(dict.fromkeys(line for part in (trace, *requests) for line in part.adjustments)),
    )


def _slowest(steps: Sequence[TraceStep], number: int) -> tuple[SlowStep, ...]:
    like: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        like.setdefault(_load(step), []).append(step.elapsed_ms)
    slowest = sorted(steps, key=lambda step: -step.elapsed_ms)[:number]
    return tuple(
        SlowStep.from_fields_of(step, why=tuple(_reasons(step, like[_load(step)], is_first=step is steps[0])))
        for step in slowest
    )


def _reasons(step: TraceStep, like_ms: list[float], *, is_first: bool) -> Iterable[str]:
    """What it carried, and what else made it slow."""
    prompts = sorted((chunk for chunk in step.chunks if chunk.kind == "prefill"), key=lambda chunk: -chunk.num_tokens)
    num_decodes = len(step.chunks) - len(prompts)
    for chunk in prompts[:2]:
        if chunk.num_tokens < LARGE_SHARE * step.num_tokens and len(prompts) > 1:
            continue
        after = f" after {chunk.start:,}" if chunk.start else ""
        whole = f" of {chunk.prompt_tokens:,}" if chunk.prompt_tokens else ""
        layers = "" if chunk.layers is None else f", to layer {chunk.layers.end} of {chunk.layers.num_layers}"
        yield f"reads {chunk.num_tokens:,}{whole} tokens of request {chunk.request_id}{after}{layers}"
    if len(prompts) > 1:
        yield f"reads for {len(prompts)} requests at once"
    if num_decodes:
        longest = max(chunk.end for chunk in step.chunks if chunk.kind == "decode")
        yield f"writes for {num_decodes} {'request' if num_decodes == 1 else 'requests'}, context up to {longest:,}"
    for request_id in step.preempted:
        yield f"request {request_id} lost its place"
    typical = median(like_ms)
    is_unlike = len(like_ms) >= LEAST_LIKE and step.elapsed_ms > SLOW * typical
    if is_first:
        yield "the first step: code and buffers are touched for the first time"
    elif is_unlike:
        ratio, others = step.elapsed_ms / typical, len(like_ms) - 1
        yield f"{ratio:.1f} x the median of {others} like it: something else may have had the machine"
    if step.predicted_ms and step.elapsed_ms > SLOW * step.predicted_ms:
        yield f"{step.elapsed_ms / step.predicted_ms:.1f} x what was predicted ({step.predicted_ms:,.0f} ms)"


def _load(step: TraceStep) -> tuple[int, int]:
    """Steps with the same number carry about the same work: tokens, and tokens times what they attend to."""
    attended = sum(chunk.num_tokens * (chunk.start + chunk.end) // 2 for chunk in step.chunks)
    return step.num_tokens.bit_length(), attended.bit_length()


def _longest_gap(steps: Sequence[TraceStep], requests: Sequence[TraceRequest]) -> LongestGap | None:
    gaps = [(gap, index, request) for request in requests for index, gap in enumerate(request.gaps_ms)]
    if not gaps:
        return None
    gap_ms, index, request = max(gaps, key=lambda found: found[0])
    before_ms = (request.ttft_ms or 0.0) + sum(request.gaps_ms[: index + 1])
    at_s = request.arrived_s + before_ms / 1e3
    # Times are rounded to a microsecond each.
    nearest = min(steps, key=lambda step: abs(step.ended_s - at_s), default=None)
    is_kept = nearest is not None and abs(nearest.ended_s - at_s) < 1e-3
    return LongestGap(request_id=request.id, gap_ms=gap_ms, step=nearest.step if nearest and is_kept else None)
