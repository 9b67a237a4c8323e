"""Requests that coding agents sent while they worked on a task (texts shortened): each is answered."""

import json
from pathlib import Path

import httpx
import pytest
from hang_bound import HANG_S
from scripted_model import call, playing
from server_process import events

BODIES = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parents[1] / "client_bodies").iterdir()}
ANSWER = "Mended: add now adds."
# By the type of an event, where it has what the model wrote.
TEXTS = {"content_block_delta": ("delta", "text"), "response.output_text.delta": ("delta",)}
NAMES = {"content_block_start": ("content_block", "name"), "response.output_item.added": ("item", "name")}
ARGUMENTS = {
    "content_block_delta": ("delta", "partial_json"),
    "response.function_call_arguments.delta": ("delta",),
}
ENDS = {"message_stop", "response.completed", "[DONE]"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Answers with the call that a body is marked with, where its function is offered."""
    calls = [given["call"] for given in BODIES.values() if "call" in given]
    scripts = {f'"{one["name"]}"': [call(one["name"], **one["arguments"])] for one in calls} | {"": [ANSWER]}
    with playing(tmp_path_factory.mktemp("agents"), scripts) as server:
        yield server


def test_there_are_bodies_of_many_agents():
    known = {"aider", "anthropic", "claude-code", "codex", "langchain", "llm", "opencode", "pydantic-ai", "smolagents"}
    assert {name.rpartition("-")[0] for name in BODIES} == known


def asked(given, *, stream):
    body = given["body"] | {"stream": stream}
    if not stream:
        body.pop("stream_options", None)
    return body


@pytest.mark.parametrize("name", sorted(BODIES))
def test_the_answer_streams_to_its_end(server, name):
    given = BODIES[name]
    body = asked(given, stream=True)
    with httpx.stream("POST", server.url + given["path"], json=body, timeout=HANG_S) as answer:
        assert answer.status_code == 200, answer.read()
        seen = [event for event in events(answer) if not event.startswith(":")]
    assert seen[-1] in ENDS or json.loads(seen[-1])["type"] in ENDS
    text, called, arguments = ("".join(parts) for parts in zip(*map(told, seen), strict=True))
    if expected := given.get("call"):
        assert (text, called, json.loads(arguments)) == ("", expected["name"], expected["arguments"])
    else:
        assert (text, called, arguments) == (ANSWER, "", "")


def told(event):
    """The text, the name and the arguments that an event brings."""
    if event == "[DONE]":
        return "", "", ""
    document = json.loads(event)
    if "choices" in document:
        deltas = [choice["delta"] for choice in document["choices"]]
        functions = [one["function"] for delta in deltas for one in delta.get("tool_calls", ())]
        texts = [delta.get("content") or "" for delta in deltas]
        return "".join(texts), *("".join(one.get(key, "") for one in functions) for key in ("name", "arguments"))
    return found(document, TEXTS), found(document, NAMES), found(document, ARGUMENTS)


def found(document, paths):
    for key in paths.get(document["type"], ()):
        document = document.get(key, "")
    return document if isinstance(document, str) else ""


def test_the_whole_answer_is_the_same(server):
    for given in BODIES.values():
        answer = httpx.post(server.url + given["path"], json=asked(given, stream=False), timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        assert (given["call"]["name"] if "call" in given else ANSWER) in answer.text


def test_a_call_says_that_it_is_one_of_a_function(server):
    """Clients that hold answers to a schema refuse it otherwise."""
    (choice,) = httpx.post(
        server.url + "/v1/chat/completions", json=asked(BODIES["pydantic-ai-1"], stream=False), timeout=HANG_S
    ).json()["choices"]
    assert [call["type"] for call in choice["message"]["tool_calls"]] == ["function"]
