"""The timeline: what each step did, kept for a while and sent to whoever watches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock.engine.engine import Engine
from penstock.plan.machine import resident_bytes
from penstock.request import Chunk, StepPlan, StepResult
from penstock.server import sse
from penstock.server.metrics import is_prefill

VERSION = 1
MOST_KEPT = 4096
MOST_UNSENT = 1024  # of a watcher that does not read; it misses what comes after

router = APIRouter()


class TraceHead(BaseModel):
    """The first line: what was run, under which limits."""

    type: Literal["trace"] = "trace"
    version: int = VERSION
    model: str
    lane: str
    memory_budget_bytes: int
    latency_target_ms: float | None
    num_blocks: int


class TraceChunk(BaseModel):
    id: int
    kind: Literal["prefill", "decode"]
    start: int
    end: int
    total: int | None  # None while the prompt's length is unknown
    cached: int


class TraceStep(BaseModel):
    type: Literal["step"] = "step"
    step: int
    at: float  # seconds since the server began, at the step's end
    ms: float
    predicted_ms: float
    budget: int
    waiting: int
    memory_bytes: int
    predicted_bytes: int
    kv_share: float
    chunks: list[TraceChunk]
    preempted: list[int]


class TraceEnd(BaseModel):
    type: Literal["end"] = "end"
    id: int
    at: float
    reason: str


class Timeline:
    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=MOST_KEPT)
        self._watchers: set[asyncio.Queue[bytes]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine | None = None
        self._head = b""
        self._began_at = time.perf_counter()

    def begin(self, model: str, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._engine = loop, engine
        self._head = _line(
            TraceHead(
                model=model,
                lane=engine.lane.id,
                memory_budget_bytes=engine.model.budget_bytes,
                latency_target_ms=engine.config.latency_target_ms,
                num_blocks=engine.scheduler.pool.num_blocks,
            )
        )

    def take_step(self, plan: StepPlan, result: StepResult) -> None:
        """Called by the step thread."""
        assert self._engine is not None
        pool = self._engine.scheduler.pool
        step = TraceStep(
            step=plan.step,
            at=round(self._now(), 4),
            ms=round(result.elapsed_s * 1e3, 3),
            predicted_ms=round(plan.predicted_s * 1e3, 3),
            budget=plan.token_budget,
            waiting=plan.waiting,
            memory_bytes=resident_bytes(),
            predicted_bytes=plan.predicted_bytes,
            kv_share=round(pool.num_held / pool.num_blocks, 4),
            chunks=[_chunk(chunk) for chunk in plan.chunks],
            preempted=list(plan.preempted),
        )
        self._add(_line(step))

    def end(self, request_id: int, reason: str) -> None:
        self._add(_line(TraceEnd(id=request_id, at=round(self._now(), 4), reason=reason)))

    def saved(self) -> bytes:
        """What is kept, as a trace file: JSON lines."""
        return b"".join([self._head, *self._lines])

    async def watch(self) -> AsyncIterator[bytes]:
        """The head, what is kept, and from then on every line; empty when nothing came for a while."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(MOST_UNSENT)
        kept = [self._head, *self._lines]
        self._watchers.add(queue)
        try:
            for line in kept:
                yield line
            while True:
                try:
                    async with asyncio.timeout(1.0):
                        line = await queue.get()
                except TimeoutError:
                    line = b""
                yield line
        finally:
            self._watchers.discard(queue)

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        if self._watchers and self._loop is not None:
            self._loop.call_soon_threadsafe(self._send, line)

    def _send(self, line: bytes) -> None:
        for queue in self._watchers:
            if not queue.full():
                queue.put_nowait(line)

    def _now(self) -> float:
        return time.perf_counter() - self._began_at


def _line(entry: BaseModel) -> bytes:
    return entry.model_dump_json().encode() + b"\n"


def _chunk(chunk: Chunk) -> TraceChunk:
    return TraceChunk(
        id=chunk.sequence_id,
        kind="prefill" if is_prefill(chunk) else "decode",
        start=chunk.start,
        end=chunk.end,
        total=chunk.num_prompt_tokens,
        cached=chunk.num_cached,
    )


@router.get("/timeline", include_in_schema=False)
async def timeline(request: Request, follow: bool = True) -> Response:
    """Steps as they happen, as server-sent events; with follow=false what is kept, as a trace file."""
    service = request.app.state.service
    service.engine  # noqa: B018 - 503 while there is none
    if not follow:
        headers = {"Content-Disposition": 'attachment; filename="penstock-trace.jsonl"'}
        return Response(service.timeline.saved(), media_type="application/x-ndjson", headers=headers)

    async def events() -> AsyncIterator[bytes]:
        async for line in service.timeline.watch():
            if service.is_draining:
                return
            yield b"data: " + line + b"\n" if line else sse.NOTHING

    request_id, keep_alive_s = request.scope["state"]["request_id"], service.settings.keep_alive_s
    return sse.EventStream(events(), request_id=request_id, keep_alive_s=keep_alive_s, close=lambda: None)
