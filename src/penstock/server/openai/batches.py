"""`/v1/batches`: files of requests that the server answers beside everything else."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request

from penstock.server.batch_jobs import BatchJobs, BatchObject, Endpoint
from penstock.server.openai.asks import Ask
from penstock.server.openai.files import Limit, Page

router = APIRouter()


class BatchAsk(Ask):
    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class BatchList(Page):
    data: list[BatchObject]


@router.post("/v1/batches")
async def create_batch(ask: BatchAsk, request: Request) -> BatchObject:
    return await _jobs(request).create(request.state.sharing_scope, ask.input_file_id, ask.endpoint, ask.metadata)


@router.get("/v1/batches")
async def batches(request: Request, after: str | None = None, limit: Limit = 20) -> BatchList:
    return BatchList.of(_jobs(request).listed(request.state.sharing_scope), after, limit)


@router.get("/v1/batches/{batch_id}")
async def batch(batch_id: str, request: Request) -> BatchObject:
    return _jobs(request).find(request.state.sharing_scope, batch_id)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request) -> BatchObject:
    return _jobs(request).cancel(request.state.sharing_scope, batch_id)


def _jobs(request: Request) -> BatchJobs:
    return request.app.state.batches
