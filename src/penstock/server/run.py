"""One HTTP request while the engine works on it: its choices, their events and times, and its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.answer.events import AnswerEvent, WrittenAnswer
from penstock.answer.reader import ALL_TEXT, AnswerFormat, AnswerReader
from penstock.engine.async_engine import FEW_UNREAD
from penstock.engine.engine import Event, Prompt
from penstock.errors import EngineClosed, PromptTooLong
from penstock.request import Finished, Output, PrefillProgress, SamplingParams, Token
from penstock.server.openai.answers import PromptProgress, PromptTokensDetails, Usage
from penstock.server.problems import Refused
from penstock.server.service import Service
from penstock.server.sse import KEEP_ALIVE, NOTHING, EventStream, failure

T = TypeVar("T")
PROGRESS_PERIOD_S = 1.0
CLIENT_CLOSED_REQUEST = 499


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer that the request asks for, and what came of it so far."""

    index: int
    prompt: Any  # tokens, or what the engine makes tokens of
    reader: AnswerReader
    news: list[AnswerEvent] = field(default_factory=list[AnswerEvent])  # what its last event brought
    written: WrittenAnswer = field(default_factory=WrittenAnswer)  # what all of them came to
    num_written: int = 0
    last_token_at: float | None = None  # None: it has none
    output: Output | None = None  # None: it has not ended

    def take(self, news: list[AnswerEvent]) -> None:
        self.news = news
        self.written.take(news)


class Shape:
    """How an API tells what comes of a run: in one document, or as server-sent events while it comes."""

    keep_alive: ClassVar[bytes] = KEEP_ALIVE

    def answer(self) -> dict[str, Any]:
        raise NotImplementedError

    def failed(self, error: BaseException, request_id: str) -> bytes:
        """Tells of a failure in the middle of a stream."""
        return failure(error, request_id)

    def begin(self) -> bytes:
        return NOTHING

    def tell(self, choice: Choice | None, event: Event | None) -> bytes:
        """Tells of an event of a choice; both are None when nothing happened for a while."""
        return NOTHING

    def end(self) -> bytes:
        return NOTHING


class Run:
    """Submits the choices of a request together and reads their events; closing cancels what still runs."""

    def __init__(self, service: Service, request: Request) -> None:
        state = request.scope["state"]
        self.request_id: str = state["request_id"]
        self.facts: dict[str, Any] = state.setdefault("facts", {})
        self.arrived_at: float = state["arrived_at"]
        self.sharing_scope: str = state["sharing_scope"]
        self.created = int(time.time())
        self.service = service
        self.engine = service.engine.engine
        self.choices: list[Choice] = []
        self._request = request
        self._headers: dict[str, str] = {}
        self._steps = service.engine
        self._follower = self._steps.follower(self._end_lost)
        self._choice_by_id: dict[int, Choice] = {}
        self._num_open = 0
        self._progress: PrefillProgress | None = None
        self._num_prompt_tokens = 0
        self._is_closed = False

    async def start(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        num_each: int = 1,
        *,
        chunk_size: int | str | None = None,
        priority: int | None = None,
        form: AnswerFormat = ALL_TEXT,
        forks: Sequence[int] = (),
    ) -> None:
        """Submits `num_each` choices for each prompt, each with its own seed; the first leads, others share its prefix.

        Refusals are raised here, before anything was answered.
        """
        settings = self.service.settings
        num_choices, lengths = num_each * len(prompts), [_num_tokens(prompt) for prompt in prompts]
        if num_choices > settings.max_choices:
            raise Refused(f"{num_choices} choices are asked for; {settings.max_choices} is the most.", param="n")
        limit, longest = settings.max_prompt_tokens, max(lengths)
        if limit is not None and longest > limit:
            raise PromptTooLong(f"The prompt has {longest} tokens; the server takes {limit}. Shorten it.")
        prompts = [await self._steps.read(prompt) for prompt in prompts]  # once for all of their choices
        given: dict[str, Any] = {"chunk_size": chunk_size, "priority": priority or 0, "scope": self.sharing_scope}
        given |= {"deadline_s": settings.request_timeout_s, "forks": forks}
        try:
            for index, (prompt, number) in enumerate(product(prompts, range(num_each))):
                seed = None if sampling.seed is None else (sampling.seed + number) % 2**63
                params = replace(sampling, seed=seed)
                request_id = await self._follower.submit(prompt, params=params, **given)
                choice = Choice(index=index, prompt=prompt, reader=AnswerReader(form))
                self._choice_by_id[request_id] = choice
                self.choices.append(choice)
                self.service.board.join(request_id)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self.service.metrics.cancelled.inc()  # the one that was on its way when the client left
            self.close()
            raise
        self._num_open, self._num_prompt_tokens = num_choices, lengths[0]

    def report(self, what: str, values: Sequence[str]) -> None:
        """Tells of what was left out, if anything was, in the log and in a header of the answer."""
        if not values:
            return
        self.facts[what] = list(values)
        self._headers[f"x-penstock-{what.replace('_', '-')}"] = ", ".join(values)

    async def respond(self, shape: Shape, *, is_streamed: bool | None = False) -> Response:
        """Sends the answer as it comes or in one piece. Its end, whatever it is, ends the run."""
        if is_streamed:
            told = {"headers": self._headers, "keep_alive": shape.keep_alive, "failed": shape.failed}
            return EventStream(self._events(shape), self._request, self.close, **told)
        try:
            answer = await unless_disconnected(self._request, self._whole(shape))
        finally:
            self.close()
        if answer is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(answer, headers=self._headers)

    async def _events(self, shape: Shape) -> AsyncIterator[bytes]:
        yield shape.begin()
        while self._num_open:
            told: list[bytes] = []
            for event, at in (found := await self._ready()):
                try:
                    told.append(shape.tell(self._noted(event, at), event))
                except Exception:
                    yield b"".join(told)
                    raise
            yield b"".join(told) if found else shape.tell(None, None)
        yield shape.end()

    async def _whole(self, shape: Shape) -> dict[str, Any]:
        while self._num_open:
            for event, at in await self._ready(FEW_UNREAD):  # nobody waits for single tokens
                self._noted(event, at)
        return shape.answer()

    @property
    def outputs(self) -> list[Output]:
        """Lists the outputs of the choices that have ended, in their order."""
        return [choice.output for choice in self.choices if choice.output is not None]

    def progress(self) -> PromptProgress:
        """Tells the progress of the first choice, as it stands now."""
        first, last = next(iter(self._choice_by_id)), self._progress
        time_ms = (time.perf_counter() - self.arrived_at) * 1e3
        total = last.num_total_estimate if last else self._num_prompt_tokens
        return PromptProgress(
            total=total,
            cached=last.num_cached if last else 0,
            processed=last.num_computed if last else 0,
            time_ms=round(time_ms, 1),
            eta_ms=round(last.eta_s * 1e3, 1) if last else None,
            queue_position=self.service.board.queue_position(first),
        )

    def usage_so_far(self, num_written: int) -> Usage:
        cached = PromptTokensDetails(cached_tokens=self._progress.num_cached if self._progress else 0)
        return Usage.of(num_prompt=self._num_prompt_tokens, cached=cached, num_written=num_written)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._follower.close()
        # Between steps and after the cancellation: no plan names these requests from then on.
        self._steps.post(self._leave)
        outputs = self.outputs
        self.facts |= {
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": outputs[0].num_cached_tokens if outputs else None,
            "completion_tokens": sum(
                len(choice.output.token_ids) if choice.output else choice.num_written for choice in self.choices
            ),
            "finish": outputs[0].finish_reason if outputs else "cancelled",
        }

    def _leave(self) -> None:
        for request_id, choice in self._choice_by_id.items():
            self.service.metrics.end_request(request_id, choice.output, self.service.board.leave(request_id))

    def _end_lost(self, request_id: int) -> None:
        """Forgets a request that was submitted while its client left; it is counted already."""
        self.service.board.leave(request_id)
        self.service.metrics.forget(request_id)

    async def _ready(self, num_events: int = 1) -> list[tuple[Event, float]]:
        """Waits for events of the choices; a second at most, and then for nothing."""
        timeout_s = min(PROGRESS_PERIOD_S, self.service.settings.keep_alive_s)
        return await self._follower.ready(timeout_s, num_events=num_events)

    def _noted(self, event: Event, now: float) -> Choice:
        """Notes an event, and tells whose it is."""
        choice, metrics = self._choice_by_id[event.request_id], self.service.metrics
        if isinstance(event, PrefillProgress) and choice.index == 0:
            self._progress = event
            self._num_prompt_tokens = event.num_total_estimate
        elif isinstance(event, Token):
            before = choice.last_token_at
            metrics.take_token(now - (self.arrived_at if before is None else before), before is None)
            choice.last_token_at = now
            choice.num_written += 1
            choice.take(choice.reader.push(event.text))
        elif isinstance(event, Finished):
            metrics.end_answer(now - self.arrived_at, event.output)
            self._refuse_unfinished(event.output)
            choice.take(choice.reader.end())
            metrics.unread_calls.inc(choice.reader.num_unread)
            choice.output = event.output
            self._num_open -= 1
            if choice.written.calls and _num_tokens(choice.prompt):
                self._pin([*choice.prompt, *event.output.token_ids])
        return choice

    def _pin(self, tokens: list[int]) -> None:
        """The result of a call comes soon, behind these tokens."""
        settings = self.service.settings
        for_s, most, scope = settings.pin_s, settings.max_pinned_bytes, self.sharing_scope
        if for_s:
            self._steps.post(lambda: self.engine.pin(tokens, for_s=for_s, most_bytes=most, scope=scope))

    def _refuse_unfinished(self, output: Output) -> None:
        timeout_s = self.service.settings.request_timeout_s
        if output.finish_reason == "deadline":
            raise Refused(f"The request took longer than {timeout_s} s and was ended.", status=504)
        if output.finish_reason == "abort":
            raise EngineClosed("The server is shutting down and ended this request. Send it again elsewhere.")


def _num_tokens(prompt: Any) -> int:
    """Counts the tokens of a prompt; 0 where it has images, whose tokens the engine counts."""
    return len(prompt) if isinstance(prompt, list) else 0


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work gives; None, with the work cancelled, if the client leaves first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
