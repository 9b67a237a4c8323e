"""Requests that coding agents sent while they worked on a task (texts shortened): each is answered."""

import json
from pathlib import Path

import httpx
import pytest
from hang_bound import HANG_S
from scripted_model import playing
from server_process import events

BODIES = sorted((Path(__file__).parents[1] / "client_bodies").glob("*.json"))
ANSWER = "Mended: add now adds."
DELTAS = {"content_block_delta": ("delta", "text"), "response.output_text.delta": ("delta",)}
ENDS = {"message_stop", "response.completed", "[DONE]"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with playing(tmp_path_factory.mktemp("agents"), [ANSWER]) as server:
        yield server


def test_there_are_bodies_of_three_agents():
    assert {path.stem.rpartition("-")[0] for path in BODIES} == {"claude-code", "codex", "opencode"}


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_the_answer_streams_to_its_end(server, path):
    given = json.loads(path.read_text())
    assert given["body"]["stream"]
    with httpx.stream("POST", server.url + given["path"], json=given["body"], timeout=HANG_S) as answer:
        assert answer.status_code == 200, answer.read()
        seen = [event for event in events(answer) if not event.startswith(":")]
    assert "".join(map(text_in, seen)) == ANSWER
    assert seen[-1] in ENDS or json.loads(seen[-1])["type"] in ENDS


def text_in(event):
    if event == "[DONE]":
        return ""
    told = json.loads(event)
    if "choices" in told:
        return "".join(choice["delta"].get("content") or "" for choice in told["choices"])
    for key in DELTAS.get(told["type"], ()):
        told = told[key]
    return told if isinstance(told, str) else ""


def test_the_whole_answer_is_the_same(server):
    for path in BODIES:
        given = json.loads(path.read_text())
        body = given["body"] | {"stream": False}
        body.pop("stream_options", None)
        answer = httpx.post(server.url + given["path"], json=body, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        assert ANSWER in answer.text
