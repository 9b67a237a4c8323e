"""The service: a model that is loading, ready or draining, and what watches its steps."""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.engine import Engine
from penstock.engine.loading import load_model
from penstock.errors import EngineClosed, PromptTooLong
from penstock.server.board import Board
from penstock.server.metrics import Metrics
from penstock.server.problems import StillLoading, UnknownModel
from penstock.server.settings import ServerSettings
from penstock.server.timeline import Timeline

log = logging.getLogger("penstock.server")


class Service:
    def __init__(self, settings: ServerSettings, config: EngineConfig) -> None:
        self.settings = settings
        self.config = config
        self.started_at = int(time.time())
        self.board = Board()
        self.metrics = Metrics()
        self._draining: asyncio.Task[None] | None = None
        self._engine: AsyncEngine | None = None

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.engine)

    async def load(self) -> None:
        started_at = time.perf_counter()
        engine = await asyncio.to_thread(self._loaded)
        engine.on_plan = self.board.take_plan
        engine.on_step = self.metrics.take_step
        self.metrics.describe(self.settings.model, engine, self.board)
        self._engine = AsyncEngine(engine)
        seconds = round(time.perf_counter() - started_at, 2)
        log.info("ready", extra={"model": self.settings.model, "lane": engine.lane.id, "seconds": seconds})

    @property
    def is_draining(self) -> bool:
        return self._draining is not None

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and not self.is_draining

    @property
    def engine(self) -> AsyncEngine:
        if self._engine is None:
            raise StillLoading(f"The model {self.settings.model} is being loaded. Try again soon.")
        if self.is_draining:
            raise EngineClosed("The server is shutting down and takes no more requests.")
        return self._engine

    def check_model(self, name: str) -> None:
        if name != self.settings.model:
            raise UnknownModel(f"The model {name!r} is not served here; {self.settings.model!r} is.")

    def check_length(self, num_tokens: int) -> None:
        limit = self.settings.max_prompt_tokens
        if limit is not None and num_tokens > limit:
            raise PromptTooLong(f"The prompt has {num_tokens} tokens; the server takes {limit}. Shorten it.")

    async def drain(self) -> None:
        """Nothing new is taken; what runs may end by itself until the time for that is over, and is ended then."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)  # whoever else waits for it, and gives up, does not end it

    async def _drain(self) -> None:
        log.info("draining", extra={"num_running": self.board.num_running, "num_waiting": self.board.num_waiting})
        if self._engine is None:
            return
        closing = asyncio.ensure_future(self._engine.close())
        done, _ = await asyncio.wait({closing}, timeout=self.settings.drain_timeout_s)
        if not done:
            log.warning("ending what still runs", extra={"num_running": self.board.num_running})
            await self._engine.close(drain=False)
        await closing

    def _loaded(self) -> Engine:
        engine = Engine(load_model(self.settings.model, self.config), self.config, trace=self.settings.trace)
        engine.warm_up()
        engine.record()
        return engine
