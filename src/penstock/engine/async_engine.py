"""The engine behind asyncio: one thread runs the steps, and many tasks follow their requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from penstock.config import DEFAULT_MODEL
from penstock.engine.engine import Engine, Event, Prompt
from penstock.errors import EngineClosed
from penstock.request import Failed, Finished, Output

# Events that a slow reader may leave unread before its request rests, and where it goes on.
MOST_UNREAD, FEW_UNREAD = 256, 64


class _Reader:
    """The events of one request on their way from the step thread to the task that reads them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self.is_paused = False
        self._loop = loop

    def put(self, event: Event | BaseException) -> None:
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class AsyncEngine:
    """Every call of the engine happens in the step thread, between two steps; nothing here needs a lock on it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._readers: dict[int, _Reader] = {}
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._wakes = threading.Condition()
        self._is_closing = False
        self._is_draining = False
        self._thread = threading.Thread(target=self._run, name="penstock-steps", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, model: str = DEFAULT_MODEL, **settings: Any) -> AsyncEngine:
        return cls(Engine.load(model, **settings))

    async def stream(self, prompt: Prompt, **sampling: Any) -> AsyncIterator[Event]:
        """Progress, tokens and the end of one request. Leaving the iterator, or cancelling its task, cancels it."""
        reader = _Reader(asyncio.get_running_loop())

        def submit() -> int:
            if self._is_draining:
                raise EngineClosed("The engine is shutting down and takes no more requests.")
            request_id = self.engine.submit(prompt, **sampling)
            self._readers[request_id] = reader
            return request_id

        # Shielded: a submission that happens while its task is cancelled must still be found and aborted.
        submission = asyncio.ensure_future(asyncio.wrap_future(self._call(submit)))
        try:
            request_id = await asyncio.shield(submission)
        except asyncio.CancelledError:
            submission.add_done_callback(lambda done: self._forget(done.result()) if not done.exception() else None)
            raise
        try:
            while True:
                event = await reader.events.get()
                if isinstance(event, BaseException):
                    raise event
                if reader.is_paused and reader.events.qsize() <= FEW_UNREAD:
                    self._call(lambda: self._pause(request_id, reader, is_paused=False))
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._forget(request_id)

    async def generate(self, prompt: Prompt, **sampling: Any) -> Output:
        async for event in self.stream(prompt, **sampling):
            if isinstance(event, Finished):
                return event.output
        raise AssertionError("a stream ends with Finished")

    async def close(self, *, drain: bool = True) -> None:
        """Refuses new requests, finishes what runs (or ends it, without `drain`), and gives the memory back."""
        with self._wakes:
            self._is_draining = True
            self._is_closing = not drain
            self._wakes.notify()
        await asyncio.to_thread(self._thread.join)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Runs `function` on the engine between two steps: plans, statistics, cache resets."""
        return await asyncio.wrap_future(self._call(lambda: function(self.engine)))

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wakes:
            if self._is_draining and not self._thread.is_alive():
                future.set_exception(EngineClosed("The engine is closed. Start it again."))
                return future
            self._calls.append((function, future))
            self._wakes.notify()
        return future

    def _forget(self, request_id: int) -> None:
        """Ends the request if it still runs; takes effect within one chunk."""

        def forget() -> None:
            self._readers.pop(request_id, None)
            self.engine.abort(request_id)

        self._call(forget)

    def _run(self) -> None:
        while self._wait_for_work():
            self._make_calls()
            if self._is_closing:
                for request_id in list(self._readers):
                    self.engine.abort(request_id)
            try:
                events = self.engine.step()
            except Exception as error:  # the readers learn of it; the engine can go on
                self._fail_all(error)
                continue
            for event in events:
                self._hand_out(event)
        self._make_calls()
        self.engine.close()

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when closing and nothing is left."""
        with self._wakes:
            while not self._calls and not self._can_step():
                if self._is_draining and not self.engine.scheduler.has_work:
                    return False
                # A paused request wakes us with a call; while draining, look again for one that has ended.
                self._wakes.wait(timeout=0.05 if self._is_draining else None)
        return True

    def _can_step(self) -> bool:
        return any(not sequence.is_paused for sequence in self.engine.scheduler.sequences.values())

    def _make_calls(self) -> None:
        with self._wakes:
            calls, self._calls = self._calls, []
        for function, future in calls:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def _hand_out(self, event: Event) -> None:
        reader = self._readers.get(event.request_id)
        if reader is None:
            return
        reader.put(event.error if isinstance(event, Failed) else event)
        if isinstance(event, (Failed, Finished)):
            del self._readers[event.request_id]
        elif not reader.is_paused and reader.events.qsize() >= MOST_UNREAD:
            self._pause(event.request_id, reader, is_paused=True)

    def _pause(self, request_id: int, reader: _Reader, *, is_paused: bool) -> None:
        reader.is_paused = is_paused
        self.engine.scheduler.pause(request_id, is_paused=is_paused)

    def _fail_all(self, error: Exception) -> None:
        """A step failed: the requests in it cannot be trusted to go on."""
        for request_id, reader in list(self._readers.items()):
            reader.put(error)
            self.engine.abort(request_id)
        self._readers.clear()
