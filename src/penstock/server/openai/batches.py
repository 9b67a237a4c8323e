"""`/v1/batches`: files of requests that the server answers beside everything else."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from penstock.server.batch_jobs import BatchJobs, BatchObject, Endpoint
from penstock.server.openai.asks import Ask
from penstock.server.openai.files import Limit, page_of, scope_of

router = APIRouter()


class BatchAsk(Ask):
    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


@router.post("/v1/batches")
async def create_batch(ask: BatchAsk, request: Request) -> BatchObject:
    return await _jobs(request).create(scope_of(request), ask.input_file_id, ask.endpoint, ask.metadata)


@router.get("/v1/batches")
async def batches(request: Request, after: str | None = None, limit: Limit = 20) -> BatchList:
    return BatchList(**page_of(_jobs(request).listed(scope_of(request)), after, limit))


@router.get("/v1/batches/{batch_id}")
async def batch(batch_id: str, request: Request) -> BatchObject:
    return _jobs(request).find(scope_of(request), batch_id)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request) -> BatchObject:
    return _jobs(request).cancel(scope_of(request), batch_id)


def _jobs(request: Request) -> BatchJobs:
    return request.app.state.batches
