"""Replicas on Ray behind one server, as users have them. Skipped where Ray is not installed."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from hang_bound import HANG_S, within
from openai import OpenAI
from server_process import serving

pytestmark = [
    pytest.mark.evidence,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 20
SMALL = ("--memory", "700MB", "--context", "2048")


@pytest.fixture(scope="module")
def server():
    with serving("smollm2", "--ray", "--replicas", "2", "--api-key", "secret", *SMALL) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer secret"}, timeout=HANG_S) as made:
        yield made


@pytest.fixture(scope="module")
def openai(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def replicas(client, model="smollm2"):
    return client.get("/load").json()[model]


def total(client, name):
    """Sums a metric over the replicas."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"penstock:{name}{{"))


def pids_of_replicas(server):
    """Finds the processes of replicas among what the server has started."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
            if b"ServeReplica" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue

    def is_ours(pid):
        while pid in parents and pid != server.process.pid:
            pid = parents[pid]
        return pid == server.process.pid

    return [pid for pid in found if is_ours(pid)]


def streamed(client, number, max_tokens):
    """Asks for a stream; returns its documents, with whether it was ended as streams are."""
    body = {
        "model": "smollm2",
        "prompt": f"{number} {TEXT}",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"], lines[-1:] == ["[DONE]"]


def test_the_openai_client_chats_and_streams(openai):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = openai.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=20)
    stream = openai.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=20, stream=True
    )
    text = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
    assert "Paris" in whole.choices[0].message.content
    assert text == whole.choices[0].message.content


def test_the_key_is_asked_for_and_the_page_is_there(server, client):
    for path in ("/load", "/metrics", "/v1/models"):
        assert httpx.get(server.url + path).status_code == 401
    assert "<html" in httpx.get(server.url).text
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["smollm2"]


def test_a_prompt_goes_back_to_the_replica_that_read_it(client):
    body = {"model": "smollm2", "prompt": f"Again: {TEXT}", "max_tokens": 1}
    cached = []
    for _ in range(6):
        usage = client.post("/v1/completions", json=body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < 16
    assert min(cached[1:]) > 150


def test_load_and_metrics_are_of_every_replica(client):
    assert within(HANG_S, lambda: len(replicas(client)) == 2)
    text = client.get("/metrics").text
    for name in replicas(client):
        assert f'penstock:num_requests_running{{model="smollm2",replica="{name}"}}' in text
    assert text.count("# TYPE penstock:num_requests_running gauge") == 1


def test_a_client_that_leaves_ends_its_request_on_the_replica(client):
    before = total(client, "request_cancelled_total")
    body = {"model": "smollm2", "prompt": TEXT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    assert within(HANG_S, lambda: total(client, "request_cancelled_total") == before + 1)
    assert within(HANG_S, lambda: total(client, "num_requests_running") == 0)


def test_a_response_is_gone_on_from_wherever_it_is_kept(openai):
    first = openai.responses.create(model="smollm2", input="My name is Ada.", max_output_tokens=8)
    for _ in range(3):
        again = openai.responses.create(
            model="smollm2", input="Who am I?", previous_response_id=first.id, max_output_tokens=4
        )
        assert again.status in ("completed", "incomplete")
        assert openai.responses.retrieve(first.id).id == first.id


def test_a_batch_is_answered_by_the_replicas(openai, tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"{n}", "max_tokens": 2}}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = openai.files.create(file=path, purpose="batch")
    batch = openai.batches.create(input_file_id=given.id, endpoint="/v1/completions", completion_window="24h")
    assert within(HANG_S, lambda: openai.batches.retrieve(batch.id).status == "completed")
    output = openai.batches.retrieve(batch.id).output_file_id
    answers = [json.loads(line) for line in openai.files.content(output).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"r{n}" for n in range(12))


def test_an_unknown_model_and_a_bad_body_are_refused(client):
    assert client.post("/v1/completions", json={"model": "other", "prompt": "a"}).status_code == 404
    answer = client.post("/v1/chat/completions", json={"model": "smollm2", "messages": "?"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_streams_of_a_killed_replica_end_with_an_error_and_the_rest_goes_on(server, client):
    assert within(HANG_S, lambda: len(replicas(client)) == 2)
    before, known = total(client, "generation_tokens_total"), set(replicas(client))
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(streamed, client, number, 300) for number in range(8)]
        assert within(HANG_S, lambda: total(client, "generation_tokens_total") >= before + 80)
        os.kill(pids_of_replicas(server)[0], signal.SIGKILL)
        found = [one.result() for one in running]
    assert all(has_ended for _, has_ended in found)
    lost = [documents for documents, _ in found if "error" in documents[-1]]
    whole = [documents for documents, _ in found if "error" not in documents[-1]]
    assert lost
    assert whole
    for documents in lost:
        assert documents[-1]["error"]["type"] == "service_unavailable_error"
    for documents in whole:
        assert sum(bool(document["choices"][0]["finish_reason"] is None) for document in documents) == 300
    assert client.post("/v1/completions", json={"model": "smollm2", "prompt": "a", "max_tokens": 1}).status_code == 200
    assert within(HANG_S, lambda: len(replicas(client)) == 2 and set(replicas(client)) != known)


def test_an_unknown_replica_is_refused_and_a_known_one_answers(client):
    name = next(iter(replicas(client)))
    assert client.get("/trace", params={"replica": name, "seconds": 1}).status_code == 200
    assert client.get("/trace", params={"replica": "nobody"}).status_code == 404
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]


def test_a_slow_reader_rests_its_request(client):
    """What is read of a long answer comes, and what nobody reads is not computed ahead without end."""
    body = {"model": "smollm2", "prompt": "Go on.", "max_tokens": 1800, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        parts = answer.iter_lines()
        found = [next(parts) for _ in range(600)]
    assert sum(line.startswith("data: {") for line in found) == 300
    assert within(HANG_S, lambda: total(client, "num_requests_running") == 0)


def test_a_server_that_is_told_to_end_finishes_what_runs():
    with serving("smollm2", "--ray", "--replicas", "1", *SMALL) as own, ThreadPoolExecutor(1) as pool:
        with httpx.Client(base_url=own.url, timeout=HANG_S) as client:
            before = total(client, "generation_tokens_total")
            running = pool.submit(streamed, client, 1, 200)
            assert within(HANG_S, lambda: total(client, "generation_tokens_total") > before)
            own.process.send_signal(signal.SIGTERM)
            documents, has_ended = running.result()
        assert has_ended
        assert len(documents) == 201
        assert own.process.wait(HANG_S) == 0
