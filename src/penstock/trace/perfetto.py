"""A trace in the trace event format, which Perfetto and Chrome's own viewer open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from penstock.errors import InvalidSetting
from penstock.trace.document import Trace, TraceRequest, TraceStep

ENGINE, REQUESTS = 1, 2  # processes of the picture
STEPS = 1  # the thread of the engine


class EventFile(BaseModel):
    """Names are those of the format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str = "ms"
    otherData: dict[str, str]


def write_perfetto(trace: Trace, path: Path) -> None:
    about = {"model": trace.model.name, "lane": trace.lane.id, "began_at": trace.began_at}
    content = EventFile(traceEvents=list(events(trace)), otherData=about)
    try:
        path.write_text(content.model_dump_json(), encoding="utf-8")
    except OSError as error:
        raise InvalidSetting(f"--perfetto is {str(path)!r}; it cannot be written: {error.strerror}.") from error


def events(trace: Trace) -> Iterator[dict[str, Any]]:
    yield _name("process_name", f"engine: {trace.model.name}", ENGINE)
    yield _name("thread_name", "steps", ENGINE, STEPS)
    yield _name("process_name", "requests", REQUESTS)
    for request in trace.requests:
        yield _name("thread_name", f"request {request.id}", REQUESTS, _thread(request.id))
        yield from _course(request)
    for step in trace.steps:
        yield from _step(step)


def _step(step: TraceStep) -> Iterator[dict[str, Any]]:
    begin, length = _us(step.started_s), round(step.elapsed_ms * 1e3, 3)
    num_decodes = sum(chunk.kind == "decode" for chunk in step.chunks)
    facts = {
        "reason": step.reason,
        "predicted_ms": step.predicted_ms,
        "token_budget": step.token_budget,
        "admitted": list(step.admitted),
        "preempted": list(step.preempted),
    }
    yield _span(
        f"step {step.step}: {step.num_read} read, {num_decodes} written", "step", begin, length, ENGINE, STEPS, facts
    )
    for chunk in step.chunks:
        name = f"read {chunk.start} to {chunk.end}" if chunk.kind == "prefill" else f"token at {chunk.start}"
        facts = {"step": step.step, "start": chunk.start, "end": chunk.end, "cached_tokens": chunk.cached_tokens}
        yield _span(name, chunk.kind, begin, length, REQUESTS, _thread(chunk.request_id), facts)
    for request_id in step.preempted:
        yield _instant("preempted", begin, request_id)
    counters = {
        "memory, MB": {"resident": step.memory_bytes / 1e6, "predicted": step.predicted_bytes / 1e6},
        "blocks held, %": {"held": step.kv_share * 100},
        "waiting": {"requests": step.num_waiting},
        "tokens": {"read": step.num_read, "decoded": num_decodes},
    }
    for name, values in counters.items():
        yield {"name": name, "ph": "C", "ts": begin, "pid": ENGINE, "args": values}


def _course(request: TraceRequest) -> Iterator[dict[str, Any]]:
    if request.queue_ms:
        facts = {"prompt_tokens": request.prompt_tokens}
        length = round(request.queue_ms * 1e3, 3)
        yield _span("waits", "queue", _us(request.arrived_s), length, REQUESTS, _thread(request.id), facts)
    if request.ended_s is not None:
        yield _instant(request.outcome or "ended", _us(request.ended_s), request.id)


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _span(
    name: str, category: str, begin_us: float, length_us: float, process: int, thread: int, facts: dict[str, Any]
) -> dict[str, Any]:
    place = {"ts": begin_us, "dur": length_us, "pid": process, "tid": thread}
    return {"name": name, "cat": category, "ph": "X", **place, "args": facts}


def _instant(name: str, at_us: float, request_id: int) -> dict[str, Any]:
    place = {"ts": at_us, "pid": REQUESTS, "tid": _thread(request_id)}
    return {"name": name, "cat": "request", "ph": "i", "s": "t", **place}


def _thread(request_id: int) -> int:
    return request_id + 1  # 0 is what a process without threads has


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
