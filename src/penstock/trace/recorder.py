"""The recorder: steps as they were planned and as they went, and what they meant to each request."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from penstock.request import Chunk, Failed, Finished, Moved, Request, StepPlan, StepResult
from penstock.trace.document import (
    ChunkTime,
    Outcome,
    Trace,
    TraceChunk,
    TraceLayers,
    TraceMove,
    TraceRequest,
    TraceStep,
)

MAX_CHUNKS = 100_000  # of the steps that are kept: some 7 MB
MAX_GAPS = 500_000  # of the requests that have ended, another 5 MB: each counts as some, and each chunk as its numbers
GAPS_PER_REQUEST, GAPS_PER_CHUNK = 50, 4
NUMBERS_PER_CHUNK = 9
UNKNOWN = -1  # the length of a prompt that is still being read

Record = TraceStep | TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A step that ran, in few bytes, as many are kept; a record is made of it when somebody wants to see it."""

    plan: StepPlan  # without its chunks
    chunks: array[int]  # NUMBERS_PER_CHUNK of each
    started_s: float
    elapsed_s: float
    memory_bytes: int
    peak_bytes: int
    kv_share: float
    moves: tuple[TraceMove, ...] = ()

    @property
    def size(self) -> int:
        """Counts what it holds: chunks, and moves, which take some times as much memory."""
        return len(self.chunks) // NUMBERS_PER_CHUNK + 4 * len(self.moves)

    @property
    def ended_s(self) -> float:
        return self.started_s + self.elapsed_s

    def record(self) -> TraceStep:
        predicted_s = self.plan.predicted_s
        places = range(0, len(self.chunks), NUMBERS_PER_CHUNK)
        return TraceStep.from_fields_of(
            self.plan,
            started_s=round(self.started_s, 6),
            elapsed_ms=round(self.elapsed_s * 1e3, 3),
            predicted_ms=round(max(0.0, predicted_s) * 1e3, 3) if predicted_s else None,
            memory_bytes=self.memory_bytes,
            peak_bytes=self.peak_bytes,
            num_waiting=self.plan.waiting,
            kv_share=round(min(1.0, self.kv_share), 4),
            chunks=tuple(_chunk(*self.chunks[place : place + NUMBERS_PER_CHUNK]) for place in places),
            moves=self.moves,
        )


@dataclass(slots=True, kw_only=True)
class Course:
    """A request on its way."""

    id: int
    arrived_s: float
    prompt_tokens: int | None
    started_s: float | None = None
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    cached_tokens: int = 0
    written_tokens: int | None = None  # None: as many as there are times
    num_preemptions: int = 0
    chunks: array[float] = field(default_factory=lambda: array("d"))  # (step, start, end, ms) of each
    adjustments: tuple[str, ...] = ()
    ended_s: float | None = None
    outcome: Outcome | None = None
    error: str | None = None

    def take_chunk(self, chunk: Chunk, result: StepResult, started_s: float) -> None:
        if self.started_s is None:
            self.started_s = started_s
        self.cached_tokens = max(self.cached_tokens, chunk.num_cached)
        if self.prompt_tokens is None:
            self.prompt_tokens = chunk.num_prompt_tokens
        ms = round(result.elapsed_s * 1e3, 3)
        if chunk.layers is not None and chunk.layers.first and self.chunks:
            self.chunks[-1] += ms
        elif chunk.is_prefill:
            self.chunks.extend((result.step, chunk.start, chunk.end, ms))
        if chunk.sequence_id in result.token_by_sequence:
            self.token_times_s.append(started_s + result.elapsed_s)

    def record(self) -> TraceRequest:
        def since_arrival_ms(at_s: float | None) -> float | None:
            return None if at_s is None else round(max(0.0, at_s - self.arrived_s) * 1e3, 3)

        times = self.token_times_s
        return TraceRequest.from_fields_of(
            self,
            arrived_s=round(self.arrived_s, 6),
            queue_ms=since_arrival_ms(self.started_s),
            ttft_ms=since_arrival_ms(times[0] if times else None),
            ended_s=None if self.ended_s is None else round(self.ended_s, 6),
            written_tokens=len(times) if self.written_tokens is None else self.written_tokens,
            chunks=tuple(
                ChunkTime(step=int(step), start=int(start), end=int(end), ms=ms)
                for step, start, end, ms in zip(
                    *(self.chunks[i::GAPS_PER_CHUNK] for i in range(GAPS_PER_CHUNK)), strict=True
                )
            ),
            gaps_ms=tuple(round(max(0.0, after - before) * 1e3, 3) for before, after in pairwise(times)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was recorded up to a moment; it does not change any more."""

    head: Trace
    ran: tuple[Ran, ...]
    ended: tuple[Course, ...]
    running: tuple[TraceRequest, ...]
    num_dropped_steps: int

    def records(self) -> list[Record]:
        """Steps and the ends of requests, in the order in which they came."""
        in_order = sorted([*self.ran, *self.ended], key=lambda kept: kept.ended_s or 0.0)
        return [kept.record() for kept in in_order]

    def document(self) -> Trace:
        changes = {
            "steps": tuple(ran.record() for ran in self.ran),
            "requests": tuple(self._requests()),
            "num_dropped_steps": self.num_dropped_steps,
        }
        return self.head.model_copy(update=changes)

    def pieces(self) -> Iterator[bytes]:
        """The JSON of the document, a record at a time: all at once would keep Python from other threads."""
        head = self.head.model_copy(update={"num_dropped_steps": self.num_dropped_steps})
        yield head.model_dump_json(exclude={"steps", "requests"}).encode().removesuffix(b"}")
        for name, records in (("steps", (ran.record() for ran in self.ran)), ("requests", self._requests())):
            yield f',"{name}":['.encode()
            for i, record in enumerate(records):
                yield (b"," if i else b"") + record.model_dump_json().encode()
            yield b"]"
        yield b"}"

    def _requests(self) -> Iterator[TraceRequest]:
        for kept in sorted((*self.ended, *self.running), key=lambda request: request.id):
            yield kept.record() if isinstance(kept, Course) else kept


class Recorder:
    """Belongs to the thread that runs the steps. `listeners` are called with every record as it is made."""

    def __init__(self, head: Trace, *, now: Callable[[], float] = time.perf_counter) -> None:
        self.head = head
        self.listeners: list[Callable[[Record], None]] = []
        self._began_at = now()
        self._now = now
        self._ran: deque[Ran] = deque()
        self._num_chunks = 0
        self._num_dropped = 0
        self._courses: dict[int, Course] = {}
        self._ended: deque[Course] = deque()
        self._num_gaps = 0
        self.longest_prompt = 0
        self.most_prompt_chunks = 0

    def take_arrival(self, request: Request, adjustments: tuple[str, ...] = ()) -> None:
        num_tokens = request.num_read(len(request.prompt)) if request.prompt_is_complete else None
        arrived_s = request.arrived_at - self._began_at
        course = Course(id=request.id, arrived_s=arrived_s, prompt_tokens=num_tokens, adjustments=adjustments)
        self._courses[request.id] = course

    def take_step(
        self, plan: StepPlan, result: StepResult, *, started_at: float, memory_bytes: int, kv_share: float
    ) -> None:
        started_s = started_at - self._began_at
        for request_id in plan.preempted:
            if course := self._courses.get(request_id):
                course.num_preemptions += 1
        for chunk in plan.chunks:
            if course := self._courses.get(chunk.sequence_id):
                course.take_chunk(chunk, result, started_s)
        ran = Ran(
            plan=replace(plan, chunks=(), moves=()),
            chunks=array("q", [number for chunk in plan.chunks for number in _numbers(chunk)]),
            started_s=started_s,
            elapsed_s=result.elapsed_s,
            memory_bytes=memory_bytes,
            peak_bytes=result.peak_bytes,
            kv_share=kv_share,
            moves=tuple(map(_move, result.moved)),
        )
        self._keep(ran)
        if self.listeners:
            self._tell(ran.record())

    def take_event(self, event: object) -> None:
        """How a request ended; other events say nothing that steps do not."""
        if isinstance(event, Failed) and event.request_id in self._courses:
            self._courses[event.request_id].error = str(event.error)
        if isinstance(event, Finished):
            self._take_end(event)

    def taken(self, *, last_s: float | None = None) -> Recording:
        """What is kept of the last seconds; None: all of it."""
        since = float("-inf") if last_s is None else self._now() - self._began_at - last_s
        ran = tuple(ran for ran in self._ran if ran.ended_s >= since)
        return Recording(
            head=self.head,
            ran=ran,
            ended=tuple(request for request in self._ended if (request.ended_s or 0.0) >= since),
            running=tuple(course.record() for course in self._courses.values()),
            num_dropped_steps=self._num_dropped + len(self._ran) - len(ran),
        )

    def _take_end(self, event: Finished) -> None:
        course = self._courses.pop(event.request_id, None)
        if course is None:
            return
        output = event.output
        course.ended_s = self._now() - self._began_at
        ended = "cancelled" if output.finish_reason == "abort" else output.finish_reason
        course.outcome = ended if course.error is None else "failed"
        course.prompt_tokens = output.num_prompt_tokens
        course.written_tokens = len(output.token_ids)
        self.longest_prompt = max(self.longest_prompt, output.num_prompt_tokens)
        self.most_prompt_chunks = max(self.most_prompt_chunks, output.num_prompt_chunks)
        self._ended.append(course)
        self._num_gaps += _num_gaps(course)
        while self._num_gaps > MAX_GAPS and len(self._ended) > 1:
            self._num_gaps -= _num_gaps(self._ended.popleft())
        if self.listeners:
            self._tell(course.record())

    def _keep(self, ran: Ran) -> None:
        self._ran.append(ran)
        self._num_chunks += ran.size
        while self._num_chunks > MAX_CHUNKS and len(self._ran) > 1:
            self._num_chunks -= self._ran.popleft().size
            self._num_dropped += 1

    def _tell(self, record: Record) -> None:
        for listener in self.listeners:
            listener(record)


def _num_gaps(course: Course) -> int:
    """Its size in memory."""
    return GAPS_PER_REQUEST + len(course.chunks) + max(0, len(course.token_times_s) - 1)


def _move(moved: Moved) -> TraceMove:
    slab, ms = moved.move.slab, round(moved.elapsed_s * 1e3, 3)
    return TraceMove(
        kind=moved.move.kind, start=slab.first, end=slab.end, bytes=moved.num_bytes, ms=ms, is_done=moved.is_done
    )


def _numbers(chunk: Chunk) -> tuple[int, ...]:
    num_prompt = UNKNOWN if chunk.num_prompt_tokens is None else chunk.num_prompt_tokens
    layers = (0, 0, 0) if chunk.layers is None else (chunk.layers.first, chunk.layers.end, chunk.layers.num_layers)
    return (chunk.sequence_id, chunk.is_prefill, chunk.start, chunk.end, num_prompt, chunk.num_cached, *layers)


def _chunk(
    request_id: int, is_prefill: int, start: int, end: int, num_prompt: int, num_cached: int, *layers: int
) -> TraceChunk:
    return TraceChunk(
        request_id=request_id,
        kind="prefill" if is_prefill else "decode",
        start=start,
        end=end,
        prompt_tokens=None if num_prompt == UNKNOWN else num_prompt,
        cached_tokens=num_cached,
        layers=TraceLayers(first=layers[0], end=layers[1], num_layers=layers[2]) if layers[2] else None,
    )
