"""The server process: it listens, drains when it is told to end, and exits with 0."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from penstock.errors import InvalidSetting
from penstock.server.connections import BoundedProtocol, ConnectionLimits
from penstock.server.logs import write_json_lines
from penstock.server.settings import ServerSettings

log = logging.getLogger("penstock.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How long the step thread may keep Python to itself while a request or a token waits to be handled.
SWITCH_INTERVAL_S = 0.0005


class _Server(uvicorn.Server):
    """Ends on a signal after everybody was answered; a second one ends it at once."""

    num_signals = 0

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        self.num_signals += 1
        self.should_exit = True
        self.force_exit = self.num_signals > 1
        service = self.config.app.state.service  # ty: ignore[missing-attribute]
        self.draining = asyncio.ensure_future(service.drain())


def serve(settings: ServerSettings, make: Callable[[], FastAPI]) -> int:
    """Runs the app until a signal ends it. Raises what went wrong while its model was loaded."""
    _refuse_taken(settings)
    write_json_lines()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return asyncio.run(_serve(settings, make))


def _refuse_taken(settings: ServerSettings) -> None:
    """Refuses an address that cannot be listened on before anything is started and logged."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        socket.create_server(found[0][4][:2], family=found[0][0]).close()
    except OSError as error:
        raise _cannot_listen(settings, f": {str(error.strerror).partition(' (')[0]}") from None


def _cannot_listen(settings: ServerSettings, why: str = "") -> InvalidSetting:
    where = f"{settings.host}:{settings.port}"
    return InvalidSetting(f"The server cannot listen on {where}{why}. Give another --port, or another --host.")


async def _serve(settings: ServerSettings, make: Callable[[], FastAPI]) -> int:
    app = make()
    limits = ConnectionLimits.of(settings)
    if limits.most < settings.max_connections:
        log.warning("fewer connections, by the limit on open files", extra={"max_connections": limits.most})
    server = _Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http=partial(BoundedProtocol, settings, limits, deque()),  # ty: ignore[invalid-argument-type]
            ws="none",
            backlog=limits.backlog,
            timeout_keep_alive=settings.header_timeout_s,  # ty: ignore[invalid-argument-type]
            log_config=None,
            access_log=False,
            lifespan="on",
        )
    )
    serving = asyncio.ensure_future(_listen(server, settings))
    while not hasattr(app.state, "loading") and not serving.done():
        await asyncio.sleep(0.01)
    if serving.done():
        await serving
    loading: asyncio.Task[None] = app.state.loading
    await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
    failure = loading.exception() if loading.done() else None
    if failure is not None:
        server.should_exit = True
    elif loading.done() and server.servers:
        port = server.servers[0].sockets[0].getsockname()[1]
        print(f"Serving {settings.served_name} at http://{settings.host}:{port}", file=sys.stderr, flush=True)
    await serving
    if failure is not None:
        raise failure
    return 0


async def _listen(server: _Server, settings: ServerSettings) -> None:
    try:
        await server.serve()
    except SystemExit:
        raise _cannot_listen(settings) from None
