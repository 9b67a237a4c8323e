"""Errors as clients know them: the shape of OpenAI's, with the id of the request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from penstock.errors import EngineClosed, PenstockError, PromptTooLong, QueueFull

log = logging.getLogger("penstock.server")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CODES: dict[type[PenstockError], str] = {PromptTooLong: "context_length_exceeded", QueueFull: "queue_full"}
RETRY_SOON_S = 1.0


class StillLoading(PenstockError):
    """The model is not there yet."""

    status = 503


class WrongKey(PenstockError):
    """No key came with the request, or another one."""

    status = 401


class BodyTooLarge(PenstockError):
    status = 413


class BodyTooSlow(PenstockError):
    status = 408


class UnknownModel(PenstockError):
    status = 404


class TimedOut(PenstockError):
    """The request took longer than the server allows."""

    status = 504


class NotHonoured(PenstockError):
    """A field would change the answer, and this server does not do what it asks."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Problem(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | None = None


class ProblemAnswer(BaseModel):
    error: Problem


def problem_of(error: BaseException, request_id: str | None) -> tuple[int, Problem]:
    """The status and the body of an error; what is not ours to explain is named and logged, not shown."""
    if not isinstance(error, PenstockError):
        log.error("failed", extra={"request_id": request_id}, exc_info=error)
        message = f"The server failed on this request ({type(error).__name__}). Its log has the details."
        return 500, Problem(message=message, type=TYPES[500], request_id=request_id)
    status = error.status
    return status, Problem(
        message=readable(str(error)),
        type=TYPES.get(status, "invalid_request_error"),
        param=getattr(error, "param", None),
        code=CODES.get(type(error)),
        request_id=request_id,
    )


def problem_response(error: BaseException, request_id: str | None) -> JSONResponse:
    status, problem = problem_of(error, request_id)
    headers: dict[str, str] = {}
    if isinstance(error, (QueueFull, EngineClosed, StillLoading)):
        headers["Retry-After"] = str(round(max(1.0, getattr(error, "retry_after_s", RETRY_SOON_S))))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _response(status, problem, headers)


def _response(status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(ProblemAnswer(error=problem).model_dump(), status, headers)


def _refusal(request: Request, status: int, message: str, param: str | None = None) -> Problem:
    kind = TYPES.get(status, "invalid_request_error")
    return Problem(message=readable(message), type=kind, param=param, request_id=request_id_of(request))


def readable(text: str) -> str:
    """Half characters of a request, which no UTF-8 has, are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def add_handlers(app: FastAPI) -> None:
    @app.exception_handler(PenstockError)
    async def refuse(request: Request, error: PenstockError) -> JSONResponse:
        return problem_response(error, request_id_of(request))

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        return _response(400, _refusal(request, 400, *_first_mistake(error.errors())))

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, PenstockError):  # raised by us while the body was read
            return problem_response(error.__cause__, request_id_of(request))
        message = f"{error.detail}: {request.method} {request.url.path}"
        return _response(error.status_code, _refusal(request, error.status_code, message), error.headers)


def request_id_of(request: Request) -> str | None:
    return request.scope.get("state", {}).get("request_id")


def _first_mistake(errors: Any) -> tuple[str, str | None]:
    """One sentence about the first mistake, and the field that it is in."""
    mistake = errors[0]
    where = ".".join(readable(str(part)) for part in mistake["loc"][1:]) or None
    if mistake["type"] == "json_invalid":
        return "The body is not JSON. Send a JSON object.", None
    if mistake["type"] == "extra_forbidden":
        return f"The field {where!r} is unknown, or not honoured by this server. Leave it out.", where
    what = mistake["msg"].removeprefix("Value error, ").rstrip(".")
    return (f"The field {where!r} is wrong: {what}." if where else f"The body is wrong: {what}."), where
