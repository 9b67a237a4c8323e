"""The ingress: our gate and routes, prompts read as the replicas will read them, and answers streamed through."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from penstock.cache.prefix import root_hash
from penstock.config import EngineConfig
from penstock.engine.prompts import PromptReader, prompt_reader
from penstock.errors import EngineClosed, PenstockError
from penstock.lanes.table import settle
from penstock.models.files import resolve
from penstock.prompt.render_apart import TemplateApart
from penstock.ray.replica import MAX_UNREAD, ROUTERS, Call
from penstock.ray.routing import FirstTokenRouter
from penstock.route.news import Load, Wanted
from penstock.server import info
from penstock.server.anthropic.asks import MessagesAsk
from penstock.server.app import behind_gate
from penstock.server.openai import batches, files
from penstock.server.openai.asks import CompletionAsk, listed
from penstock.server.openai.chat_asks import ChatAsk
from penstock.server.openai.conversation import prompt_of
from penstock.server.openai.response_asks import ResponseAsk
from penstock.server.problems import Refused
from penstock.server.run import CLIENT_CLOSED_REQUEST, unless_disconnected
from penstock.server.service import Service, forms_of
from penstock.server.settings import ServerSettings
from penstock.server.sse import failure

log = logging.getLogger("penstock.server")

LONGEST = 100_000_000  # tokens of a prompt: its replica knows better
ASKED_S, PAUSE_S = 5.0, 0.05  # for what every replica is asked; between looks at what still runs
TRIES = 3  # of a request whose replica was lost before it had answered anything
LOST = (RayError, RayServeException)
HOP_HEADERS = {b"content-length", b"transfer-encoding", b"connection"}
READS: dict[str, Callable[[Any], ChatAsk | CompletionAsk]] = {
    "/v1/chat/completions": ChatAsk.model_validate,
    "/v1/completions": CompletionAsk.model_validate,
    "/v1/messages": lambda body: MessagesAsk.model_validate(body).as_chat(),
    "/v1/responses": lambda body: ResponseAsk.model_validate(body).as_chat([]),
}


class Front(Service):
    """Stands for the replicas of a model: it reads prompts, and chooses who answers."""

    def __init__(self, settings: ServerSettings, config: EngineConfig, handle: DeploymentHandle) -> None:
        super().__init__(settings, config)
        self._handle = handle
        self._reader: PromptReader | None = None
        self._is_ending = False
        self._open: set[Any] = set()  # answers that are being streamed
        self.beside: list[Front] = [self]  # of the models of this server

    async def load(self) -> None:
        self._reader = await asyncio.to_thread(_reader, self.settings.model, self.config)
        self.forms = await asyncio.to_thread(forms_of, self._reader, self.settings)
        while not self.loads:  # the first call makes the router, the first news fill it
            await self._handle.check_health.remote()
            await asyncio.sleep(0.1)

    @property
    def is_draining(self) -> bool:
        return self._is_ending

    @property
    def is_ready(self) -> bool:
        return self._reader is not None and not self._is_ending and bool(self.loads)

    @property
    def prompts(self) -> PromptReader:
        if self._reader is None:
            raise Refused(f"The model {self.name} is being loaded. Try again soon.", status=503)
        return self._reader

    @cached_property
    def _router(self) -> FirstTokenRouter:
        return ROUTERS[self._handle.deployment_name]

    @property
    def loads(self) -> dict[str, Load]:
        """The last news of each replica."""
        return self._router.loads if self._handle.deployment_name in ROUTERS else {}

    async def drain(self) -> None:
        """Takes no more requests, for any model; what still runs after the time for that ends with an error."""
        for front in self.beside:
            front._is_ending = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout_s):
                while any(front._open for front in self.beside):
                    await asyncio.sleep(PAUSE_S)
        for stream in [stream for front in self.beside for stream in front._open]:
            stream.cancel()

    def wanted(self, path: str, body: Any, scope: str) -> Wanted:
        """Reads a prompt as its replica will; one that cannot be read here goes to the shortest queue."""
        load = next(iter(self.loads.values()), None)
        tokens: Any = []
        with suppress(PenstockError, ValidationError, TypeError, KeyError):
            if path in READS and load is not None:
                ask = READS[path](body)
                if isinstance(ask, CompletionAsk):
                    prompt = listed(ask.prompt)[0]
                    tokens = self.prompts.text_tokens(prompt) if isinstance(prompt, str) else prompt
                else:
                    tokens, _ = prompt_of(self, ask)
        if load is None or not tokens or not isinstance(tokens, list):
            return Wanted(num_tokens=1)
        return Wanted.of(cast("list[int]", tokens), root_hash(load.identity, load.rotary, scope), load.block_size)

    async def each(self, method: str, *given: Any) -> dict[str, Any]:
        """Asks every replica the same; those that do not answer are left out."""
        call = getattr(self._handle, method)
        names = self._router.names
        asked = (asyncio.wait_for(_answer(call.remote(*given, replica=name)), ASKED_S) for name in names)
        found = await asyncio.gather(*asked, return_exceptions=True)
        return {name: one for name, one in zip(names, found, strict=True) if not isinstance(one, BaseException)}

    async def answer(self, request: Request, call: Call, wanted: Wanted, replica: str | None) -> Response:
        """Streams what a replica answers; one that is lost before it answered is replaced by another."""
        begun = await unless_disconnected(request, self._begin(call, wanted, replica))
        if begun is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        start, parts = begun
        response = StreamingResponse(parts, start["status"])
        response.raw_headers = [one for one in start["headers"] if one[0] not in HOP_HEADERS]
        return response

    async def _begin(
        self, call: Call, wanted: Wanted, replica: str | None
    ) -> tuple[Mapping[str, Any], AsyncGenerator[bytes]]:
        if self._is_ending:
            raise EngineClosed("The server is shutting down and takes no more requests.")
        for number in range(TRIES):
            stream = self._handle.options(stream=True).ask.remote(call, wanted=wanted, replica=replica)
            self._open.add(stream)
            try:
                messages = aiter(stream)
                name = await anext(messages)
                start = await anext(messages)
                return start, self._parts(stream, messages, name, call, dict(start["headers"]))
            except LOST as error:
                self._end(stream)
                if number == TRIES - 1 or replica is not None:
                    raise EngineClosed("The replica of this request was lost. Send it again.") from error
                log.warning("a replica was lost; asking another", extra={"request_id": call.id})
            except BaseException:
                self._end(stream)
                raise
        raise AssertionError("the last try raises or returns")

    async def _parts(
        self, stream: Any, messages: AsyncIterator[Any], name: str, call: Call, headers: dict[bytes, bytes]
    ) -> AsyncGenerator[bytes]:
        num_read = 1
        try:
            async for message in messages:
                yield message.get("body", b"")
                num_read += 1
                if num_read >= MAX_UNREAD // 2:
                    self._handle.more.remote(call.key, num_read, replica=name)
                    num_read = 0
        except LOST as error:
            log.warning("a replica was lost in the middle of an answer", extra={"request_id": call.id})
            if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                raise
            lost = EngineClosed("The replica of this request was lost. Send it again.")
            lost.__cause__ = error
            yield failure(lost, call.id, call.path)
        finally:
            self._end(stream)

    def _end(self, stream: Any) -> None:
        stream.cancel()
        self._open.discard(stream)


async def _answer(response: Any) -> Any:
    return await response


def _reader(model: str, config: EngineConfig) -> PromptReader:
    """Makes what reads prompts as the replicas do, from the tokenizer and the chat template alone."""
    here = replace(config, device="cpu", dtype="auto", quantize="auto")  # whatever the replicas have
    place = settle(resolve(model), here, has_cuda=False)
    reader = prompt_reader(place.files, place.lane, LONGEST)
    return reader if reader.template is None else replace(reader, template=TemplateApart(reader.template))


def make_front(fronts: Mapping[str, Front]) -> FastAPI:
    """The app of the ingress. The first model is the one of requests that name none."""
    first = next(iter(fronts.values()))
    first.beside = [*fronts.values()]
    app = behind_gate(first, lambda: asyncio.gather(*(front.load() for front in first.beside)), openapi_url=None)

    @app.get("/load")
    async def loads() -> dict[str, Any]:
        """The last news of every replica, by model."""
        return {name: front.loads for name, front in fronts.items()}

    @app.get("/metrics")
    async def metrics() -> Response:
        texts = [
            (f'model="{name}",replica="{replica}"', text)
            for name, front in fronts.items()
            for replica, text in (await front.each("metrics")).items()
        ]
        return PlainTextResponse(joined_metrics(texts))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        found: list[Any] = []
        for front in fronts.values():
            answer = await front.answer(request, _call(request, b""), Wanted(num_tokens=1), None)
            assert isinstance(answer, StreamingResponse)
            parts = cast("AsyncIterator[bytes]", answer.body_iterator)
            found += json.loads(b"".join([part async for part in parts]))["data"]
        ids = [card["id"] for card in found]
        return JSONResponse(
            {"object": "list", "data": found, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
        )

    app.add_api_route("/health", info.health, methods=["GET", "HEAD"])
    app.add_api_route("/", info.page, methods=["GET", "HEAD"])
    for part in (files, batches):
        app.include_router(part.router)

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def others(path: str, request: Request) -> Response:
        body = await request.body()
        call = _call(request, body)
        try:
            given = json.loads(body) if body else {}
        except ValueError:
            given = {}
        given = given if isinstance(given, dict) else {}
        model = given.get("model", first.name)
        front = next((one for one in fronts.values() if one.is_named(model)), None)
        if front is None:
            raise Refused(f"The model {model!r} is not served here; {', '.join(map(repr, fronts))} are.", status=404)
        replica = request.query_params.get("replica")
        earlier = given.get("previous_response_id")
        if call.path.startswith("/v1/responses/"):
            earlier = call.path.split("/")[3]
        if isinstance(earlier, str):
            for front_of_it in fronts.values():
                held = await front_of_it.each("holds", call.sharing_scope, earlier)
                if replica is None and any(held.values()):
                    front, replica = front_of_it, next(name for name, is_held in held.items() if is_held)
        if replica is not None and replica not in front.loads:
            raise Refused(f"There is no replica {replica[:80]!r}; GET /load names those that there are.", status=404)
        wanted = await asyncio.to_thread(front.wanted, call.path, given, call.sharing_scope)
        return await front.answer(request, call, wanted, replica)

    return app


def _call(request: Request, body: bytes) -> Call:
    state = request.scope["state"]
    return Call(
        id=state["request_id"],
        key=secrets.token_hex(8),
        method=request.method,
        path=request.url.path,
        query=request.scope["query_string"],
        headers=tuple(request.headers.raw),
        body=body,
        sharing_scope=state["sharing_scope"],
    )


def joined_metrics(texts: list[tuple[str, str]]) -> str:
    """Joins what replicas tell, each line with the labels of its own; a metric is described once."""
    heads: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    for labels, text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split()[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
                continue
            name, _, value = line.rpartition(" ")
            name, _, own = name.partition("{")
            own = own.removesuffix("}")
            lines.setdefault(family, []).append(f"{name}{{{labels}{',' if own else ''}{own}}} {value}")
    return "".join(f"{line}\n" for family in heads for line in [*heads[family], *lines.get(family, [])])
