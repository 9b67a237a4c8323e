"""Answers that are streamed as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.server.problems import ProblemAnswer, problem_of

NOTHING = b""  # given where there is nothing to send
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event(data: BaseModel) -> bytes:
    """Fields that were never set are left out."""
    return b"data: " + data.__pydantic_serializer__.to_json(data, exclude_unset=True) + b"\n\n"


def named_event(name: str, document: dict[str, Any]) -> bytes:
    return f"event: {name}\n".encode() + b"data: " + to_json(document) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends what the iterator gives; where it gave nothing for a while, a comment.

    A failure becomes an event, and however it ends, `close` is called.
    """

    media_type = "text/event-stream"

    def __init__(
        self, parts: AsyncIterator[bytes], *, request_id: str, keep_alive_s: float, close: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._keep_alive_s = keep_alive_s
        self._request_id = request_id
        self._close = close
        super().__init__(self._guarded(), headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            sent_at = time.monotonic()
            async for part in self._parts:
                now = time.monotonic()
                if part or now - sent_at >= self._keep_alive_s:
                    sent_at = now
                    yield part or KEEP_ALIVE
        except Exception as error:
            _, problem = problem_of(error, self._request_id)
            yield b"data: " + ProblemAnswer(error=problem).model_dump_json().encode() + b"\n\n"
            yield DONE
