"""The server process: it listens, drains when it is told to end, and exits with 0."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.config import EngineConfig
from penstock.errors import InvalidSetting
from penstock.server.app import make_app
from penstock.server.logs import write_json_lines
from penstock.server.settings import ServerSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How long the step thread may keep Python to itself while a request or a token waits to be handled.
SWITCH_INTERVAL_S = 0.0005


class _Protocol(H11Protocol):
    """Notes when the first bytes of a request arrive, before they are parsed and before its task gets a turn."""

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.app_state = self.app_state | {"arrived_at": time.perf_counter()}
        super().data_received(data)


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


def serve(settings: ServerSettings, config: EngineConfig) -> int:
    """Runs until a signal ends it. Raises what went wrong while the model was loaded."""
    write_json_lines()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return asyncio.run(_serve(settings, config))


async def _serve(settings: ServerSettings, config: EngineConfig) -> int:
    app = make_app(settings, config)
    server = _Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http=_Protocol,
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
    await asyncio.wait({serving, app.state.loading}, return_when=asyncio.FIRST_COMPLETED)
    failure = app.state.loading.exception() if app.state.loading.done() else None
    if failure is not None:
        server.should_exit = True
    else:
        await _announce(app.state.loading, server, settings)
    await serving
    if failure is not None:
        raise failure
    return 0


async def _listen(server: _Server, settings: ServerSettings) -> None:
    try:
        await server.serve()
    except SystemExit:
        raise InvalidSetting(
            f"The server cannot listen on {settings.host}:{settings.port}. Is the port taken? Give --port."
        ) from None


async def _announce(loading: asyncio.Future[None], server: _Server, settings: ServerSettings) -> None:
    if not loading.done() or not server.servers:
        return
    port = server.servers[0].sockets[0].getsockname()[1]
    print(f"Serving {settings.model} at http://{settings.host}:{port}", file=sys.stderr, flush=True)
