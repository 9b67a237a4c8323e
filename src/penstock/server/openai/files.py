"""`/v1/files`: the files of batches, put there, listed, read and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse

from penstock.server.kept_files import FileObject, KeptFiles
from penstock.server.problems import Refused
from penstock.server.service import Service

router = APIRouter()
NAME_LENGTH = 255
Limit = Annotated[int, Query(ge=1, le=10_000)]


class Page(BaseModel):
    """One page of a list, as OpenAI's clients ask for it."""

    object: Literal["list"] = "list"
    data: list[Any]
    has_more: bool
    first_id: str | None
    last_id: str | None

    @classmethod
    def of(cls, found: Sequence[Any], after: str | None, limit: int) -> Self:
        begin = next((index + 1 for index, one in enumerate(found) if one.id == after), 0)
        page = found[begin : begin + limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return cls(data=[*page], has_more=begin + limit < len(found), first_id=first, last_id=last)


class FileList(Page):
    data: list[FileObject]


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@router.post("/v1/files")
async def add_file(request: Request) -> FileObject:
    service = Service.of(request, None)
    async with request.form(max_files=1, max_fields=4) as form:
        given, purpose = form.get("file"), form.get("purpose")
        if not isinstance(given, UploadFile):
            raise Refused("The form has no file. Send multipart/form-data with the fields file and purpose.")
        if purpose != "batch":
            raise Refused(f"The purpose is {str(purpose)[:80]!r}; files here are for 'batch' alone.", param="purpose")
        name = (given.filename or "file")[:NAME_LENGTH]
        return await asyncio.to_thread(service.files.add, request.state.sharing_scope, given.file, name, "batch")


@router.get("/v1/files")
async def files(
    request: Request, purpose: str | None = None, after: str | None = None, limit: Limit = 10_000
) -> FileList:
    found = [file for file in _kept(request).listed(request.state.sharing_scope) if purpose in (None, file.purpose)]
    return FileList.of(found, after, limit)


@router.get("/v1/files/{file_id}")
async def file(file_id: str, request: Request) -> FileObject:
    return _kept(request).find(request.state.sharing_scope, file_id)


@router.get("/v1/files/{file_id}/content", response_class=Response)
async def file_content(file_id: str, request: Request) -> Response:
    kept = _kept(request)
    kept.find(request.state.sharing_scope, file_id)
    return FileResponse(kept.path(file_id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request) -> DeletedFile:
    _kept(request).delete(request.state.sharing_scope, file_id)
    return DeletedFile(id=file_id)


def _kept(request: Request) -> KeptFiles:
    return Service.of(request, None).files
