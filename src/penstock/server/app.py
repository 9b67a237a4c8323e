"""The app: every route behind the gate, and the model loaded behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from penstock import __version__
from penstock.config import EngineConfig
from penstock.server import info, timeline, tokens
from penstock.server.anthropic import messages
from penstock.server.batch_jobs import BatchJobs
from penstock.server.gate import Gate
from penstock.server.openai import batches, chat, completions, embeddings, files, responses
from penstock.server.problems import add_handlers
from penstock.server.service import Service
from penstock.server.settings import ServerSettings

OPENAI = (chat, completions, responses, embeddings, files, batches)
ROUTERS = [part.router for part in (info, *OPENAI, messages, tokens, timeline)]


def make_app(settings: ServerSettings, config: EngineConfig) -> FastAPI:
    service = Service(settings, config)

    async def load() -> None:
        await service.load()
        jobs.start()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        app.state.loading = asyncio.create_task(load())
        yield
        await jobs.close()
        await service.drain()

    app = FastAPI(title="Penstock", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    jobs = app.state.batches = BatchJobs(app, service, service.folder / "batches", service.files)
    for router in ROUTERS:
        app.include_router(router)
    add_handlers(app)
    allow_origins(app, settings)
    app.add_middleware(Gate, settings=settings)
    return app


def allow_origins(app: FastAPI, settings: ServerSettings) -> None:
    """Lets pages of the origins that the settings name ask."""
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
