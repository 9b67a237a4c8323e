"""OpenAI's own client, unmodified, against a live server with the default model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import documentation
import httpx
import openai
import pytest
from hang_bound import HANG_S
from server_process import serving

MODEL = "smollm2"
EXAMPLES = Path(__file__).parents[2] / "examples"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server():
    with serving("--memory", "2GiB", is_fresh=True) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json=body, timeout=HANG_S)


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_is_answered_with_its_usage(client):
    first = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=20)
    assert first.choices[0].message.content == "The capital of France is Paris."
    assert first.choices[0].finish_reason == "stop"
    assert first.usage.completion_tokens == 8
    again = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_completion_tokens=3)
    assert again.choices[0].finish_reason == "length"
    assert again.usage.prompt_tokens == first.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == 32


def test_text_parts_are_one_text(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the capital "}]}]
    parts[0]["content"].append({"type": "text", "text": "of France?"})
    answer = client.chat.completions.create(model=MODEL, messages=parts, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."


def test_a_stream_has_one_token_per_event_and_ends_as_clients_expect(client):
    options = {"include_usage": True}
    chunks = [
        *client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=0, max_tokens=5, stream=True, stream_options=options
        )
    ]
    *tokens, end, usage = chunks
    assert [chunk.choices[0].delta.role for chunk in tokens] == ["assistant", None, None, None, None]
    assert "".join(chunk.choices[0].delta.content for chunk in tokens) == "The capital of France is"
    assert end.choices[0].finish_reason == "length"
    assert end.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(tokens) == 5


def test_choices_have_seeds_of_their_own_and_a_seed_repeats(client):
    ask = {"model": MODEL, "messages": FRANCE, "temperature": 1.5, "max_tokens": 5, "seed": 5}
    choices = client.chat.completions.create(**ask, n=3).choices
    assert len({choice.message.content for choice in choices}) > 1
    first, again = (client.chat.completions.create(**ask).choices[0].message.content for _ in range(2))
    assert first == again


def test_streamed_choices_are_told_apart(client):
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(
        model=MODEL, messages=FRANCE, n=2, temperature=0, max_tokens=4, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "The capital of France", 1: "The capital of France"}


def test_stop_strings_bias_and_least_length(client):
    ask = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 20}
    stopped = client.chat.completions.create(**ask, stop=[" France"])
    assert stopped.choices[0].message.content == "The capital of"
    assert stopped.choices[0].finish_reason == "stop"
    longer = client.chat.completions.create(**ask, extra_body={"min_tokens": 10})
    assert longer.usage.completion_tokens >= 10
    full = client.chat.completions.create(**ask | {"max_tokens": 10}, extra_body={"ignore_eos": True})
    assert full.usage.completion_tokens == 10
    comma = post_tokens(client, ",")
    biased = client.chat.completions.create(**ask | {"max_tokens": 2}, logit_bias={str(comma): 100})
    assert biased.choices[0].message.content == ",,"


def post_tokens(client, text):
    answer = client.completions.create(model=MODEL, prompt=text, max_tokens=1, temperature=0, logprobs=0, echo=True)
    assert answer.usage.prompt_tokens == 1
    probed = client.completions.create(model=MODEL, prompt=text, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert probed.choices[0].model_extra["prompt_logprobs"] == [None]
    body = {"model": MODEL, "prompt": f"a{text}", "max_tokens": 1, "extra_body": {"prompt_logprobs": 0}}
    (token,) = client.completions.create(**body).choices[0].model_extra["prompt_logprobs"][1]
    return token


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [one.token for one in content] == ["The", " capital", " of"]
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in content)
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert bytes(content[1].bytes).decode() == " capital"


def test_completions_of_texts_and_tokens_agree(client):
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    by_text = client.completions.create(prompt="The capital of France is", **ask)
    scored = client.completions.create(prompt="The capital of France is", **ask, extra_body={"prompt_logprobs": 0})
    places = scored.choices[0].model_extra["prompt_logprobs"]
    assert places[0] is None
    assert [next(iter(place.values()))["decoded_token"] for place in places[1:]] == [
        " capital",
        " of",
        " France",
        " is",
    ]
    several = client.completions.create(prompt=["The capital of France is", "One, two, three,"], **ask)
    assert several.choices[0].text == by_text.choices[0].text == scored.choices[0].text
    assert several.choices[1].text == " four, five,"
    assert several.usage.prompt_tokens > by_text.usage.prompt_tokens
    ids = [504, 3575, 282, 4649, 314]
    assert client.completions.create(prompt=ids, **ask).choices[0].text == by_text.choices[0].text
    assert [c.text for c in client.completions.create(prompt=[ids, ids], **ask).choices] == [
        by_text.choices[0].text
    ] * 2


def test_a_prompt_can_be_echoed_and_scored_without_writing(client):
    ask = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "logprobs": 1, "echo": True}
    scored = client.completions.create(**ask, max_tokens=0)
    (choice,) = scored.choices
    assert choice.text == "The capital of France is"
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == 5
    assert choice.logprobs.text_offset == [0, 3, 11, 14, 21]
    assert scored.usage.completion_tokens == 0
    written = client.completions.create(**ask, max_tokens=2)
    assert written.choices[0].logprobs.token_logprobs[:5] == pytest.approx(
        choice.logprobs.token_logprobs[:5], nan_ok=True
    )
    assert written.choices[0].text == "The capital of France is Paris."


def test_a_completion_is_streamed_with_its_echo(client):
    parts = [
        chunk.choices[0].text
        for chunk in client.completions.create(
            model=MODEL, prompt="One, two,", temperature=0, max_tokens=3, echo=True, stream=True
        )
    ]
    assert parts[0] == "One, two,"
    assert len(parts) == 1 + 3 + 1


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"messages": FRANCE, "frobnicate": 1}, 400, "frobnicate"),
        ({"messages": FRANCE, "temperature": "warm"}, 400, "temperature"),
        ({"messages": FRANCE, "temperature": -1}, 400, "temperature"),
        ({"messages": FRANCE, "n": 99}, 400, "16"),
        ({"messages": []}, 400, "messages"),
        ({"messages": FRANCE, "model": "gpt-4"}, 404, "gpt-4"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 413, "8192"),
        ({"messages": FRANCE, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"messages": FRANCE, "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"messages": FRANCE, "stream_options": {"include_usage": True}}, 400, "stream"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_usual_shape(server, body, status, word):
    answer = post(server, "/v1/chat/completions", **{"model": MODEL} | body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert word in error["message"] or word == error["param"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert answer.headers["x-request-id"] == error["request_id"]
    assert server.logs(error["request_id"])


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=FRANCE)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=200)


def test_inert_fields_are_accepted(server):
    inert = {"user": "somebody", "metadata": {"a": "b"}, "store": False, "audio": None, "service_tier": "auto"}
    assert post(server, "/v1/chat/completions", model=MODEL, messages=FRANCE, max_tokens=1, **inert).status_code == 200


def test_broken_bodies_and_unknown_paths_have_the_same_shape(server):
    broken = httpx.post(f"{server.url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert "JSON" in broken.json()["error"]["message"]
    half = httpx.post(
        f"{server.url}/v1/completions",
        content=b'{"model": "smollm2", "prompt": "\\ud800"}',
        headers={"content-type": "application/json"},
    )
    assert half.status_code == 400
    missing = httpx.get(f"{server.url}/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


def test_chat_talks_to_a_server_and_remembers(server):
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "chat", "--url", server.url, "--max-tokens", "12"],
        input="What is the capital of France?\nAnd what is it known for?\n",
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris.")
    first, second = re.findall(r"read (\d+) tokens \((\d+) of them cached\)", done.stderr)
    assert int(second[0]) > int(first[0])
    assert int(second[1]) >= 32


def test_chat_says_when_there_is_no_server():
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "chat", "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert "cannot be reached" in done.stderr


def test_the_examples_run(server):
    environment = os.environ | {"PENSTOCK_URL": server.url}
    example = subprocess.run(
        [sys.executable, EXAMPLES / "openai_client.py"], env=environment, capture_output=True, text=True
    )
    assert example.returncode == 0, example.stderr
    assert "answer: The capital of France is Paris." in example.stdout
    assert "schema: {" in example.stdout
    assert "embedding: 576 numbers" in example.stdout
    shell = subprocess.run([EXAMPLES / "curl.sh"], env=environment, capture_output=True, text=True)
    assert shell.returncode == 0, shell.stderr
    assert "[DONE]" in shell.stdout


def test_the_guide_for_servers_is_true(server):
    """Its programs and commands, but for those that start a server or install one."""
    guide = Path(__file__).parents[2] / "docs" / "guides" / "serve.md"
    shown = [
        (language, code.replace("http://127.0.0.1:8000", server.url))
        for _, language, code in documentation.blocks(guide)
    ]
    (program,) = [code for language, code in shown if language == "py"]
    exec(program, {})
    lines = [line for language, code in shown if language == "sh" for line in code.splitlines() if server.url in line]
    assert len(lines) == 2
    for line in lines:
        command = line.replace("penstock", f"{sys.executable} -m penstock.cli.main", 1)
        done = subprocess.run(
            ["bash", "-c", command], input="Hello\n\n", capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
