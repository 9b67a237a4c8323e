"""One HTTP request while the engine works on it: its choices, their events and times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from penstock.engine.engine import Event, Prompt
from penstock.errors import EngineClosed
from penstock.request import Finished, Output, PrefillProgress, Token
from penstock.server.answers import PromptProgress, Usage
from penstock.server.problems import TimedOut
from penstock.server.service import Service
from penstock.server.sse import EventStream

T = TypeVar("T")
PROGRESS_PERIOD_S = 1.0
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer that the request asks for: the prompt, and what the engine is told about it."""

    prompt: Prompt
    settings: dict[str, Any]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event of one choice."""

    choice: int
    event: Event


class Run:
    """Submits the choices of a request together and reads their events; closing cancels what still runs."""

    def __init__(self, service: Service, request: Request, *, priority: int = 0) -> None:
        state = request.scope["state"]
        self.request_id: str = state["request_id"]
        self.facts: dict[str, Any] = state.setdefault("facts", {})
        self.arrived_at: float = state["arrived_at"]
        self.created = int(time.time())
        self.outputs: dict[int, Output] = {}
        self._service = service
        self._priority = priority
        self._engine = service.engine
        self._follower = self._engine.follower(self._end_lost)
        self._choice_by_id: dict[int, int] = {}
        self._last_token_at: dict[int, float] = {}
        self._progress: PrefillProgress | None = None
        self._num_prompt_tokens = 0
        self._is_closed = False

    async def start(self, choices: Sequence[Choice]) -> None:
        """Refusals are raised here, before anything was answered. The first choice leads; others share its prefix."""
        try:
            for index, choice in enumerate(choices):
                settings = choice.settings | {"priority": self._priority}
                timeout_s = self._service.settings.request_timeout_s
                request_id = await self._follower.submit(choice.prompt, deadline_s=timeout_s, **settings)
                self._choice_by_id[request_id] = index
                self._service.board.join(request_id)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._service.metrics.count_cancelled()  # the one that was on its way when the client left
            self.close()
            raise
        self._num_prompt_tokens = choices[0].num_prompt_tokens

    async def happenings(self) -> AsyncIterator[Happening | None]:
        """Events until every choice has ended; None when nothing happened for a while, a second at most."""
        period_s = min(PROGRESS_PERIOD_S, self._service.settings.keep_alive_s)
        while len(self.outputs) < len(self._choice_by_id):
            event = await self._follower.next(period_s)
            if event is None:
                yield None
                continue
            choice = self._choice_by_id[event.request_id]
            self._note(choice, event)
            yield Happening(choice=choice, event=event)

    async def finish(self) -> list[Output]:
        """The outputs of all choices, in their order."""
        async for _ in self.happenings():
            pass
        return self.ordered_outputs

    def streamed(self, events: AsyncIterator[bytes]) -> EventStream:
        """The answer as a stream, whose end, whatever it is, ends the run."""
        keep_alive_s = self._service.settings.keep_alive_s
        return EventStream(events, request_id=self.request_id, keep_alive_s=keep_alive_s, close=self.close)

    @property
    def ordered_outputs(self) -> list[Output]:
        return [self.outputs[index] for index in sorted(self.outputs)]

    def progress(self) -> PromptProgress:
        """Of the first choice, as it stands now."""
        first, last = next(iter(self._choice_by_id)), self._progress
        time_ms = (time.perf_counter() - self.arrived_at) * 1e3
        total = last.num_total_estimate if last else self._num_prompt_tokens
        return PromptProgress(
            total=total,
            cached=last.num_cached if last else 0,
            processed=last.num_computed if last else 0,
            time_ms=round(time_ms, 1),
            eta_ms=round(last.eta_s * 1e3, 1) if last else None,
            queue_position=self._service.board.queue_position(first),
        )

    def usage_so_far(self, num_written: int) -> Usage:
        num_cached = self._progress.num_cached if self._progress else 0
        return Usage.of(num_prompt=self._num_prompt_tokens, num_cached=num_cached, num_written=num_written)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._follower.close()
        # Between steps and after the cancellation: no plan names these requests from then on.
        self._engine.post(self._leave)
        outputs = self.ordered_outputs
        self.facts |= {
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": outputs[0].num_cached_tokens if outputs else None,
            "completion_tokens": sum(len(output.token_ids) for output in outputs),
            "finish": outputs[0].finish_reason if outputs else "cancelled",
        }

    def _leave(self) -> None:
        service = self._service
        for request_id, choice in self._choice_by_id.items():
            output = self.outputs.get(choice)
            service.metrics.end_request(request_id, output, service.board.leave(request_id))

    def _end_lost(self, request_id: int) -> None:
        """The client left while this one was submitted; it is counted already."""
        self._service.board.leave(request_id)
        self._service.metrics.forget(request_id)

    def _note(self, choice: int, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, PrefillProgress) and choice == 0:
            self._progress = event
            self._num_prompt_tokens = event.num_total_estimate
        elif isinstance(event, Token):
            before = self._last_token_at.get(choice)
            self._service.metrics.take_token(now - (self.arrived_at if before is None else before), before is None)
            self._last_token_at[choice] = now
        elif isinstance(event, Finished):
            self._service.metrics.end_answer(now - self.arrived_at, event.output)
            self._refuse_unfinished(event.output)
            self.outputs[choice] = event.output

    def _refuse_unfinished(self, output: Output) -> None:
        if output.finish_reason == "deadline":
            raise TimedOut(f"The request took longer than {self._service.settings.request_timeout_s} s and was ended.")
        if output.finish_reason == "abort":
            raise EngineClosed("The server is shutting down and ended this request. Send it again elsewhere.")


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
