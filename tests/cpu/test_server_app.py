"""The app in this process: before its model is there, and how it is set."""

import asyncio
import json
import re
import time
from pathlib import Path

import httpx
import pytest
from hang_bound import HANG_S, within
from pydantic import ValidationError
from starlette.requests import Request
from tiny_models import prompt

from penstock.config import EngineConfig
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.engine import Engine
from penstock.engine.held_memory import HeldMemory
from penstock.errors import InvalidSetting
from penstock.plan.machine import peak_resident_bytes, resident_bytes
from penstock.request import Chunk, SamplingParams, StepPlan, StepResult
from penstock.server.app import make_app
from penstock.server.board import Board
from penstock.server.metrics import Metrics, Stalls
from penstock.server.openai.asks import CompletionAsk
from penstock.server.openai.chat_asks import ChatAsk
from penstock.server.openai.response_asks import ResponseAsk
from penstock.server.run import Run
from penstock.server.service import Service
from penstock.server.settings import ServerSettings
from penstock.server.tokens import TokensAsk


def ask(method, path, at="http://localhost:8000", settings=None, **options):
    async def asking():
        app = make_app(ServerSettings(model="smollm2", **(settings or {})), EngineConfig())
        transport = httpx.ASGITransport(app=app)  # runs no lifespan, so nothing is ever loaded
        async with httpx.AsyncClient(transport=transport, base_url=at) as client:
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
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
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


@pytest.mark.parametrize(
    ("keys", "settings", "is_shared"),
    [
        (("one", "other"), {}, False),
        (("one", "other"), {"share_prefixes": True}, True),
        (("one", "one"), {}, True),  # the same key, given twice
        ((), {}, True),
    ],
)
def test_a_key_does_not_learn_what_was_read_for_another(tiny, keys, settings, is_shared):
    folder = str(tiny("llama")[0])
    config = EngineConfig(dtype="float32", device="cpu", memory=4 << 30, threads=1)
    ask = {"model": folder, "prompt": prompt(200), "max_tokens": 1}

    async def asking():
        app = make_app(ServerSettings(model=folder, api_keys=keys, **settings), config)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            await app.state.loading
            found = []
            for key in (*keys, keys[0]) if keys else ("", "", ""):
                headers = {"authorization": f"bearer  {key}"}
                plan = await client.post("/plan", json={"prompt": ask["prompt"]}, headers=headers)
                usage = (await client.post("/v1/completions", json=ask, headers=headers)).json()["usage"]
                found.append((plan.json()["cached_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
            return found

    first, second, again = asyncio.run(asking())
    assert first == (0, 0)
    assert again == (192, 192), "a key finds what was read for itself"
    assert second == (again if is_shared else (0, 0))


@pytest.mark.parametrize("is_over", [False, True])
def test_a_peak_above_the_budget_is_logged_once(tiny, caplog, is_over):
    folder = str(tiny("llama")[0])
    held = b"x" * (512 << 20)
    del held  # the process has held more than what it may hold now
    memory = resident_bytes() + (256 << 20) if is_over else 2 * peak_resident_bytes()
    config = EngineConfig(dtype="float32", device="cpu", memory=memory, threads=1, chunk_size=16)

    async def asking():
        app = make_app(ServerSettings(model=folder), config)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            await app.state.loading
            return await client.post("/v1/completions", json={"model": folder, "prompt": prompt(90), "max_tokens": 2})

    with caplog.at_level("WARNING", logger="penstock.server"):
        assert asyncio.run(asking()).status_code == 200
    told = [record for record in caplog.records if "over budget" in record.getMessage()]
    assert [(record.budget_bytes, record.peak_bytes > memory) for record in told] == [(memory, True)] * is_over


def test_the_clients_own_request_id_is_kept_if_it_is_a_plain_word():
    assert ask("GET", "/health", headers={"x-request-id": "my-7"}).headers["x-request-id"] == "my-7"
    assert ask("GET", "/health", headers={"x-request-id": "a b\t"}).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"api_keys": ("",)}, {"max_choices": 0}, {"request_timeout_s": 0.0}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(InvalidSetting):
        ServerSettings(model="smollm2", **wrong)


def reset(headers, **options):
    """Asks to forget the prefixes: 503, since no model is loaded, if that is not refused before."""
    return ask("POST", "/reset_prefix_cache", headers=headers, **options)


AS_JSON = {"content-type": "application/json"}
CROSS_SITE = [
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {},
    AS_JSON | {"origin": "http://example.org"},
    AS_JSON | {"origin": "http://localhost:3000"},
    AS_JSON | {"origin": "null"},
    AS_JSON | {"sec-fetch-site": "cross-site"},
    AS_JSON | {"sec-fetch-site": "same-site"},
]
OWN = [
    AS_JSON,
    {"content-type": "application/json; charset=utf-8"},
    AS_JSON | {"origin": "http://localhost:8000"},
    AS_JSON | {"origin": "https://a-proxy.example", "sec-fetch-site": "same-origin"},
    AS_JSON | {"sec-fetch-site": "none"},
]


@pytest.mark.parametrize("headers", CROSS_SITE)
def test_what_a_page_of_another_site_can_send_is_refused_by_a_server_without_a_key(headers):
    refused = reset(headers)
    assert refused.status_code in (403, 415)
    assert "key" in refused.json()["error"]["message"] or "application/json" in refused.json()["error"]["message"]
    with_key = reset(headers | {"authorization": "Bearer k"}, settings={"api_keys": ("k",)})
    assert with_key.status_code == 503


@pytest.mark.parametrize("headers", OWN)
def test_programs_and_the_servers_own_page_may_send(headers):
    assert reset(headers).status_code == 503


@pytest.mark.parametrize("origins", [("http://example.org",), ("*",)])
def test_a_page_of_an_origin_that_is_named_may_send(origins):
    headers = AS_JSON | {"origin": "http://example.org", "sec-fetch-site": "cross-site"}
    assert reset(headers, settings={"cors_origins": origins}).status_code == 503


@pytest.mark.parametrize(
    ("at", "settings", "status"),
    [
        ("http://attacker.example:8000", {}, 403),
        ("http://attacker.example", {"host": "::1"}, 403),
        ("http://127.0.0.1.attacker.example", {"host": "localhost"}, 403),
        ("http://localhost", {}, 200),
        ("http://LOCALHOST:8000", {}, 200),
        ("http://127.0.0.1:8000", {}, 200),
        ("http://[::1]:8000", {}, 200),
        ("http://127.0.0.9:8000", {"host": "127.0.0.9"}, 200),
        ("http://penstock.lan:8000", {"allowed_hosts": ("penstock.lan",)}, 200),
        ("http://attacker.example", {"allowed_hosts": ("penstock.lan",), "host": "0.0.0.0"}, 403),
        ("http://penstock.lan:8000", {"host": "0.0.0.0"}, 200),
    ],
)
def test_a_name_that_others_may_have_pointed_here_is_not_answered_without_a_key(at, settings, status):
    answer = ask("GET", "/version", at=at, settings=settings)
    assert answer.status_code == status
    assert status == 200 or "--allowed-host" in answer.json()["error"]["message"]
    key = {"authorization": "Bearer k"}
    assert ask("GET", "/version", at=at, settings=settings | {"api_keys": ("k",)}, headers=key).status_code == 200


def _filled(before, part, after, num_bytes=4_000_000):
    """A large body, and nothing in it that is large."""
    return (before + ",".join([part] * (num_bytes // (len(part) + 1))) + after).encode()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (_filled('{"messages": [', "[]", "]}"), "more than 1,048,576 commas and brackets"),
        (_filled('{"prompt": [', "7", "]}"), "more than 1,048,576 commas and brackets"),
        (_filled("", "{", ""), "more than 1,048,576 commas and brackets"),
        (_filled('{"messages": [', '{"role": "user", "content": "a"}', "]}", 2_000_000), "more than 32,768 strings"),
        (_filled("{", '"a\\\\": "b"', "}", 2_000_000), "more than 32,768 strings"),
    ],
    ids=["lists", "tokens", "deep", "messages", "keys"],
)
def test_a_body_that_holds_more_than_is_read_in_a_moment_is_refused_before_it_is_parsed(content, what):
    headers = {"content-type": "application/json"}
    refused = ask("POST", "/v1/chat/completions", content=content, headers=headers)
    assert refused.status_code == 413
    assert what in refused.text


def test_what_stands_in_a_long_text_is_not_held_against_it():
    refused = ask("POST", "/v1/completions", json={"model": "smollm2", "prompt": '{"a": "b", "c\\": [1, 2]}' * 100_000})
    assert refused.status_code == 503, "it was read, and would have been answered if the model were there"


@pytest.mark.parametrize(
    ("kind", "field", "most"),
    [(ChatAsk, "messages", 1), (ResponseAsk, "input", 4), (CompletionAsk, "prompt", 4), (TokensAsk, "tokens", 1)],
)
def test_one_mistake_of_a_list_is_enough(kind, field, most):
    """Of a million, each would be told of in a document of its own."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": "m", field: [[{}]] * 1000})
    assert refused.value.error_count() <= most


def test_options_do_not_tell_which_routes_there_are_to_those_without_a_key():
    preflight = {"origin": "http://example.org", "access-control-request-method": "POST"}
    for path in ("/v1/completions", "/no-such-route"):
        for headers in ({}, preflight):
            refused = ask("OPTIONS", path, settings={"api_keys": ("k",)}, headers=headers)
            assert (refused.status_code, refused.headers.get("allow")) == (401, None)
    of_origin = {"api_keys": ("k",), "cors_origins": ("http://example.org",)}
    assert ask("OPTIONS", "/v1/completions", settings=of_origin).status_code == 401
    for path in ("/v1/completions", "/no-such-route"):
        assert ask("OPTIONS", path, settings=of_origin, headers=preflight).status_code == 200


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


def test_the_memory_that_is_charted_is_the_memory_that_the_budget_is_about(monkeypatch):
    """On a card that is the card's, not the process's."""
    monkeypatch.setattr(HeldMemory, "num_bytes", property(lambda held: 123_456))
    metrics = Metrics()
    with Engine.load("smollm2", memory="2GiB", threads=1) as engine:
        metrics.describe("smollm2", engine, Board())
        assert "penstock:memory_resident_bytes 123456.0" in metrics.text().decode()


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
    assert step(chunk(1, 0, 8, 8), seconds=0.5) == 0, "nobody was being written"
    step(chunk(1, 8, 9, 8), seconds=0.02)
    suffered = step(chunk(1, 9, 10, 8), chunk(2, 0, 30, 90), chunk(3, 0, 10, 90), seconds=0.22)
    assert suffered == pytest.approx(0.2)
    assert sum(stalls.caused_s.values()) == pytest.approx(sum(stalls.suffered_s.values()))
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
    state = {"request_id": "req-1", "arrived_at": time.perf_counter(), "sharing_scope": ""}
    return service, Request({"type": "http", "state": state})


CHOICE = ([prompt(100)], SamplingParams(max_tokens=400, ignore_eos=True))


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_request_whose_client_leaves_while_it_is_submitted_is_not_shown_for_ever(load, is_forced):
    async def scenario():
        service, request = running(load(chunk_size=16))
        engine = service.engine
        starting = asyncio.create_task(Run(service, request).start(*CHOICE))
        for _ in range(2):  # until the submission is on its way
            await asyncio.sleep(0)
        assert within(HANG_S, lambda: service.board.num_running == 1)  # the loop does not learn that it was taken
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
        await run.start(*CHOICE)
        await service.engine.close(drain=False)
        run.close()
        return service.board.num_running, service.board.num_waiting

    assert asyncio.run(scenario()) == (0, 0)


def test_traces_and_metrics_tell_other_keys_nothing_that_was_read_or_written(tiny):
    folder = str(tiny("llama")[0])
    config = EngineConfig(dtype="float32", device="cpu", memory=4 << 30, threads=1)
    asked = {"model": folder, "prompt": "w171 w172 w173", "max_tokens": 3, "ignore_eos": True, "user": "w174"}

    async def asking():
        app = make_app(ServerSettings(model=folder, api_keys=("one", "other")), config)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            await app.state.loading
            answer = await client.post("/v1/completions", json=asked, headers={"authorization": "Bearer one"})
            others = {"authorization": "Bearer other"}
            shown = [(await client.get(path, headers=others)).text for path in ("/trace", "/metrics", "/")]
            return answer.json()["choices"][0]["text"], shown

    written, shown = asyncio.run(asking())
    assert json.loads(shown[0])["requests"][0]["prompt_tokens"] == 3
    words = {"w171", "w172", "w173", "w174", *written.split()}
    assert [word for word in words for one in shown if re.search(rf"\b{word}\b", one)] == []
