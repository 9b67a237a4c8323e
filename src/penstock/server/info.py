"""What runs here, and how it is: health, version, models, metrics, and the page that shows it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import JSONResponse

from penstock import __version__
from penstock.route.news import Load
from penstock.server.service import Service

router = APIRouter()

# One static file with a timeline and a playground; it loads nothing from elsewhere.
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Health(BaseModel):
    status: Literal["ok", "loading", "draining"]


class Version(BaseModel):
    version: str


class ModelCard(BaseModel):
    """Describes a model to clients of OpenAI's API, and in its last fields to those of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    max_model_len: int
    lane: str
    adapter: str | None  # merged into the weights
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=Health, responses={503: {"model": Health}})
async def health(request: Request) -> Response:
    service: Service = request.app.state.service
    if service.is_ready:
        return JSONResponse({"status": "ok"})
    status = "draining" if service.is_draining else "loading"
    return JSONResponse({"status": status}, 503, {"Retry-After": "1"})


@router.get("/version")
async def version() -> Version:
    return Version(version=__version__)


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    service = Service.of(request, None)
    cards = [_card(service, name) for name in (service.name, *service.settings.aliases)]
    return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> ModelCard:
    service = Service.of(request, name)
    return _card(service, name if name in service.settings.aliases else service.name)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Any:
    return Response(request.app.state.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/load")
async def load(request: Request) -> Load:
    """What a router has to know to predict when a prompt would have its first token here."""
    return await Service.of(request, None).news()


@router.head("/", include_in_schema=False)  # by which some agents see whether anybody is there
@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> HTMLResponse:
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)


def _card(service: Service, name: str) -> ModelCard:
    engine = service.engine.engine
    return ModelCard(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(service.started_at, UTC),
        created=service.started_at,
        max_model_len=engine.scheduler.capacity,
        lane=engine.lane.id,
        adapter=engine.model.adapter,
    )
