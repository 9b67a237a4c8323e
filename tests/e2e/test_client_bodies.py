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


CALLED = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
PARTS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
ASKED = {"role": "user", "content": "Look."}
FOUND = {
    "role": "tool",
    "tool_call_id": "c1",
    "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "."}],
}
USED = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "It.", "is_error": True}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "EqoBCkgIARABGAIiQ"}
SOUGHT = [{"type": "mcp_tool_use", "id": "m1", "name": "seek", "server_name": "s", "input": {}}]


def function(name, **others):
    return {"type": "function", "function": {"name": name, "parameters": PARTS} | others}


def cut(arguments):
    return CALLED | {"function": {"name": "look", "arguments": arguments}}


# What others send: histories as their libraries keep them, and names of what holds here anyway.
CHATS = {
    "what other servers put into a message": [
        ASKED,
        {"role": "assistant", "content": None, "refusal": "", "provider_specific_fields": {"a": 1}, "id": "m1"}
        | {"tool_calls": [CALLED | {"index": 0, "extra_content": {"google": {"thought_signature": "x"}}}]},
        FOUND,
    ],
    "an assistant that said nothing": [ASKED, {"role": "assistant", "content": None}, ASKED],
    "a result that is null": [ASKED, {"role": "assistant", "tool_calls": [CALLED]}, FOUND | {"content": None}],
    "a call that was cut": [ASKED, {"role": "assistant", "content": "", "tool_calls": [cut('{"at": ')]}, FOUND],
    "a call with an object": [ASKED, {"role": "assistant", "content": "", "tool_calls": [cut({"at": "x"})]}, FOUND],
}
FIELDS = {
    "two hundred tools": {"tools": [function(f"look{number}") for number in range(200)]},
    "fields of a tool": {"tools": [function("look", returns={"type": "string"}) | {"strict": True}]},
    "thinking as others ask for it": {"thinking": {"type": "disabled"}},
    "what holds here anyway": {"skip_special_tokens": True, "usage": {"include": True}, "top_logprobs": 0},
    "a schema beside json_object": {"response_format": {"type": "json_object", "schema": PARTS}},
    "a schema beside json_schema": {"response_format": {"type": "json_schema", "schema": PARTS}},
}
TURNS = [ASKED, {"role": "assistant", "content": [THOUGHT, USED]}, {"role": "user", "content": [RESULT]}]
MESSAGES = {
    "signed thoughts": {"messages": TURNS},
    "calls of other servers": {"messages": [ASKED, {"role": "assistant", "content": SOUGHT}, ASKED]},
    "the first name of a format": {"output_format": {"type": "json_schema", "schema": PARTS}},
}
RESPONSES = {
    "a tool that is found later": {"tools": [{"type": "function", "name": "look", "defer_loading": True}]},
    "log-probabilities of none": {"top_logprobs": 0, "stream_options": {"include_obfuscation": True}},
}
OTHERS = [
    *(("/v1/chat/completions", name, {"messages": messages}) for name, messages in CHATS.items()),
    *(("/v1/chat/completions", name, {"messages": [ASKED]} | fields) for name, fields in FIELDS.items()),
    *(("/v1/messages", name, {"messages": [ASKED]} | fields) for name, fields in MESSAGES.items()),
    *(("/v1/messages/count_tokens", name, {"messages": [ASKED]} | fields) for name, fields in MESSAGES.items()),
    *(("/v1/responses", name, {"input": "Look.", "stream": True} | fields) for name, fields in RESPONSES.items()),
]


@pytest.mark.parametrize(("path", "name", "body"), OTHERS, ids=[f"{path}: {name}" for path, name, _ in OTHERS])
def test_what_other_clients_send_is_taken(server, path, name, body):
    limit = {} if "responses" in path else {"max_tokens": 4}
    answer = httpx.post(server.url + path, json={"model": "tiny"} | limit | body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": [ASKED, {"role": "assistant", "content": "It", "prefix": True}]}, "prefix"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "'file'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ],
)
def test_what_would_change_the_answer_is_refused(server, fields, told):
    body = {"model": "tiny", "messages": [ASKED], "max_tokens": 4} | fields
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=HANG_S)
    assert (answer.status_code, told in answer.json()["error"]["message"]) == (400, True), answer.text


def test_the_model_is_told_of_a_call_that_was_cut(server):
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [cut('{"at": ')]}, FOUND]
    tokens = httpx.post(server.url + "/tokenize", json={"messages": messages}, timeout=HANG_S).json()["tokens"]
    text = httpx.post(server.url + "/detokenize", json={"tokens": tokens}, timeout=HANG_S).json()["prompt"]
    assert '{"arguments": "{\\"at\\": "}' in text
