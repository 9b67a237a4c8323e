"""Answers that are streamed as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.server.problems import ANTHROPIC_PATHS, anthropic_problem, problem_of

NOTHING = b""  # given where there is nothing to send
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event(document: Any, name: str | None = None) -> bytes:
    """Writes a document, of plain values or of models with all their fields, as an event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + to_json(document, inf_nan_mode="null") + b"\n\n"


def failure(error: BaseException, request_id: str, path: str = "") -> bytes:
    """Ends a stream in the middle, in the shape of the API that the path is of."""
    status, answer = problem_of(error, request_id)
    if path.startswith(ANTHROPIC_PATHS):
        return event(anthropic_problem(status, answer)[1], "error")
    return event(answer) + DONE


class EventStream(StreamingResponse):
    """Sends what the iterator gives; where it gave nothing for a while, `keep_alive`.

    A failure becomes an event, and however it ends, `close` is called.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        request: Request,
        close: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] = MappingProxyType({}),
        keep_alive: bytes = KEEP_ALIVE,
        failed: Callable[[BaseException, str], bytes] = failure,
    ) -> None:
        self._parts = parts
        self._request = request
        self._close = close
        self._keep_alive = keep_alive
        self._failed = failed
        super().__init__(self._guarded(), headers={**HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            keep_alive_s, sent_at = self._request.app.state.service.settings.keep_alive_s, time.monotonic()
            async for part in self._parts:
                now = time.monotonic()
                if part or now - sent_at >= keep_alive_s:
                    sent_at = now
                    yield part or self._keep_alive
        except Exception as error:
            yield self._failed(error, self._request.scope["state"]["request_id"])
