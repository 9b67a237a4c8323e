"""The service: a model that is loading, ready or draining, and what watches its steps."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from starlette.requests import Request

from penstock.answer.formats import FORMATS, REASONINGS
from penstock.answer.probe import TemplateForms, probe
from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.engine import Engine
from penstock.engine.loading import LoadedModel, load_model
from penstock.engine.prompts import PromptReader
from penstock.errors import EngineClosed
from penstock.plan.memory import over_budget
from penstock.prompt.render_apart import TemplateApart
from penstock.request import StepPlan, StepResult
from penstock.route.news import Load, LoadMeter
from penstock.server.board import Board
from penstock.server.kept_files import KeptFiles
from penstock.server.metrics import Metrics
from penstock.server.openai.chat_asks import GivenMessage
from penstock.server.openai.stored import StoredResponses
from penstock.server.problems import Refused
from penstock.server.settings import ServerSettings
from penstock.server.turns import fitted, turn_rules

TOLD_AGAIN = 1.01  # a peak above the budget is logged again when it has grown by this
log = logging.getLogger("penstock.server")
Loader = Callable[[str, EngineConfig], LoadedModel]  # of the model that the settings name


class Service:
    def __init__(self, settings: ServerSettings, config: EngineConfig, load: Loader = load_model) -> None:
        self.settings = settings
        self.config = config
        self._load = load
        self.name = settings.served_name
        self.started_at = int(time.time())
        self.board = Board()
        self.metrics = Metrics()
        self.responses = StoredResponses(settings.max_stored_bytes)
        self.threads = StoredResponses(settings.max_stored_bytes, "thread_not_found", "in a new thread")
        self.folder = settings.files or Path(mkdtemp(prefix="penstock-"))
        if settings.files is None:  # it ends with the service
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.files = KeptFiles(self.folder / "files", settings.max_files_bytes)
        self.forms = TemplateForms()
        self._meter = LoadMeter()
        self._draining: asyncio.Task[None] | None = None
        self._engine: AsyncEngine | None = None
        self._template: TemplateApart | None = None
        self._told_bytes = 0  # the last peak above the budget that was logged

    @classmethod
    def of(cls, request: Request, model: str | None) -> Service:
        """Returns the service that a request came to, and refuses a model that it does not serve."""
        service: Service = request.app.state.service
        if model is not None and not service.is_named(model):
            raise Refused(f"The model {model!r} is not served here; {service.name!r} is.", status=404)
        return service

    def is_named(self, model: Any) -> bool:
        """Tells whether clients may ask for it so; what the command line was given may be a path, and is not told."""
        return model in (self.name, *self.settings.aliases, self.settings.model)

    async def load(self) -> None:
        started_at = time.perf_counter()
        engine = await asyncio.to_thread(self._loaded)
        engine.on_plan = self.board.take_plan
        engine.on_step = self._take_step
        self.metrics.describe(self.name, engine, self.board)
        self.forms = await asyncio.to_thread(forms_of, engine.prompts, self.settings)
        self._engine = AsyncEngine(engine)
        seconds = round(time.perf_counter() - started_at, 2)
        log.info("ready", extra={"model": self.name, "lane": engine.lane.id, "seconds": seconds, **self.forms.names})

    @property
    def is_draining(self) -> bool:
        return self._draining is not None

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and not self.is_draining

    @property
    def engine(self) -> AsyncEngine:
        if self._engine is None:
            raise Refused(f"The model {self.name} is being loaded. Try again soon.", status=503)
        if self.is_draining:
            raise EngineClosed("The server is shutting down and takes no more requests.")
        return self._engine

    async def news(self) -> Load:
        """Tells what is cached here, what waits, and what steps take, as it is after the step that runs."""
        return await self.engine.call(self._news)

    def _news(self, engine: Engine) -> Load:
        model = engine.model
        rotary = model.spec.rotary_variant(1)
        return self._meter.load(engine.scheduler, model=self.name, identity=model.identity, rotary=rotary)

    @property
    def prompts(self) -> PromptReader:
        """What makes tokens of texts and of messages."""
        return self.engine.engine.prompts

    async def encoded(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Returns the tokens of texts and of what is tokens already."""
        if not any(isinstance(one, str) for one in prompts):
            return [one for one in prompts if not isinstance(one, str)]
        encode = self.prompts.text_tokens
        return await asyncio.to_thread(lambda: [encode(one) if isinstance(one, str) else one for one in prompts])

    def messages(self, given: Sequence[GivenMessage]) -> list[dict[str, Any]]:
        """Returns messages as the template takes them; an image that is too large is refused."""
        template = self.prompts.template
        as_text = self.forms.takes_arguments_as_text
        found = [message.for_template(self.settings.max_image_bytes, as_text) for message in given]
        return found if template is None else fitted(found, turn_rules(template))

    async def drain(self) -> None:
        """Nothing new is taken; what runs may end by itself until the time for that is over, and is ended then."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)  # whoever else waits for it, and gives up, does not end it

    async def _drain(self) -> None:
        if self._engine is None:
            return
        log.info("draining", extra={"num_running": self.board.num_running, "num_waiting": self.board.num_waiting})
        closing = asyncio.ensure_future(self._engine.close())
        done, _ = await asyncio.wait({closing}, timeout=self.settings.drain_timeout_s)
        if not done:
            log.warning("ending what still runs", extra={"num_running": self.board.num_running})
            await self._engine.close(drain=False)
        await closing
        if self._template is not None:
            self._template.close()

    def _take_step(self, plan: StepPlan, result: StepResult) -> None:
        self.metrics.take_step(plan, result)
        self._meter.take_step(plan, result)
        peak_bytes, over = result.peak_bytes, over_budget(result.peak_bytes, self.config.memory)
        if over and peak_bytes > self._told_bytes * TOLD_AGAIN:
            self._told_bytes = peak_bytes
            log.warning(f"over budget: {over}", extra={"peak_bytes": peak_bytes, "budget_bytes": self.config.memory})

    def _loaded(self) -> Engine:
        model = self._load(self.settings.model, self.config)
        self._template = None if model.chat_template is None else TemplateApart(model.chat_template)
        model = replace(model, name=self.name, chat_template=self._template)
        engine = Engine(model, trace=self.settings.trace)
        engine.warm_up()
        engine.record()
        return engine


def forms_of(reader: PromptReader, settings: ServerSettings) -> TemplateForms:
    """Finds how the model writes calls and reasoning; what the settings say comes before what its template shows."""
    forms = TemplateForms() if reader.template is None else probe(reader.rendered, reader.template.source)
    if settings.tool_parser is not None:
        forms = replace(forms, calls=FORMATS[settings.tool_parser])
    if settings.reasoning_parser is not None:
        forms = replace(forms, reasoning=REASONINGS.get(settings.reasoning_parser))
    return forms
