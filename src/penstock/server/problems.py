"""Errors as clients know them: the shape of OpenAI's, with the id of the request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from penstock.errors import PenstockError, PromptTooLong, QueueFull

T = TypeVar("T")
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
CODES: dict[type[BaseException], str] = {PromptTooLong: "context_length_exceeded", QueueFull: "queue_full"}
RETRY_SOON_S = 1.0


class Refused(PenstockError):
    """What only a server refuses, with the HTTP status that says so and the field that it is about.

    `code`: by which clients know it. `is_last`: nothing more is read from the connection.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {"Connection": "close"} if is_last else {}


class Problem(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | None = None


class ProblemAnswer(BaseModel):
    error: Problem


class AnthropicError(BaseModel):
    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicProblem(BaseModel):
    """Tells of an error in the shape of Anthropic's."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str | None = None


ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_TYPES = TYPES | {413: "request_too_large", 500: "api_error", 529: "overloaded_error"}


def problem_of(error: BaseException, request_id: str | None) -> tuple[int, ProblemAnswer]:
    """The status and the body of an error; what is not ours to explain is named and logged, not shown."""
    status, param = 500, getattr(error, "param", None)
    if isinstance(error, PenstockError):
        status, message = error.status, str(error)
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, RequestValidationError):
        status, (message, param) = 400, _first_mistake(error.errors())
    else:
        log.error("failed", extra={"request_id": request_id}, exc_info=error)
        message = f"The server failed on this request ({type(error).__name__}). Its log has the details."
    kind = TYPES.get(status, "invalid_request_error")
    code = error.code if isinstance(error, Refused) else CODES.get(type(error))
    problem = Problem(message=readable(message), type=kind, param=param, code=code, request_id=request_id)
    return status, ProblemAnswer(error=problem)


def anthropic_problem(status: int, answer: ProblemAnswer) -> tuple[int, AnthropicProblem]:
    """Tells an error as Anthropic does; by these words agents learn that a prompt is too long, and shorten it."""
    problem = answer.error
    if problem.code == CODES[PromptTooLong]:
        status, message = 400, f"prompt is too long: {problem.message}"
    else:
        status, message = (529 if status == 503 else status), problem.message
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
    details = None if problem.code is None else {"error_code": problem.code}
    told = AnthropicError(type=kind, message=message, details=details)
    return status, AnthropicProblem(error=told, request_id=problem.request_id)


def problem_response(error: BaseException, request_id: str | None, path: str = "") -> JSONResponse:
    status, answer = problem_of(error, request_id)
    headers: dict[str, str] = dict(getattr(error, "headers", None) or {})
    if isinstance(error, PenstockError) and status in (429, 503):
        headers["Retry-After"] = str(round(max(1.0, getattr(error, "retry_after_s", RETRY_SOON_S))))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if path.startswith(ANTHROPIC_PATHS):
        status, told = anthropic_problem(status, answer)
        return JSONResponse(told.model_dump(), status, headers)
    return JSONResponse(answer.model_dump(), status, headers)


def readable(text: str) -> str:
    """Half characters of a request, which no UTF-8 has, are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def add_handlers(app: FastAPI) -> None:
    async def refuse(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            if isinstance(error.__cause__, PenstockError):  # raised by us while the body was read
                error = error.__cause__
            else:
                error.detail = f"{error.detail}: {request.method} {request.url.path}"
        return problem_response(error, request.scope.get("state", {}).get("request_id"), request.url.path)

    for kind in (PenstockError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refuse)


def as_asked(made: Callable[[], T]) -> T:
    """Returns what is made of a request that was read; a mistake that shows only then is refused as one of the body."""
    try:
        return made()
    except ValidationError as error:
        raise Refused(error.errors()[0]["msg"].removeprefix("Value error, ") + ".") from None


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
