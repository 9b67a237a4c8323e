"""What every request passes: an id, the key, the size of its body, and a line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.problems import BodyTooLarge, BodyTooSlow, WrongKey, problem_response
from penstock.server.settings import ServerSettings

log = logging.getLogger("penstock.server")

OPEN_PATHS = frozenset({"/health", "/"})  # the page holds nothing secret; what it asks for needs the key
_CLIENT_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Gate:
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max_body_bytes = settings.max_body_bytes
        self._body_timeout_s = settings.body_timeout_s
        self._key_digests = [_digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = _request_id(headers)
        state.setdefault("arrived_at", time.perf_counter())
        visit = _Visit(send, request_id)
        try:
            self._check(scope["path"], scope["method"], headers)
            await self._app(scope, self._bounded(receive), visit.send)
        except Exception as error:
            if visit.status is not None:
                raise
            await problem_response(error, request_id)(scope, receive, visit.send)
        finally:
            _write_log(scope, state, visit.status)

    def _check(self, path: str, method: str, headers: Headers) -> None:
        if self._key_digests and path not in OPEN_PATHS and method != "OPTIONS":
            self._check_key(headers.get("authorization", ""))
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise self._too_large()

    def _check_key(self, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        # Every key is compared, each in constant time: nothing is learned from how long it takes.
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise WrongKey("The API key is missing or wrong. Send the header 'Authorization: Bearer KEY'.")

    def _bounded(self, receive: Receive) -> Receive:
        num_received, is_whole = 0, False

        async def bounded() -> Message:
            nonlocal num_received, is_whole
            try:
                async with asyncio.timeout(None if is_whole else self._body_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise BodyTooSlow(f"Nothing of the body came for {self._body_timeout_s:.0f} s.") from None
            num_received += len(message.get("body", b""))
            is_whole = is_whole or not message.get("more_body", False)
            if num_received > self._max_body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body is larger than {self._max_body_bytes:,} bytes, the most that is taken.")


class _Visit:
    """The answer on its way out: its status is kept, and the id goes with it."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.status: int | None = None
        self._send = send
        self._request_id = request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        await self._send(message)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _request_id(headers: Headers) -> str:
    """The client's own, where it is a plain word; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def _write_log(scope: Scope, state: dict, status: int | None) -> None:
    if scope["path"] in ("/health", "/metrics"):
        return
    facts = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "duration_ms": round((time.perf_counter() - state["arrived_at"]) * 1e3, 1),
        **state.get("facts", {}),
    }
    log.info("request", extra=facts)
