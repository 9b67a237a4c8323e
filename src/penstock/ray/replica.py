"""`EngineReplica`: the server's own app over its engine, asked by Ray calls in place of connections."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from starlette.types import Message, Scope

from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.ray.scaling import BACKLOG
from penstock.route.news import Wanted
from penstock.server.app import make_app
from penstock.server.inside import http_scope
from penstock.server.process import SWITCH_INTERVAL_S
from penstock.server.service import Service
from penstock.server.settings import ServerSettings

ROUTERS: dict[str, Any] = {}  # of this process, by deployment
MAX_UNREAD = 64  # parts of an answer on their way to a reader; then its request rests


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request on its way to a replica. The gate of the ingress has let it in."""

    id: str  # of the request, which its client may have chosen
    key: str  # of this call, which nobody else has
    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    sharing_scope: str

    @property
    def scope(self) -> Scope:
        headers = [header for header in self.headers if header[0] != b"x-request-id"]
        headers.append((b"x-request-id", self.id.encode()))
        return http_scope(self.method, self.path, headers, self.query, sharing_scope=self.sharing_scope)


class EngineReplica:
    """Answers calls as the server does, and tells Ray its news, its backlog and its health."""

    async def __init__(self, settings: ServerSettings, config: EngineConfig) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._app = make_app(replace(settings, files=None, trace=None, cors_origins=()), config)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        await self._app.state.loading
        self._service: Service = self._app.state.service
        self._name = serve.get_replica_context().replica_id.unique_id
        self._credits: dict[str, asyncio.Semaphore] = {}

    async def ask(
        self, call: Call, *, wanted: Wanted | None = None, replica: str | None = None
    ) -> AsyncGenerator[str | Message]:
        """Yields the name of this replica, then what the app sends. Whoever stops reading cancels the request."""
        credit = self._credits[call.key] = asyncio.Semaphore(MAX_UNREAD)
        sent: asyncio.Queue[Message | BaseException | None] = asyncio.Queue()
        body = [{"type": "http.request", "body": call.body, "more_body": False}]
        has_left = asyncio.Event()

        async def receive() -> Message:
            if body:
                return body.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            await credit.acquire()
            sent.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(call.scope, receive, send)
                sent.put_nowait(None)
            except Exception as error:
                sent.put_nowait(error)

        running = asyncio.ensure_future(run())
        try:
            yield self._name
            while (message := await sent.get()) is not None:
                if isinstance(message, BaseException):
                    raise message
                yield message
        finally:
            has_left.set()
            self._credits.pop(call.key, None)
            credit.release()
            running.cancel()

    async def more(self, key: str, num_read: int, *, replica: str) -> None:
        """Takes note that the reader of an answer has read so many parts."""
        if (credit := self._credits.get(key)) is not None:
            for _ in range(num_read):
                credit.release()

    async def holds(self, scope: str, response_id: str, *, replica: str) -> bool:
        """Tells whether a response is kept here."""
        try:
            self._service.responses.answer(scope, response_id)
        except PenstockError:
            return False
        return True

    async def metrics(self, *, replica: str) -> str:
        return self._service.metrics.text().decode()

    async def record_routing_stats(self) -> dict[str, Any]:
        return (await self._service.news()).model_dump()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {BACKLOG: (await self._service.news()).backlog_s}

    async def check_health(self) -> None:
        """Raises where the engine has broken down: Ray starts another one."""
        await self._service.engine.call(lambda engine: None)

    async def __del__(self) -> None:
        await self._lifespan.__aexit__(None, None, None)
