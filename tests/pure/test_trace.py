"""The trace document: what is written is what is read, other versions are refused by name, and others can open it."""

import json
import resource
import subprocess
import sys
import tracemalloc
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from penstock.errors import InvalidSetting, InvalidTrace
from penstock.request import Chunk, Finished, Hits, Output, Request, SamplingParams, StepPlan, StepResult
from penstock.trace.document import Environment, Trace, TraceLane, TraceLimits, TraceModel, require_writable
from penstock.trace.environment import environment, versions
from penstock.trace.perfetto import write_perfetto
from penstock.trace.recorder import GAPS_PER_CHUNK, GAPS_PER_REQUEST, MAX_CHUNKS, MAX_GAPS, Recorder
from penstock.trace.summary import summarize

HEAD = Trace(
    began_at="2026-01-01T00:00:00+00:00",
    environment=Environment(
        penstock="0.1.0",
        commit=None,
        python="3.11",
        torch=None,
        transformers=None,
        system="Linux",
        processor="x",
        device="cpu",
        num_threads=2,
    ),
    model=TraceModel(name="tiny", dtype="float32", num_parameters=1, weight_bytes=4, max_context=9),
    lane=TraceLane(id="optimized-native-text", eligible=True, applied=True, reason="r", boundary="b", mask_mode="m"),
    limits=TraceLimits(
        memory_budget_bytes=10**9,
        chunk_size=None,
        overlap=0,
        priority="interleaved",
        latency_target_ms=None,
        num_blocks=8,
        block_size=16,
        max_running=4,
    ),
)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Every value that a field may hold, at its limits too."""
    kinds = get_args(annotation)
    if get_origin(annotation) is Literal:
        return st.sampled_from(kinds)
    if get_origin(annotation) is Annotated:
        numbers = {type(limit): getattr(limit, "ge", getattr(limit, "le", None)) for limit in kinds[1:]}
        highest = max((number for kind, number in numbers.items() if kind is not Ge), default=None)
        if kinds[0] is int:
            return st.integers(0, 2**63)
        return st.floats(0, highest, allow_nan=False, allow_infinity=False)
    if get_origin(annotation) is tuple:
        return st.lists(values(kinds[0]), max_size=3).map(tuple)
    if kinds:
        return st.one_of(*map(values, kinds))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return documents(annotation)
    known = {str: st.text(max_size=8), bool: st.booleans(), type(None): st.none()}
    return known[annotation] if annotation in known else st.floats(allow_nan=False, allow_infinity=False)


def documents(kind: type[BaseModel]) -> st.SearchStrategy[Any]:
    hints = kind.__annotations__
    fields = {
        name: values(kind.model_fields[name].rebuild_annotation())
        for name in hints
        if name not in ("model_config", "type", "format", "version")
    }
    return st.builds(kind, **fields)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(trace=documents(Trace))
def test_what_is_written_is_what_is_read(trace, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "trace.json"
    trace.write(path)
    assert Trace.read(path) == trace
    assert sorted(p.name for p in path.parent.glob(".trace-*")) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"type":"trace","version":1,"model":"m","lane":"l"}\n{"type":"step","step":0}\n', "version 1"),
        (HEAD.model_dump_json().replace('"version":2', '"version":3'), "version 3"),
        ("hello", "no trace"),
        ('{"version": 2, "steps": []}', "no trace"),
        ("[]", "no trace"),
        (HEAD.model_dump_json().replace('"num_threads":2', '"num_threads":-2'), "environment.num_threads"),
        (HEAD.model_dump_json().replace('"num_threads":2', '"num_threads":2,"new":1'), "environment.new"),
        ('{"format": "penstock-trace", "version": 2}', "began_at"),
    ],
)
def test_what_is_no_trace_of_this_version_is_refused_by_name(content, said, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(InvalidTrace, match=said) as refused:
        Trace.read(path)
    assert str(path) in str(refused.value)


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    assert require_writable(tmp_path / "trace.json") == tmp_path / "trace.json"
    for path in (tmp_path, tmp_path / "absent" / "trace.json"):
        with pytest.raises(InvalidSetting, match="--trace"):
            require_writable(path)
    with pytest.raises(InvalidTrace, match="cannot be read"):
        Trace.read(tmp_path / "absent.json")


# --- recorded steps -----------------------------------------------------------------------------------------


class Clock:
    """A recorder fed with steps that somebody else might have planned."""

    def __init__(self) -> None:
        self.now = 100.0
        self.recorder = Recorder(HEAD, now=lambda: self.now)
        self.step = 0

    def arrive(self, request_id: int, num_tokens: int) -> None:
        prompt = tuple(range(num_tokens))
        request = Request(id=request_id, prompt=prompt, sampling=SamplingParams(), arrived_at=self.now)
        self.recorder.take_arrival(request)

    def run(self, *chunks: tuple[int, int, int, int], ms: float, preempted=(), predicted_ms: float = 0.0) -> None:
        """Chunks are (request, start, end, tokens of its prompt); whoever comes to its end gets a token."""
        parts = tuple(
            Chunk(sequence_id=i, start=start, end=end, wants_logits=end >= total, num_prompt_tokens=total)
            for i, start, end, total in chunks
        )
        plan = StepPlan(
            step=self.step,
            chunks=parts,
            admitted=(),
            preempted=preempted,
            waiting=0,
            token_budget=512,
            predicted_s=predicted_ms / 1e3,
            predicted_bytes=1000,
            reason="interleaved",
        )
        tokens = {part.sequence_id: 7 for part in parts if part.wants_logits}
        result = StepResult(step=self.step, token_by_sequence=tokens, finished={}, elapsed_s=ms / 1e3, peak_bytes=2000)
        self.recorder.take_step(plan, result, started_at=self.now, memory_bytes=2**30, kv_share=0.5)
        self.now += ms / 1e3
        self.step += 1

    def end(self, request_id: int, reason: str, *, num_prompt: int, num_written: int) -> None:
        output = Output(
            request_id=request_id,
            text="",
            token_ids=(7,) * num_written,
            finish_reason=reason,
            num_prompt_tokens=num_prompt,
            num_computed_tokens=num_prompt,
            hits=Hits(),
            chunks=(),
            ttft_s=None,
            prefill_s=0.0,
            decode_s=0.0,
            peak_bytes=0,
            predicted_peak_bytes=0,
        )
        self.recorder.take_event(Finished(request_id=request_id, output=output))


def test_times_of_a_request_are_read_from_its_steps():
    clock = Clock()
    clock.arrive(0, 4)
    clock.run((0, 0, 4, 4), ms=10)
    clock.arrive(1, 8)
    clock.run((0, 4, 5, 4), ms=5)  # the other one waits
    clock.run((0, 5, 6, 4), (1, 0, 6, 8), ms=40)
    clock.end(0, "length", num_prompt=4, num_written=3)
    clock.run((1, 6, 8, 8), ms=20, preempted=())
    clock.end(1, "abort", num_prompt=8, num_written=1)
    first, second = clock.recorder.taken().document().requests
    assert (first.queue_ms, first.ttft_ms, first.gaps_ms) == (0, 10, (5, 40))
    assert (second.queue_ms, second.ttft_ms, second.gaps_ms) == (5, 65, ())
    assert [(chunk.step, chunk.start, chunk.end, chunk.ms) for chunk in second.chunks] == [(2, 0, 6, 40), (3, 6, 8, 20)]
    assert (first.outcome, second.outcome) == ("length", "cancelled")
    assert second.ended_s == pytest.approx(0.075)


def test_the_slowest_steps_are_explained():
    clock = Clock()
    clock.arrive(0, 900)
    clock.arrive(1, 900)
    clock.run((0, 0, 100, 900), ms=300)
    for index in range(1, 8):
        start = 100 * index
        clock.run((0, start, start + 100, 900), ms=200 if index == 6 else 40, predicted_ms=45)
    clock.run((0, 900, 901, 900), (1, 0, 800, 900), ms=150, preempted=(5,))
    summary = summarize(clock.recorder.taken().document(), num_slowest=3)
    why = {step.step: " / ".join(step.why) for step in summary.slowest}
    assert list(why) == [0, 6, 8]
    assert "the first step" in why[0]
    assert "reads 100 of 900 tokens of request 0 after 600" in why[6]
    assert "5.0 x the median" in why[6]
    assert "4.4 x what was predicted" in why[6]
    assert "reads 800 of 900 tokens of request 1" in why[8]
    assert "writes for 1 request, context up to 901" in why[8]
    assert "request 5 lost its place" in why[8]
    assert summary.requests == {"running": 2}
    assert summary.busy_share == 1


def test_a_step_of_many_streams_is_kept_in_few_bytes():
    clock = Clock()
    tracemalloc.start()
    try:
        for step in range(200):
            clock.run(*[(request_id, 1000 + step, 1001 + step, 500) for request_id in range(64)], ms=1)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 200 * 64 * 80


def test_what_is_kept_is_bounded_and_what_is_not_is_counted():
    clock = Clock()
    for _ in range(MAX_CHUNKS // 1000 + 5):
        clock.run(*[(0, 1, 2, 1)] * 1000, ms=1)
    recording = clock.recorder.taken()
    assert (len(recording.ran), recording.num_dropped_steps) == (MAX_CHUNKS // 1000, 5)
    assert recording.ran[0].plan.step == 5
    recent = clock.recorder.taken(last_s=0.0105)
    assert (len(recent.ran), recent.num_dropped_steps) == (11, MAX_CHUNKS // 1000 - 6)


def test_ended_requests_are_bounded_by_what_they_hold():
    clock = Clock()
    most = MAX_GAPS // GAPS_PER_REQUEST
    for request_id in range(most + 5):
        clock.arrive(request_id, 1)
        clock.end(request_id, "stop", num_prompt=1, num_written=1)
    assert [request.id for request in clock.recorder.taken().ended] == list(range(5, most + 5))
    clock.arrive(most + 5, 1)
    for _ in range(101):
        clock.run((most + 5, 0, 1, 1), ms=1)
    clock.end(most + 5, "stop", num_prompt=1, num_written=101)
    # Its chunks and gaps take the place of others.
    assert len(clock.recorder.taken().ended) == most - (101 * GAPS_PER_CHUNK + 100) // GAPS_PER_REQUEST - 1


# --- others read it -----------------------------------------------------------------------------------------


class Event(BaseModel):
    """Trace event format: what Perfetto's JSON importer and Chrome's viewer take."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1)
    pid: int = Field(ge=1)


class Complete(Event):
    ph: Literal["X"]
    cat: str
    ts: float = Field(ge=0)
    dur: float = Field(ge=0)
    tid: int = Field(ge=1)
    args: dict[str, Any]


class Instant(Event):
    ph: Literal["i"]
    cat: str
    ts: float = Field(ge=0)
    tid: int = Field(ge=1)
    s: Literal["g", "p", "t"]


class CounterEvent(Event):
    ph: Literal["C"]
    ts: float = Field(ge=0)
    args: dict[str, float]


class Name(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1)


class Metadata(Event):
    ph: Literal["M"]
    name: Literal["process_name", "thread_name", "process_sort_index", "thread_sort_index"]
    tid: int
    args: Name


class EventFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    traceEvents: list[Annotated[Complete | Instant | CounterEvent | Metadata, Field(discriminator="ph")]]
    displayTimeUnit: Literal["ms", "ns"]
    otherData: dict[str, str]


def test_a_perfetto_file_keeps_to_the_format(tmp_path):
    clock = Clock()
    clock.arrive(0, 300)
    clock.now += 0.002
    for start in range(0, 300, 100):
        clock.run((0, start, start + 100, 300), ms=12.5, preempted=(0,) if start == 200 else ())
    clock.run((0, 300, 301, 300), ms=3)
    clock.end(0, "stop", num_prompt=300, num_written=2)
    write_perfetto(clock.recorder.taken().document(), tmp_path / "perfetto.json")
    events = TypeAdapter(EventFile).validate_json((tmp_path / "perfetto.json").read_bytes()).traceEvents
    spans = [event for event in events if isinstance(event, Complete) and event.pid == 2]
    assert [(span.cat, span.ts, span.dur) for span in spans] == [
        ("queue", 0, 2000),
        *[("prefill", 2000 + 12500 * index, 12500) for index in range(3)],
        ("decode", 39500, 3000),
    ]
    assert [event.name for event in events if isinstance(event, Instant)] == ["stop", "preempted"]
    assert {event.name for event in events if isinstance(event, CounterEvent)} >= {"memory, MB", "waiting"}
    named = {(event.pid, event.tid) for event in events if isinstance(event, Metadata)}
    assert {(span.pid, span.tid) for span in events if isinstance(span, Complete)} <= named


def test_ten_thousand_steps_are_summarized_in_five_seconds(tmp_path):
    clock = Clock()
    for request_id in range(2):
        clock.arrive(request_id, 10)
    for index in range(10_000):
        clock.run(*((i, 10 + index, 11 + index, 10) for i in range(2)), ms=1 + index % 7)
    path = tmp_path / "long.json"
    clock.recorder.taken().document().write(path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "penstock.cli.main", "trace", str(path), "--json"]
    shown = subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # whoever else has the machine
    summary = json.loads(shown.stdout)
    assert (summary["num_steps"], len(summary["slowest"])) == (10_000, 5)
    assert summary["gap_ms"]["max"] == 7


def test_a_large_trace_is_made_in_small_pieces_that_are_the_document():
    clock = Clock()
    for request_id in range(2):
        clock.arrive(request_id, 10)
    for index in range(1000):
        clock.run(*((i, 10 + index, 11 + index, 10) for i in range(2)), ms=1)
    taken = clock.recorder.taken()
    pieces = list(taken.pieces())
    whole = b"".join(pieces)
    assert Trace.model_validate_json(whole) == taken.document()
    assert max(map(len, pieces)) < len(whole) / 10
    empty = Clock().recorder.taken()
    assert Trace.model_validate_json(b"".join(empty.pieces())) == empty.document()


def test_measurements_and_traces_name_the_same_versions():
    recorded, measured = environment(device="cpu", num_threads=1), versions()
    assert {"penstock", "python", "torch", "transformers", "numpy"} <= set(measured)
    assert measured.get("commit") == recorded.commit
    for name in ("penstock", "python", "torch", "transformers"):
        assert measured[name] == getattr(recorded, name)
