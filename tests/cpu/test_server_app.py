"""The app in this process: before its model is there, and how it is set."""

import asyncio
import json
import re
import time
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from tiny_models import prompt

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.errors import InvalidSetting
from penstock.request import Chunk, StepPlan, StepResult
from penstock.server.app import make_app
from penstock.server.metrics import Metrics, Stalls
from penstock.server.run import Choice, Run
from penstock.server.service import Service
from penstock.server.settings import ServerSettings


def ask(method, path, **options):
    async def asking():
        app = make_app(ServerSettings(model="smollm2"), EngineConfig())
        transport = httpx.ASGITransport(app=app)  # runs no lifespan, so nothing is ever loaded
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(asking())


def test_while_the_model_is_loaded_health_and_requests_are_503():
    health = ask("GET", "/health")
    assert (health.status_code, health.json()) == (503, {"status": "loading"})
    refused = ask("POST", "/v1/completions", json={"model": "smollm2", "prompt": "a"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "being loaded" in refused.json()["error"]["message"]
    assert ask("GET", "/version").status_code == 200


@pytest.mark.parametrize("strict", [False, True])
def test_a_changed_chunk_size_of_a_request_is_in_its_plan_or_refused_under_strict(tiny, strict):
    folder = str(tiny("qwen3-5")[0])
    config = EngineConfig(dtype="float32", device="cpu", memory=4 << 30, threads=1, strict=strict)

    async def asking():
        app = make_app(ServerSettings(model=folder), config)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")
        async with app.router.lifespan_context(app), client:
            await app.state.loading
            completion = {"model": folder, "prompt": [*range(3, 123)], "max_tokens": 1}
            return [
                await client.post("/plan", json={"prompt_tokens": 120, "chunk_size": 70}),
                await client.post("/v1/completions", json=completion | {"chunk_size": 70}),
                await client.post("/v1/completions", json=completion | {"chunk_size": 48}),
            ]

    plan, changed, kept = asyncio.run(asking())
    assert kept.status_code == 200
    if strict:
        for refused in (plan, changed):
            assert refused.status_code == 400
            assert "--strict: chunk size 70 is 64" in refused.json()["error"]["message"]
    else:
        assert changed.status_code == 200
        assert plan.json()["chunk_size"] == 64
        assert any("chunk size 70 is 64" in adjustment for adjustment in plan.json()["adjustments"])


def test_the_clients_own_request_id_is_kept_if_it_is_a_plain_word():
    assert ask("GET", "/health", headers={"x-request-id": "my-7"}).headers["x-request-id"] == "my-7"
    assert ask("GET", "/health", headers={"x-request-id": "a b\t"}).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"api_keys": ("",)}, {"max_choices": 0}, {"request_timeout_s": 0.0}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(InvalidSetting):
        ServerSettings(model="smollm2", **wrong)


ROOT = Path(__file__).parents[2]


def metric_names():
    text = Metrics().text().decode()
    found = re.findall(r"^# TYPE (penstock:\w+) (\w+)$", text, flags=re.MULTILINE)
    return {name for name, _ in found}


def base(name):
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_the_dashboard_names_metrics_that_exist():
    dashboard = (ROOT / "examples" / "grafana-dashboard.json").read_text()
    charted = {base(name) for name in re.findall(r"penstock:\w+", dashboard)}
    assert charted <= metric_names()
    assert len(json.loads(dashboard)["panels"]) == 12


def test_stalls_are_what_a_step_takes_beyond_one_that_only_decodes():
    def chunk(sequence_id, start, end, num_prompt):
        last = end == num_prompt
        return Chunk(sequence_id=sequence_id, start=start, end=end, wants_logits=last, num_prompt_tokens=num_prompt)

    def step(*chunks, seconds):
        plan = StepPlan(
            step=0,
            chunks=chunks,
            admitted=(),
            preempted=(),
            waiting=0,
            token_budget=64,
            predicted_s=0.0,
            predicted_bytes=0,
            reason="",
        )
        result = StepResult(step=0, token_by_sequence={}, finished={}, elapsed_s=seconds, peak_bytes=0)
        return stalls.take_step(plan, result)

    stalls = Stalls()
    assert step(chunk(1, 0, 8, 8), seconds=0.5) == (0, 0), "nobody was being written"
    step(chunk(1, 8, 9, 8), seconds=0.02)
    suffered, _ = step(chunk(1, 9, 10, 8), chunk(2, 0, 30, 90), chunk(3, 0, 10, 90), seconds=0.22)
    assert suffered == pytest.approx(0.2)
    assert stalls.leave(1) == (pytest.approx(0.2), 0)
    assert stalls.leave(2) == (0, pytest.approx(0.15))
    assert stalls.leave(3) == (0, pytest.approx(0.05))


def test_a_stream_that_gets_no_token_suffers_the_whole_step():
    stalls = Stalls()
    stalls.suffered_s[1] = 0.0
    chunk = Chunk(sequence_id=2, start=0, end=30, wants_logits=False, num_prompt_tokens=90)
    plan = StepPlan(
        step=0,
        chunks=(chunk,),
        admitted=(),
        preempted=(),
        waiting=0,
        token_budget=64,
        predicted_s=0.0,
        predicted_bytes=0,
        reason="",
    )
    stalls.take_step(plan, StepResult(step=0, token_by_sequence={}, finished={}, elapsed_s=0.3, peak_bytes=0))
    assert stalls.leave(1) == (0.3, 0)


def running(engine):
    """The service of an engine that is loaded, and a request that it could have been sent."""
    service = Service(ServerSettings(model="tiny"), EngineConfig())
    engine.on_plan, engine.on_step = service.board.take_plan, service.metrics.take_step
    service._engine = AsyncEngine(engine)
    return service, Request({"type": "http", "state": {"request_id": "req-1", "arrived_at": time.perf_counter()}})


CHOICE = Choice(prompt=prompt(100), settings={"max_tokens": 400, "ignore_eos": True}, num_prompt_tokens=100)


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_request_whose_client_leaves_while_it_is_submitted_is_not_shown_for_ever(load, is_forced):
    async def scenario():
        service, request = running(load(chunk_size=16))
        engine = service.engine
        starting = asyncio.create_task(Run(service, request).start([CHOICE]))
        for _ in range(2):  # until the submission is on its way
            await asyncio.sleep(0)
        deadline = time.perf_counter() + 30
        while not service.board.num_running and time.perf_counter() < deadline:
            time.sleep(0.01)  # the loop does not learn that it was taken
        assert service.board.num_running == 1
        starting.cancel()
        closing = asyncio.create_task(engine.close(drain=not is_forced))
        await asyncio.gather(starting, return_exceptions=True)
        await closing
        return service.board.num_running, service.board.num_waiting, service.metrics._stalls.caused_s

    assert asyncio.run(scenario()) == (0, 0, {})


def test_a_request_that_ends_after_the_engine_is_not_shown_for_ever(load):
    async def scenario():
        service, request = running(load(chunk_size=16))
        run = Run(service, request)
        await run.start([CHOICE])
        await service.engine.close(drain=False)
        run.close()
        return service.board.num_running, service.board.num_waiting

    assert asyncio.run(scenario()) == (0, 0)
