"""What every request passes: an id, the key, where it comes from, the size of its body, and a line in the log."""

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

from penstock.server.bodies import BodyMeter
from penstock.server.inside import SCOPE
from penstock.server.pages import JSON, MULTIPART, OwnPages
from penstock.server.problems import Refused, problem_response
from penstock.server.settings import ServerSettings

log = logging.getLogger("penstock.server")

OPEN_PATHS = frozenset({"/health", "/"})  # the page holds nothing secret; what it asks for needs the key
FILES_PATH = "/v1/files"
_CLIENT_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Gate:
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max_body_bytes = settings.max_body_bytes
        self._max_file_bytes = settings.max_files_bytes
        self._body_timeout_s = settings.body_timeout_s
        self._whole_body_timeout_s = settings.whole_body_timeout_s
        self._key_digests = [_digest(key) for key in settings.api_keys]
        self._keeps_keys_apart = len(set(self._key_digests)) > 1 and not settings.share_prefixes
        self._takes_preflights = bool(settings.cors_origins)
        self._pages = OwnPages(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = _request_id(headers)
        state.setdefault("arrived_at", time.perf_counter())
        inside: str | None = scope.get(SCOPE)
        # Whose prefixes a request may find: everybody's, or those of its own key.
        own = _digest(_key(headers)).hex() if self._keeps_keys_apart else ""
        state["sharing_scope"] = own if inside is None else inside
        status: int | None = None

        async def answer(message: Message) -> None:
            """Sends the answer on its way out: its status is kept, and the id goes with it."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            meter = self._meter(scope["path"])
            if inside is None:
                self._check(scope["path"], scope["method"], headers, meter)
            await self._app(scope, self._bounded(receive, meter), answer)
        except Exception as error:
            if status is not None:
                raise
            await problem_response(error, request_id, scope["path"])(scope, receive, answer)
        finally:
            _write_log(scope, state, status)

    def _meter(self, path: str) -> BodyMeter:
        """Makes the limit of a body: a file is put away as it is, everything else is parsed."""
        if path == FILES_PATH:
            return BodyMeter(self._max_file_bytes, is_parsed=False)
        return BodyMeter(self._max_body_bytes)

    def _check(self, path: str, method: str, headers: Headers, meter: BodyMeter) -> None:
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy that believes the other one has read another request than the one that ends here.
            message = "The body has two lengths. Send either Content-Length or Transfer-Encoding."
            raise Refused(message, is_last=True)
        if not self._key_digests:  # a key is what no page of another site has
            self._pages.check_host(headers)
            self._pages.check_sender(method, headers, MULTIPART if path == FILES_PATH else JSON)
        elif path not in OPEN_PATHS and not self._is_preflight(method, headers):
            self._check_key(headers)
        length = headers.get("content-length", "")
        if length.isdecimal():
            meter.refuse_size(int(length))

    def _is_preflight(self, method: str, headers: Headers) -> bool:
        """Tells a browser's question about CORS, which brings no key and is answered alike for every path."""
        asks = method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
        return asks and self._takes_preflights

    def _check_key(self, headers: Headers) -> None:
        digest = _digest(_key(headers))
        # Every key is compared, each in constant time: nothing is learned from how long it takes.
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if not any(matches):
            message = "The API key is missing or wrong. Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise Refused(message, status=401)

    def _bounded(self, receive: Receive, meter: BodyMeter) -> Receive:
        is_whole = False
        now = asyncio.get_running_loop().time
        ends_at = now() + self._whole_body_timeout_s

        async def bounded() -> Message:
            nonlocal is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else min(now() + self._body_timeout_s, ends_at)):
                    message = await receive()
            except TimeoutError:
                late = f"The body was not whole after {self._whole_body_timeout_s:g} s."
                paused = f"Nothing of the body came for {self._body_timeout_s:g} s."
                raise Refused(late if now() >= ends_at else paused, status=408) from None
            is_whole = is_whole or not message.get("more_body", False)
            meter.take(message.get("body", b""))
            return message

        return bounded


def _key(headers: Headers) -> str:
    """Reads the key that a request brings, as OpenAI's clients send it or Anthropic's; empty where it brings none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


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
