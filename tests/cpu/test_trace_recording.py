"""What an engine's trace says is what the engine did."""

import dataclasses
import io

import pytest
from tiny_models import prompt

from penstock.engine.engine import Engine
from penstock.errors import InvalidPrompt, InvalidSetting
from penstock.prompt.source import TextPart
from penstock.request import PrefillProgress
from penstock.trace.document import Trace


def test_a_trace_tells_what_ran_where_and_how(load):
    engine = load(chunk_size=40)
    engine.record()
    outputs = engine.generate_batch([prompt(100), prompt(30, seed=1)], max_tokens=4, ignore_eos=True)
    trace = engine.trace()
    assert trace == Trace.model_validate_json(trace.model_dump_json())
    assert (trace.lane.id, trace.lane.applied, trace.lane.boundary) == ("optimized-native-text", True, "any token")
    assert (trace.plan.prompt_tokens, trace.plan.num_chunks, trace.plan.chunk_size) == (100, 3, 40)
    assert trace.environment.num_threads >= 1
    assert trace.model.dtype == "float32"
    assert trace.limits.memory_budget_bytes == engine.model.budget_bytes
    for request, output in zip(trace.requests, outputs, strict=True):
        assert [(chunk.start, chunk.end) for chunk in request.chunks] == [(c.start, c.end) for c in output.chunks]
        assert request.ttft_ms == pytest.approx(output.ttft_s * 1e3, abs=0.01)
        assert (request.outcome, request.written_tokens, len(request.gaps_ms)) == ("length", 4, 3)
        assert request.queue_ms <= request.ttft_ms
    num_cached = sum(request.cached_tokens for request in trace.requests)
    assert sum(step.num_tokens for step in trace.steps) == 130 - num_cached + 2 * 3
    assert all(step.memory_bytes <= step.peak_bytes for step in trace.steps)
    assert all(step.predicted_bytes > 0 for step in trace.steps)
    assert [step.step for step in trace.steps] == sorted(step.step for step in trace.steps)


def test_cancelled_resumed_and_failed_requests_say_so(load):
    engine = load(chunk_size=32)
    engine.record()
    for event in engine.stream(prompt(200), max_tokens=4):
        if isinstance(event, PrefillProgress) and event.num_computed >= 96:
            break
    engine.generate(prompt(200), max_tokens=2, ignore_eos=True)
    with pytest.raises(InvalidPrompt):
        engine.generate(engine.chat_feed([TextPart(stream=io.BytesIO(), name="nothing")]), max_tokens=2)
    cancelled, resumed, failed = engine.trace().requests
    assert (cancelled.outcome, cancelled.ttft_ms) == ("cancelled", None)
    assert cancelled.chunks[-1].end == 96
    assert (resumed.outcome, resumed.cached_tokens) == ("length", 96)
    assert resumed.chunks[0].start == 96
    assert (failed.outcome, failed.queue_ms) == ("failed", None)
    assert "empty" in failed.error


def test_a_request_that_lost_its_place_is_counted(load):
    engine = load(chunk_size=32, context=140, max_running=1)
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, max_running=4)
    engine.record()
    engine.generate_batch([prompt(90, seed=seed) for seed in range(4)], max_tokens=40, ignore_eos=True)
    trace = engine.trace()
    num_lost = sum(len(step.preempted) for step in trace.steps)
    assert num_lost == sum(request.num_preemptions for request in trace.requests) > 0
    assert all(len(request.gaps_ms) == 39 for request in trace.requests)


def test_an_engine_writes_its_trace_when_it_is_closed(tiny, tmp_path):
    path = tmp_path / "trace.json"
    with Engine.load(str(tiny("llama")[0]), trace=path, chunk_size=16, latency_target_ms=1000, threads=1) as engine:
        engine.generate(prompt(40), max_tokens=3, ignore_eos=True)
        with pytest.raises(InvalidSetting, match="absent"):
            Engine.load("smollm2", trace=tmp_path / "absent" / "trace.json")
        assert not path.exists()
    trace = Trace.read(path)
    assert [request.prompt_tokens for request in trace.requests] == [40], "the measurement at load is not part of it"
    assert all(step.predicted_ms for step in trace.steps)


def test_nothing_is_recorded_unless_asked(load):
    with pytest.raises(InvalidSetting, match="record"):
        load(chunk_size=16).trace()
