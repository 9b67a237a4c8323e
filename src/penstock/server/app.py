"""The app: every route behind the gate, and the model loaded behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from penstock import __version__
from penstock.config import EngineConfig
from penstock.engine.loading import load_model
from penstock.server import info, timeline, tokens
from penstock.server.anthropic import messages
from penstock.server.batch_jobs import BatchJobs
from penstock.server.gate import Gate
from penstock.server.openai import batches, chat, completions, embeddings, files, responses
from penstock.server.problems import add_handlers
from penstock.server.service import Loader, Service
from penstock.server.settings import ServerSettings

OPENAI = (chat, completions, responses, embeddings, files, batches)
ROUTERS = [part.router for part in (info, *OPENAI, messages, tokens, timeline)]


def make_app(settings: ServerSettings, config: EngineConfig, load: Loader = load_model) -> FastAPI:
    service = Service(settings, config, load)
    app = behind_gate(service, service.load)
    for router in ROUTERS:
        app.include_router(router)
    return app


def behind_gate(service: Service, load: Callable[[], Awaitable[Any]], **options: Any) -> FastAPI:
    """Makes an app without routes: it loads and drains with its lifespan, and answers batches beside its requests."""

    async def loading() -> None:
        await load()
        jobs.start()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        app.state.loading = asyncio.create_task(loading())
        yield
        await jobs.close()
        await service.drain()

    options = {"lifespan": lifespan, "docs_url": None, "redoc_url": None} | options
    app = FastAPI(title="Penstock", version=__version__, **options)
    app.state.service = service
    jobs = app.state.batches = BatchJobs(app, service, service.folder / "batches", service.files)
    add_handlers(app)
    if origins := service.settings.cors_origins:  # whose pages may ask
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Gate, settings=service.settings)
    return app
