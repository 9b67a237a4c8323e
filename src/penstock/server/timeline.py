"""The timeline: what each step did, as it happens or as a trace of the last minutes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.engine import Engine
from penstock.server import sse
from penstock.server.service import Service
from penstock.trace.document import Trace
from penstock.trace.recorder import Record, Recording

MAX_UNSENT = 1024  # of a watcher that does not read; it misses what comes after
WATCHED_S = 300.0  # of the past, that a watcher is shown first

router = APIRouter()


async def watch(service: Service, steps: AsyncEngine) -> AsyncIterator[bytes]:
    """Gives the head, what is kept, and from then on every record; nothing when none came for a while."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNSENT)

    def send(event: bytes) -> None:
        if not queue.full():
            queue.put_nowait(event)

    def listen(record: Record) -> None:
        """Called by the step thread."""
        loop.call_soon_threadsafe(send, sse.event(record))

    def begin(engine: Engine) -> Recording:
        engine.record().listeners.append(listen)
        return engine.recording(last_s=WATCHED_S)

    def end() -> None:
        listeners = steps.engine.record().listeners
        if listen in listeners:
            listeners.remove(listen)

    try:
        recording = await steps.call(begin)
        yield sse.event(recording.head)
        for event in await asyncio.to_thread(lambda: [sse.event(record) for record in recording.records()]):
            yield event
        while not service.is_draining:
            try:
                async with asyncio.timeout(1.0):
                    event = await queue.get()
            except TimeoutError:
                event = sse.NOTHING
            yield event
    finally:
        steps.post(end)


@router.get("/trace", response_model=Trace)
async def trace(request: Request, seconds: Annotated[float | None, Query(gt=0)] = None) -> Response:
    """The last minutes as a trace: as much as is kept, or the last `seconds` of it."""
    # Taken between two steps; made into a document beside them.
    recording = await Service.of(request, None).engine.call(lambda engine: engine.recording(last_s=seconds))
    content = await asyncio.to_thread(lambda: b"".join(recording.pieces()))
    headers = {"Content-Disposition": 'attachment; filename="penstock-trace.json"'}
    return Response(content, media_type="application/json", headers=headers)


@router.get("/timeline", include_in_schema=False)
async def timeline(request: Request) -> Response:
    """The records of a trace as they are made, as server-sent events."""
    service = Service.of(request, None)
    return sse.EventStream(watch(service, service.engine), request)
