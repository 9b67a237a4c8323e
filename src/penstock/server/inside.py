"""Asks the app from inside its process: what a route answers, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Scope

HOST = "localhost"
SCOPE = "penstock.sharing_scope"  # in a request's scope, where no connection can put it


async def post_inside(
    app: ASGIApp, path: str, body: bytes, request_id: str, *, sharing_scope: str = ""
) -> tuple[int, bytes]:
    """Posts a JSON body without a key; returns (status, body). Cancelling it cancels the request.

    `sharing_scope`: whose prefixes it may find.
    """
    headers = {"host": HOST, "content-type": "application/json", "x-request-id": request_id}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = http_scope("POST", path, encoded, sharing_scope=sharing_scope)
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 0, []

    async def receive() -> Message:
        return sent.pop() if sent else await asyncio.Future()  # the asker never leaves by itself

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


def http_scope(
    method: str, path: str, headers: Sequence[tuple[bytes, bytes]], query: bytes = b"", *, sharing_scope: str
) -> Scope:
    """Makes what an app is told of a request that comes by no connection."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": [*headers],
        "client": None,
        "server": (HOST, 0),
        SCOPE: sharing_scope,
    }
