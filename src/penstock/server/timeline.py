"""The timeline: what each step did, as it happens or as a trace of the last minutes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.engine import Engine
from penstock.server import sse
from penstock.trace.document import Trace
from penstock.trace.recorder import Record, Recording

MOST_UNSENT = 1024  # of a watcher that does not read; it misses what comes after
WATCHED_S = 300.0  # of the past, that a watcher is shown first

router = APIRouter()


class Timeline:
    """What the engine records, for those who watch."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def trace(self, last_s: float | None) -> bytes:
        """Taken between two steps; made into a document beside them."""
        recording = await self._engine.call(lambda engine: engine.recording(last_s=last_s))
        return await asyncio.to_thread(lambda: b"".join(recording.pieces()))

    async def watch(self) -> AsyncGenerator[bytes]:
        """The head, what is kept, and from then on every record; empty when nothing came for a while."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes] = asyncio.Queue(MOST_UNSENT)

        def send(line: bytes) -> None:
            if not queue.full():
                queue.put_nowait(line)

        def listen(record: Record) -> None:
            """Called by the step thread."""
            loop.call_soon_threadsafe(send, _line(record))

        def begin(engine: Engine) -> Recording:
            engine.record().listeners.append(listen)
            return engine.recording(last_s=WATCHED_S)

        def end() -> None:
            listeners = self._engine.engine.record().listeners
            if listen in listeners:
                listeners.remove(listen)

        try:
            recording = await self._engine.call(begin)
            yield _line(recording.head)
            for line in await asyncio.to_thread(lambda: [_line(record) for record in recording.records()]):
                yield line
            while True:
                try:
                    async with asyncio.timeout(1.0):
                        line = await queue.get()
                except TimeoutError:
                    line = b""
                yield line
        finally:
            self._engine.post(end)


def _line(record: BaseModel) -> bytes:
    return record.model_dump_json().encode() + b"\n"


@router.get("/trace", response_model=Trace)
async def trace(request: Request, seconds: Annotated[float | None, Query(gt=0)] = None) -> Response:
    """The last minutes as a trace: as much as is kept, or the last `seconds` of it."""
    content = await request.app.state.service.timeline.trace(seconds)
    headers = {"Content-Disposition": 'attachment; filename="penstock-trace.json"'}
    return Response(content, media_type="application/json", headers=headers)


@router.get("/timeline", include_in_schema=False)
async def timeline(request: Request) -> Response:
    """The records of a trace as they are made, as server-sent events."""
    service = request.app.state.service
    watched = service.timeline.watch()

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(watched):
            async for line in watched:
                if service.is_draining:
                    return
                yield b"data: " + line + b"\n" if line else sse.NOTHING

    request_id, keep_alive_s = request.scope["state"]["request_id"], service.settings.keep_alive_s
    return sse.EventStream(events(), request_id=request_id, keep_alive_s=keep_alive_s, close=lambda: None)
