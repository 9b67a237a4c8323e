"""Files and batches through OpenAI's client, on a server that is ended on the way."""

import io
import json
import re
from functools import partial

import httpx
import openai
import pytest
from hang_bound import HANG_S, within
from server_process import ServerProcess
from tiny_models import prompt, save_tiny_model

KEYS = ("first-key", "second-key")
ROUTE = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return folder


def start(folder, files, *more):
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    server = ServerProcess(str(folder), *keys, "--name", "tiny", "--files", str(files), *more)
    server.wait()
    return server


def client_of(server, key=KEYS[0]):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANG_S)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    server = start(folder, tmp_path_factory.mktemp("files"), "--max-files-mib", "1")
    yield server
    assert server.terminate() == 0


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def lines(num, *, url=ROUTE, **fields):
    asked = [
        {
            "custom_id": f"c{index}",
            "method": "POST",
            "url": url,
            "body": {"prompt": text(index), "max_tokens": 4} | fields,
        }
        for index in range(num)
    ]
    return "".join(json.dumps(one) + "\n" for one in asked).encode()


def text(index):
    return " ".join(f"w{token}" for token in prompt(20, seed=index % 3)) + f" w{index + 3}"


def put(client, content, name="in.jsonl"):
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch")


def ended(client, batch):
    """Returns the batch once it has ended."""
    seen = []

    def is_over():
        seen.append(client.batches.retrieve(batch.id))
        return seen[-1].status in ("completed", "failed", "expired", "cancelled")

    assert within(HANG_S, is_over), seen[-1]
    return seen[-1]


def answers(client, file_id):
    return {answer["custom_id"]: answer for answer in map(json.loads, client.files.content(file_id).text.splitlines())}


def test_a_file_is_put_listed_read_and_deleted(client):
    content = b'{"prompt": "w5"}\n' * 3
    file = put(client, content)
    assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
    assert client.files.content(file.id).read() == content
    assert file.id in [one.id for one in client.files.list()]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="There is no file"):
        client.files.retrieve(file.id)


def test_a_batch_answers_every_line_as_its_route_does(client):
    content = lines(7, temperature=0) + b"no JSON\n" + lines(1, no_such_field=1).replace(b"c0", b"wrong")
    file = put(client, content)
    batch = client.batches.create(
        input_file_id=file.id, endpoint=ROUTE, completion_window="24h", metadata={"for": "a test"}
    )
    done = ended(client, batch)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 9, 7, 2)
    assert done.metadata == {"for": "a test"}
    found = answers(client, done.output_file_id)
    assert set(found) == {f"c{index}" for index in range(7)}
    for index in (0, 6):
        alone = client.completions.create(model="tiny", prompt=text(index), max_tokens=4, temperature=0)
        assert found[f"c{index}"]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    wrong = answers(client, done.error_file_id)
    assert wrong["wrong"]["response"]["status_code"] == 400
    assert "not JSON" in wrong[None]["error"]["message"]
    assert batch.id in [one.id for one in client.batches.list(limit=2)]


def test_a_line_for_another_route_fails_alone(client):
    file = put(client, lines(1) + lines(1, url="/v1/embeddings").replace(b"c0", b"other"))
    done = ended(client, client.batches.create(input_file_id=file.id, endpoint=ROUTE, completion_window="24h"))
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    assert "this batch is for /v1/completions" in answers(client, done.error_file_id)["other"]["error"]["message"]


def test_a_batch_is_cancelled_and_keeps_what_was_answered(client):
    file = put(client, lines(400, max_tokens=200, ignore_eos=True))
    first, second = (
        client.batches.create(input_file_id=file.id, endpoint=ROUTE, completion_window="24h") for _ in range(2)
    )
    assert within(HANG_S, lambda: client.batches.retrieve(first.id).status == "in_progress")
    assert client.batches.cancel(second.id).status == "cancelling"  # before its turn
    client.batches.cancel(first.id)
    done = ended(client, first)
    assert done.status == "cancelled"
    counts = done.request_counts
    assert counts.completed < counts.total == 400
    num_kept = len(answers(client, done.output_file_id)) if done.output_file_id else 0
    assert num_kept == counts.completed
    assert ended(client, second).output_file_id is None
    with pytest.raises(openai.ConflictError, match="is cancelled already"):
        client.batches.cancel(first.id)


def test_another_key_sees_nothing(server, client):
    file = put(client, lines(1))
    batch = client.batches.create(input_file_id=file.id, endpoint=ROUTE, completion_window="24h")
    other = client_of(server, KEYS[1])
    assert [*other.files.list()] == [*other.batches.list()] == []
    for asked in (
        partial(other.files.retrieve, file.id),
        partial(other.files.content, file.id),
        partial(other.files.delete, file.id),
        partial(other.batches.retrieve, batch.id),
        partial(other.batches.cancel, batch.id),
        partial(other.batches.create, input_file_id=file.id, endpoint=ROUTE, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            asked()
    assert ended(client, batch).status == "completed"


def test_what_does_not_fit_is_refused_and_leaves_nothing(client):
    for size in (3 << 20, (1 << 20) - 100):  # above what a body may be; above the room that is left
        with pytest.raises(openai.APIStatusError) as refused:
            put(client, b"x" * size)
        assert refused.value.status_code == 413
    assert put(client, lines(1)).id


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"data": {"purpose": "batch"}}, "The form has no file"),
        ({"data": {"purpose": "assistants"}, "files": {"file": b"x"}}, "files here are for 'batch' alone"),
        ({"data": {"file": "x", "purpose": "batch"}, "files": {"other": b"x"}}, "The form has no file"),
    ],
)
def test_a_form_without_its_fields_is_refused(server, form, said):
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    answer = httpx.post(f"{server.url}/v1/files", headers=headers, timeout=HANG_S, **form)
    assert (answer.status_code, said in answer.text) == (400, True), answer.text


def test_a_server_that_is_killed_loses_and_repeats_no_line(folder, tmp_path):
    first = start(folder, tmp_path, "--max-running", "2")  # one line at a time
    client = client_of(first)
    batch = client.batches.create(
        input_file_id=put(client, lines(120, max_tokens=40, ignore_eos=True)).id,
        endpoint=ROUTE,
        completion_window="24h",
    )
    assert within(HANG_S, lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
    first.process.kill()
    first.process.wait(HANG_S)
    second = start(folder, tmp_path)
    try:
        client = client_of(second)
        done = ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 120)
        written = client.files.content(done.output_file_id).text.splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in written) == sorted(f"c{i}" for i in range(120))
        assert _num_answered_by(second) <= 115
    finally:
        assert second.terminate() == 0


def _num_answered_by(server):
    told = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEYS[0]}"}, timeout=HANG_S).text
    return float(re.search(r'^penstock:batch_lines_total{status="200"} (\S+)$', told, flags=re.MULTILINE)[1])


def test_two_servers_do_not_share_a_folder(server, folder):
    other = ServerProcess(str(folder), "--files", str(_files_of(server)))
    assert other.process.wait(HANG_S) == 2
    assert any("Another server keeps its files" in line for line in other.log)


def _files_of(server):
    arguments = server.process.args
    return arguments[arguments.index("--files") + 1]


def test_a_page_of_another_site_puts_no_file_on_a_server_without_a_key(folder):
    server = ServerProcess(str(folder))
    server.wait()
    try:
        form = {"data": {"purpose": "batch"}, "files": {"file": b"x"}}
        url = f"{server.url}/v1/files"
        refused = httpx.post(url, headers={"origin": "https://evil.example"}, timeout=HANG_S, **form)
        assert refused.status_code == 403
        assert httpx.post(url, timeout=HANG_S, **form).status_code == 200
    finally:
        assert server.terminate() == 0
