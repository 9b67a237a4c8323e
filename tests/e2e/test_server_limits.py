"""Progress, leaving, limits and shutting down, against a live server with a tiny model."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from hang_bound import HANG_S, PAUSE_S, within
from penstock_command import penstock_text
from server_process import ServerProcess, events, serving
from tiny_models import prompt, save_tiny_model

from penstock.trace.document import Trace

KEY = "a-key-for-tests"
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


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
    return httpx.post(f"{server.url}/v1/completions", json=given, timeout=HANG_S, **options)


def stream(server, given, **options):
    url = f"{server.url}/v1/completions"
    return httpx.stream("POST", url, json=given | {"stream": True}, timeout=HANG_S, **options)


@contextmanager
def posting(server, given):
    """A client that sends a request, reads nothing, and leaves at the end of the block."""
    content = json.dumps(given).encode()
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(content)}\r\n\r\n".encode() + content)
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
        for attempt in range(20):  # those that run may end before the fourth has come
            seeds = range(10 + 4 * attempt, 13 + 4 * attempt)
            running = [pool.submit(complete, server, body(folder, 900, prompt_seed=seed)) for seed in seeds]
            assert server.metric_becomes("num_requests_running", 3)
            with stream(server, body(folder, 900, prompt_seed=seeds.stop, return_progress=True)) as response:
                first = next(json.loads(part) for part in events(response))
            if first["prompt_progress"]["queue_position"]:
                break
            assert idle(server)
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
    headers = {"x-request-id": "one-that-leaves"}
    with stream(server, body(folder, 20, max_tokens=900), headers=headers) as response:
        assert [part for part, _ in zip(events(response), range(3), strict=False)]
    assert idle(server)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.logs("one-that-leaves")
    logged = json.loads(next(line for line in server.log if "one-that-leaves" in line))
    assert logged["finish"] == "cancelled"
    assert 3 <= logged["completion_tokens"] < 900, "what was written before it left"


def test_a_full_queue_is_answered_with_429(server, folder):
    def of_three(seed):
        return body(folder, prompt=[prompt(960, seed=seed + index) for index in range(3)])

    with posting(server, of_three(40)):
        assert server.metric_becomes("num_requests_running", 3)
        with posting(server, of_three(43)):
            assert server.metric_becomes("num_requests_waiting", 3)
            refused = complete(server, body(folder, 300, prompt_seed=46))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    assert idle(server)
    assert complete(server, body(folder, 300, prompt_seed=46)).status_code == 200


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
        assert httpx.head(f"{server.url}/health").status_code == 200
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
    """Twelve prompts in chunks of 1 take 12,000 steps: longer than a request may, on any machine."""
    limits = ("--keep-alive-s", "0.1", "--body-timeout-s", "0.3", "--request-timeout-s", "2")
    with serving(folder, "--chunk-size", "1", "--dtype", "float32", *limits) as server:
        given = body(folder, prompt=[prompt(1000, seed=seed) for seed in range(12)])
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
            slow.sendall(f"{HEAD}Content-Length: 9\r\n\r\n{{".encode())
            slow.settimeout(HANG_S)
            assert b" 408 " in slow.recv(4096)
        assert idle(server)
        assert server.metric("kv_cache_usage_perc") == 0


def connected(server):
    connection = socket.create_connection(server.url.removeprefix("http://").split(":"))
    connection.settimeout(HANG_S)
    return connection


def health(server):
    """Gives what comes for a request on a connection of its own, be it nothing."""
    with connected(server) as connection, suppress(ConnectionError):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return connection.recv(4096)
    return b""


def received(connection, drip=b""):
    """Gives all that comes until the server ends the connection, which gets `drip` again and again meanwhile."""
    parts = []
    connection.settimeout(PAUSE_S if drip else HANG_S)

    def has_ended():
        try:
            if drip:
                connection.sendall(drip)
            parts.append(connection.recv(4096))
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return parts[-1] == b""

    assert within(HANG_S, has_ended)
    return b"".join(parts)


def test_silent_connections_make_room_for_those_that_ask(folder):
    """There are more of them than the process may have files open, and none of them takes too long."""
    with (
        serving(folder, "--dtype", "float32", "--header-timeout-s", "900", max_files=256) as server,
        ExitStack() as open_ones,
    ):
        for index in range(320):
            connection = open_ones.enter_context(connected(server))
            with suppress(ConnectionError):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" if index % 2 else b"")
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert complete(server, body(folder, 20)).status_code == 200


def test_what_is_asked_ahead_keeps_nobody_waiting_and_is_answered(server):
    """Of connections that send a hundred requests in one go, others see nothing, and all of those are answered."""
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    num_answered = 0
    with ExitStack() as ahead:
        many = [ahead.enter_context(connected(server)) for _ in range(50)]
        for connection in many:
            connection.sendall(ask * 100)
        with httpx.Client(base_url=server.url, timeout=HANG_S) as one_thing_at_a_time:
            for _ in range(20):
                assert one_thing_at_a_time.get("/health").status_code == 200
        for connection in many:
            connection.setblocking(False)
            with suppress(BlockingIOError):
                while content := connection.recv(1 << 20):
                    num_answered += content.count(b"HTTP/1.1 200")
    assert num_answered < 2500, num_answered
    with connected(server) as connection:
        connection.sendall(ask * 20 + ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert received(connection).count(b"HTTP/1.1 200") == 21


def test_connections_that_take_too_long_to_ask_are_ended(folder):
    limits = ("--header-timeout-s", "1", "--whole-body-timeout-s", "1")
    with serving(folder, "--dtype", "float32", *limits) as server:
        with connected(server) as silent:
            assert received(silent) == b""
        with connected(server) as half:
            half.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            assert b" 408 " in received(half)
        with connected(server) as dripping:
            dripping.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-a: ")
            assert b" 408 " in received(dripping, drip=b"a")
        with connected(server) as slow:
            slow.sendall(f"{HEAD}Content-Length: 9999999\r\n\r\n{{".encode())
            assert b"The body was not whole after 1 s" in received(slow, drip=b" ")
        with connected(server) as kept:
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in received(kept)
        with connected(server) as refused:  # whose body nobody reads
            refused.sendall(f"{HEAD}Content-Length: 99999999\r\n\r\n{{".encode())
            assert b" 413 " in received(refused, drip=b" ")
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_body_with_two_lengths_is_refused_and_nothing_behind_it_is_read(server, version):
    """To a proxy that believes the first length, the second request is a part of the first one's body."""
    hidden = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    content = b"2\r\n{}\r\n0\r\n\r\n" + hidden
    head = f"{HEAD}Connection: keep-alive\r\nTransfer-Encoding: chunked\r\nContent-Length: {len(content)}\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(head.replace("HTTP/1.1", f"HTTP/{version}").encode() + content)
        answer = received(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b" 400 " in answer
    assert b"The body has two lengths" in answer


def test_a_client_has_so_many_connections_and_no_more(folder):
    with serving(folder, "--dtype", "float32", "--max-connections-per-client", "4") as server:
        with ExitStack() as asking:
            for _ in range(4):
                connection = asking.enter_context(connected(server))
                connection.sendall(f"{HEAD}Content-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode())
                assert b" 100 " in connection.recv(4096)  # from now on it is waited for
            with connected(server) as refused:
                answer = received(refused)
            assert b" 503 " in answer
            assert b"There are 4 connections of one client already" in answer
        assert within(HANG_S, lambda: b" 200 " in health(server))


def test_a_connection_that_reads_nothing_of_its_answers_is_ended(folder):
    def num_files():
        return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))

    with serving(folder, "--dtype", "float32", "--body-timeout-s", "1") as server, connected(server) as connection:
        # More than what the buffers of both sides hold.
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        assert connection.recv(12) == b"HTTP/1.1 200"
        num_with_it = num_files()
        assert within(HANG_S, lambda: num_files() < num_with_it)


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
                        begun.wait(HANG_S)
                    parts.append(part)
                ends.append(parts[-2:])

        with ThreadPoolExecutor(20) as pool:
            following = [pool.submit(follow, seed) for seed in range(20)]
            begun.wait(HANG_S)
            assert server.terminate() == 0
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


def test_a_port_that_is_taken_is_refused_in_one_line(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = penstock_text("serve", folder, "--port", port)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"penstock: The server cannot listen on 127.0.0.1:{port}: Address already in use. Give another --port, or "
        "another --host.\n"
    )


def test_a_server_without_its_model_says_so_and_exits(tmp_path):
    server = ServerProcess(str(tmp_path))
    assert server.process.wait(HANG_S) == 2
    assert server.logs("penstock:")
    assert len(server.log) == 1
