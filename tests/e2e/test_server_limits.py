"""Progress, leaving, limits and shutting down, against a live server with a tiny model."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from server_process import ServerProcess, events, serving
from tiny_models import prompt, save_tiny_model

from penstock.trace.document import Trace

KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def server(folder):
    """Chunks of 2: a prompt of 1,000 tokens takes 500 steps."""
    with serving(
        folder, "--chunk-size", "2", "--max-waiting", "3", "--max-running", "3", "--dtype", "float32"
    ) as server:
        yield server


def body(folder, num_tokens=900, **fields):
    given = {"model": folder, "prompt": prompt(num_tokens, seed=fields.pop("prompt_seed", 1)), "temperature": 0}
    return {**given, "max_tokens": 4, "ignore_eos": True, **fields}


def complete(server, given, **options):
    return httpx.post(f"{server.url}/v1/completions", json=given, timeout=60, **options)


def stream(server, given, **options):
    return httpx.stream("POST", f"{server.url}/v1/completions", json=given | {"stream": True}, timeout=60, **options)


@contextmanager
def posting(server, given):
    """A client that sends a request, reads nothing, and leaves at the end of the block."""
    content = json.dumps(given).encode()
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def idle(server):
    return server.metric_becomes("num_requests_running", 0) and server.metric_becomes("num_requests_waiting", 0)


def test_progress_comes_with_every_chunk(server, folder):
    with stream(server, body(folder, 300, prompt_seed=2, return_progress=True)) as response:
        *parts, last = events(response)
    assert last == "[DONE]"
    found = [json.loads(part) for part in parts]
    progress = [part["prompt_progress"] for part in found if "prompt_progress" in part]
    assert all(part["choices"] == [] for part in found if "prompt_progress" in part)
    assert [one["processed"] for one in progress if one["processed"]] == [*range(2, 302, 2)]
    assert {one["total"] for one in progress} == {300}
    assert progress[-1]["queue_position"] == 0
    assert progress[10]["eta_ms"] > progress[-1]["eta_ms"] == 0
    assert progress[10]["time_ms"] < progress[-1]["time_ms"]


def test_whoever_waits_is_told_its_place(server, folder):
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(complete, server, body(folder, 900, prompt_seed=10 + i)) for i in range(3)]
        assert server.metric_becomes("num_requests_running", 3)
        with stream(server, body(folder, 900, prompt_seed=14, return_progress=True)) as response:
            first = next(json.loads(part) for part in events(response))
        assert all(future.result().status_code == 200 for future in running)
    assert first["prompt_progress"]["queue_position"] == 1
    assert first["prompt_progress"]["eta_ms"] is None
    assert idle(server)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_leaving_cancels_and_a_retry_resumes(server, folder, is_streamed):
    """Three prompts, read one after the other, take long enough to leave in the middle, however busy the machine is."""
    prompts = [prompt(960, seed=20 + 3 * is_streamed + index) for index in range(3)]
    given = body(folder, prompt=prompts, stream=is_streamed, max_tokens=30)
    num_cancelled = server.metric("request_cancelled_total")
    num_chunks = server.metric("prefill_chunk_tokens_count")
    with posting(server, given):
        assert server.metric_reaches("prefill_chunk_tokens_count", num_chunks + 20)
    assert idle(server)
    assert server.metric_reaches("request_cancelled_total", num_cancelled + 1)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.logs('"finish": "cancelled"')
    again = complete(server, given | {"stream": False, "prompt": prompts[0]}).json()
    assert 0 < again["usage"]["prompt_tokens_details"]["cached_tokens"] < 960
    assert again["usage"]["prompt_tokens"] == 960


def test_leaving_while_text_is_streamed_cancels(server, folder):
    with stream(server, body(folder, 20, max_tokens=900)) as response:
        assert [part for part, _ in zip(events(response), range(3), strict=False)]
    assert idle(server)
    assert server.metric("kv_cache_usage_perc") == 0


def test_a_full_queue_is_answered_with_429(server, folder):
    with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=server.url, timeout=60) as client:
        asks = [body(folder, 300, prompt_seed=40 + i) for i in range(12)]
        answers = [*pool.map(lambda given: client.post("/v1/completions", json=given), asks)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert refused[0].json()["error"]["code"] == "queue_full"
    assert idle(server)


def test_a_refused_request_with_many_choices_leaves_nothing_behind(server, folder):
    answer = complete(server, body(folder, 900, prompt_seed=60, n=10))
    assert answer.status_code == 429
    assert idle(server)
    assert server.metric("kv_cache_usage_perc") == 0


def test_keys_are_asked_for_everywhere_but_at_the_door(folder):
    with serving(
        folder, "--api-key", KEY, "--api-key", "another", "--max-prompt-tokens", "50", "--max-body-mib", "1"
    ) as server:
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/timeline", "/trace"):
            refused = httpx.get(f"{server.url}{path}")
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
        wrong = {"authorization": "Bearer wrong"}
        assert httpx.get(f"{server.url}/v1/models", headers=wrong).status_code == 401
        for key in (KEY, "another"):
            assert httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        right = {"authorization": f"Bearer {KEY}"}
        assert complete(server, body(folder, 50), headers=right).status_code == 200
        long = complete(server, body(folder, 51), headers=right)
        assert long.status_code == 413
        assert long.json()["error"]["code"] == "context_length_exceeded"
        large = httpx.post(f"{server.url}/v1/completions", content=b"x" * (2**20 + 1), headers=right)
        assert large.status_code == 413
        chunked = httpx.post(f"{server.url}/v1/completions", content=(b"x" * 2**18 for _ in range(8)), headers=right)
        assert chunked.status_code == 413
        assert (
            "access-control-allow-origin"
            not in httpx.get(f"{server.url}/health", headers={"origin": "http://example.org"}).headers
        )
        assert not any(KEY in line for line in server.log)


def test_silence_is_filled_and_what_takes_too_long_is_ended(folder):
    """Three prompts in chunks of 1 take 3,000 steps: longer than a request may, on any machine."""
    limits = ("--keep-alive-s", "0.1", "--body-timeout-s", "0.3", "--request-timeout-s", "0.7")
    with serving(folder, "--chunk-size", "1", "--dtype", "float32", *limits) as server:
        given = body(folder, prompt=[prompt(1000, seed=seed) for seed in range(3)])
        with stream(server, given) as response:
            *silence, error, done = events(response)
        assert silence
        assert all(part.startswith(":") for part in silence)
        assert json.loads(error)["error"]["type"] == "timeout_error"
        assert done == "[DONE]"
        answer = complete(server, given)
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            slow.settimeout(30)
            assert b" 408 " in slow.recv(4096)
        assert idle(server)
        assert server.metric("kv_cache_usage_perc") == 0


@pytest.mark.parametrize("has_time", [True, False])
def test_ending_the_server_ends_every_stream_properly(folder, has_time, tmp_path):
    """With time each of 20 streams finishes; without, each ends with an error event. The process exits with 0."""
    path = tmp_path / "trace.json"
    flags = ["--drain-timeout-s", "150" if has_time else "0.1", "--dtype", "float32", "--trace", str(path)]
    with serving(folder, *flags) as server:
        ends: list[list[str]] = []
        begun = threading.Barrier(21)

        def follow(seed):
            with stream(server, body(folder, 30, prompt_seed=seed, max_tokens=60 if has_time else 900)) as response:
                parts = []
                for part in events(response):
                    if not parts:
                        begun.wait(120)
                    parts.append(part)
                ends.append(parts[-2:])

        with ThreadPoolExecutor(20) as pool:
            following = [pool.submit(follow, seed) for seed in range(20)]
            begun.wait(120)
            assert server.terminate(180) == 0
            for future in following:
                future.result()
    assert len(ends) == 20
    assert all(done == "[DONE]" for _, done in ends)
    if has_time:
        assert all(json.loads(last)["choices"][0]["finish_reason"] == "length" for last, _ in ends)
    else:
        assert any("shutting down" in json.loads(last).get("error", {}).get("message", "") for last, _ in ends)
    outcomes = [request.outcome for request in Trace.read(path).requests]
    assert len(outcomes) == 20
    assert set(outcomes) == {"length"} if has_time else "cancelled" in outcomes


def test_a_server_without_its_model_says_so_and_exits(tmp_path):
    server = ServerProcess(str(tmp_path))
    assert server.process.wait(60) == 2
    assert server.logs("penstock:")
