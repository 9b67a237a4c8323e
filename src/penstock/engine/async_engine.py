"""The engine behind asyncio: one thread runs the steps, and many tasks follow their requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any

from penstock.config import DEFAULT_MODEL
from penstock.engine.engine import Engine, Event, Prompt
from penstock.engine.feed import TokenFeed
from penstock.errors import EngineClosed
from penstock.lanes.lane import Asked
from penstock.request import Failed, Finished, Output

# Events that a slow reader may leave unread before its request rests, and where it goes on.
MAX_UNREAD, FEW_UNREAD = 256, 64
# While every request rests: nobody calls when an event loop is closed.
LONGEST_REST_S = 1.0
IDLE_S = 3.0  # after which the memory that nobody uses is given back


class Follower:
    """Requests of one asker: their events on the way from the step thread to the task that reads them."""

    def __init__(self, engine: AsyncEngine, on_lost: Callable[[int], None]) -> None:
        self._engine = engine
        self._on_lost = on_lost
        self.loop = asyncio.get_running_loop()
        self._heard: deque[tuple[Event | BaseException, float]] = deque()
        self._waiter: asyncio.Future[None] | None = None  # None: nobody waits
        self._num_awaited = 1
        self._open: set[int] = set()
        self.paused: set[int] = set()
        self.num_put = 0  # counted by the step thread; what was read, by the event loop
        self._num_read = 0

    async def submit(self, prompt: Prompt, **settings: Any) -> int:
        """One more request to follow; refusals are raised here."""
        # Shielded: a submission that happens while its task is cancelled must still be found and aborted.
        submission = asyncio.ensure_future(self._engine.begin(self, prompt, settings))
        try:
            request_id = await asyncio.shield(submission)
        except asyncio.CancelledError:
            submission.add_done_callback(self._lose)
            raise
        self._open.add(request_id)
        return request_id

    def _lose(self, submission: asyncio.Future[int]) -> None:
        if submission.cancelled() or submission.exception():
            return
        request_id = submission.result()
        self._engine.forget(request_id)
        self._engine.post(lambda: self._on_lost(request_id))

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """What happens next; None if nothing does in that time. A failure is raised."""
        found = await self.ready(timeout_s, most=1)
        return found[0][0] if found else None

    async def ready(
        self, timeout_s: float | None = None, *, num_events: int = 1, most: int | None = None
    ) -> list[tuple[Event, float]]:
        """Waits for so many events, or for one that ends a request; gives what has come by then, with the time of each.

        It is nothing where nothing happens in that time. A failure is raised once all before it was given.
        """
        if len(self._heard) < num_events and not (self._heard and _is_end(self._heard[-1][0])):
            await self._wait(timeout_s, num_events)
        found: list[tuple[Event, float]] = []
        while self._heard and len(found) != most:
            event, at = self._heard[0]
            if isinstance(event, BaseException):
                if found:
                    break
                raise event
            self._heard.popleft()
            found.append((event, at))
            if isinstance(event, Finished):
                self._open.discard(event.request_id)
        self._num_read += len(found)
        if self.paused and self.num_unread <= FEW_UNREAD:
            self._engine.resume(self)
        return found

    async def _wait(self, timeout_s: float | None, num_events: int) -> None:
        waiter = self._waiter = self.loop.create_future()
        self._num_awaited = num_events
        timer = None if timeout_s is None else self.loop.call_later(timeout_s, self._wake)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Ends what still runs; takes effect within one chunk."""
        while self._open:
            self._engine.forget(self._open.pop())

    @property
    def num_unread(self) -> int:
        return self.num_put - self._num_read

    @property
    def is_gone(self) -> bool:
        """Its event loop is closed: nobody will read."""
        return self.loop.is_closed()

    def hear(self, event: Event | BaseException, at: float) -> None:
        """Takes what the step thread told the event loop."""
        self._heard.append((event, at))
        if len(self._heard) >= self._num_awaited or _is_end(event):
            self._wake()


Told = list[tuple[Follower, Event | BaseException]]


def _is_end(event: Event | BaseException) -> bool:
    return isinstance(event, (Finished, BaseException))


def _deliver(told: Told) -> None:
    at = time.perf_counter()
    for follower, event in told:
        follower.hear(event, at)


class AsyncEngine:
    """Every call of the engine happens in the step thread, between two steps; nothing here needs a lock on it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        engine.on_layer = lambda progress: self._hand_out([progress])
        self._readers: dict[int, Follower] = {}
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._wakes = threading.Condition()
        # Grammars one after the other: many hard ones leave threads and cores to others.
        self._proving = ThreadPoolExecutor(1, "penstock-proofs")
        self._compiling = ThreadPoolExecutor(1, "penstock-grammars")
        self._reading = ThreadPoolExecutor(1, "penstock-images")
        self._is_closing = False
        self._is_draining = False
        self._is_full = True  # of memory that could be given back
        self._end: str | None = None  # why calls are made no more; None: they are
        self._thread = threading.Thread(target=self._run, name="penstock-steps", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, model: str = DEFAULT_MODEL, **settings: Any) -> AsyncEngine:
        """Loads a model as `Engine.load` does."""
        return cls(Engine.load(model, **settings))

    def follower(self, on_lost: Callable[[int], None] = lambda _: None) -> Follower:
        """Follows one request or several together; close it when done.

        `on_lost` is called, by the step thread, with a request whose asker left while it was submitted.
        """
        return Follower(self, on_lost)

    async def stream(self, prompt: Prompt, **sampling: Any) -> AsyncIterator[Event]:
        """Progress, tokens and the end of one request. Leaving the iterator, or cancelling its task, cancels it."""
        follower = self.follower()
        await follower.submit(prompt, **sampling)
        try:
            while (event := await follower.next()) is not None:
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            follower.close()

    async def generate(self, prompt: Prompt, **sampling: Any) -> Output:
        """Runs one request to its end, beside all others."""
        async for event in self.stream(prompt, **sampling):
            if isinstance(event, Finished):
                return event.output
        raise AssertionError("a stream ends with Finished")

    async def close(self, *, drain: bool = True) -> None:
        """Refuses new requests, finishes what runs (or ends it, without `drain`), and gives the memory back."""
        with self._wakes:
            self._is_draining = True
            self._is_closing |= not drain
            self._wakes.notify()
        await asyncio.to_thread(self._thread.join)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Runs `function` on the engine between two steps: plans, statistics, cache resets."""
        return await asyncio.wrap_future(self._call(lambda: function(self.engine)))

    async def num_tokens(self, prompt: Prompt) -> int:
        """Counts as `Engine.num_tokens` does, beside the steps."""
        return await self._beside(self._reading, self.engine.num_tokens, prompt)

    async def read(self, prompt: Prompt, **given: Any) -> Prompt:
        """Opens and scales the images of a prompt beside the steps, in which a large one would take seconds."""
        is_ready = isinstance(prompt, (Asked, TokenFeed)) or not prompt or isinstance(prompt[0], int)
        if is_ready or not self.engine.lane.reads_images:
            return prompt
        return await self._beside(self._reading, partial(self.engine.read, prompt, **given))

    async def _beside(self, threads: ThreadPoolExecutor, function: Callable[..., Any], *values: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, function, *values)

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wakes:
            if self._end is not None:
                future.set_exception(EngineClosed(self._end))
                return future
            self._calls.append((function, future))
            self._wakes.notify()
        return future

    async def begin(self, follower: Follower, prompt: Prompt, settings: dict[str, Any]) -> int:
        params = settings.get("params")
        grammar = settings.get("grammar") if params is None else params.grammar
        if grammar is not None:
            # A large one takes a second, in which steps go on; kept here until the engine has found it.
            grammars = self.engine.grammars
            if not grammars.proof.knows(grammar):  # those that are known do not wait for those that are tried
                await self._beside(self._proving, grammars.proof.require, grammar)
            _compiled = await self._beside(self._compiling, grammars.compiled, grammar)
        given = {name: settings[name] for name in ("images", "answer_start") if name in settings}
        read = await self.read(prompt, **given)
        if read is not prompt:
            prompt, settings = read, {name: value for name, value in settings.items() if name not in given}

        def submit() -> int:
            if self._end is not None:
                raise EngineClosed(self._end)
            if self._is_draining:
                raise EngineClosed("The engine is shutting down and takes no more requests.")
            request_id = self.engine.submit(prompt, **settings)
            self._readers[request_id] = follower
            self._is_full = True
            return request_id

        return await asyncio.wrap_future(self._call(submit))

    def forget(self, request_id: int) -> None:
        """Ends the request if it still runs; takes effect within one chunk, or one layer of a chunk in tiles."""
        self.engine.cancel(request_id)

        def forget() -> None:
            self._readers.pop(request_id, None)
            self.engine.abort(request_id)

        self._call(forget)

    def post(self, function: Callable[[], Any]) -> None:
        """Runs `function` between two steps, after everything that was asked before; at once when no step comes."""
        with self._wakes:
            is_over = self._end is not None
            if not is_over:
                self._calls.append((function, Future()))
                self._wakes.notify()
        if is_over:
            function()

    def resume(self, follower: Follower) -> None:
        """The follower has read most of what waited for it."""
        self._call(lambda: self._resume(follower))

    def _resume(self, follower: Follower) -> None:
        while follower.paused:
            self.engine.scheduler.pause(follower.paused.pop(), is_paused=False)

    def _run(self) -> None:
        end = "The engine is closed. Start it again."
        try:
            while self._wait_for_work():
                self._make_calls()
                self._advance()
        except BaseException as error:
            end = f"The engine has broken down: {error!r}. Start it again."
            raise
        finally:  # however it ended, nobody waits for this thread any more
            with self._wakes:
                self._end = end
            self._make_calls()
            self._tell([(reader, EngineClosed(end)) for reader in self._readers.values()])
            self.engine.grammars.proof.close()
            self.engine.close()

    def _advance(self) -> None:
        try:
            for request_id, reader in list(self._readers.items()):
                if self._is_closing or reader.is_gone:
                    self.engine.abort(request_id)
            events = self.engine.step()
        except Exception as error:  # the readers learn of it; the engine can go on
            self._fail_all(error)
            return
        self._hand_out(events)

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when closing and nothing is left."""
        scheduler = self.engine.scheduler
        with self._wakes:
            while not self._calls:
                if self._is_closing:  # what nobody follows is ended with the engine
                    return scheduler.has_work and bool(self._readers)
                if self._is_draining and not scheduler.has_work:
                    return False
                rest_s = self._rest_s()
                if rest_s == 0:
                    return True
                if not self._wakes.wait(timeout=rest_s) and not scheduler.sequences:
                    self._is_full = False
                    self._wakes.release()  # whoever calls meanwhile does not wait for it
                    self.engine.give_back()
                    self._wakes.acquire()
        return True

    def _rest_s(self) -> float | None:
        """How long nothing can be done unless somebody calls; None: for ever."""
        sequences = self.engine.scheduler.sequences.values()
        if not sequences:
            return IDLE_S if self._is_full else None
        is_left = any(reader.is_gone for reader in self._readers.values())
        if is_left or any(not sequence.is_paused for sequence in sequences):
            return 0
        deadlines = [s.request.deadline_at for s in sequences if s.request.deadline_at is not None]
        return max(0, min([LONGEST_REST_S, *(deadline - time.perf_counter() for deadline in deadlines)]))

    def _make_calls(self) -> None:
        with self._wakes:
            calls, self._calls = self._calls, []
        for function, future in calls:
            if not future.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _hand_out(self, events: Sequence[Event]) -> None:
        """Gives the events of a step to their readers, in one message."""
        told: Told = []
        for event in events:
            reader = self._readers.get(event.request_id)
            if reader is None:
                continue
            told.append((reader, event.error if isinstance(event, Failed) else event))
            reader.num_put += 1
            if isinstance(event, (Failed, Finished)):
                del self._readers[event.request_id]
            elif reader.num_unread >= MAX_UNREAD and event.request_id not in reader.paused:
                reader.paused.add(event.request_id)
                self.engine.scheduler.pause(event.request_id, is_paused=True)
                if reader.num_unread <= FEW_UNREAD:  # it has read on meanwhile, and did not see that it has to ask
                    self._resume(reader)
        self._tell(told)

    def _tell(self, told: Told) -> None:
        """Wakes each event loop once: a wake for every event would take Python from the steps as often."""
        for loop, group in groupby(told, lambda each: each[0].loop):
            try:
                loop.call_soon_threadsafe(_deliver, [*group])
            except RuntimeError:
                if not loop.is_closed():
                    raise

    def _fail_all(self, error: Exception) -> None:
        """A step failed: the requests in it cannot be trusted to go on."""
        readers, self._readers = dict(self._readers), {}
        self._tell([(reader, error) for reader in readers.values()])
        for request_id in readers:
            with suppress(Exception):  # a device that is lost fails again; the error is known already
                self.engine.fail(request_id, error)
