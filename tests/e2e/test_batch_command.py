"""`penstock batch` as users have it: a file of requests, a process that is killed, a file of answers."""

import json
import os
import random
import signal
import subprocess
import sys
from functools import partial

import pytest
from hang_bound import HANG_S, within
from penstock_command import forked, penstock_text
from tiny_models import prompt, save_tiny_model

COMMAND = [sys.executable, "-m", "penstock.cli.main", "batch"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Questions about a few documents, in no order; two of them cannot be answered."""
    documents = [" ".join(f"w{token}" for token in prompt(200, seed=seed)) for seed in range(3)]
    bodies = [{"prompt": f"{documents[index % 3]} w{index}", "max_tokens": 6, "temperature": 0} for index in range(90)]
    bodies += [{"prompt": "w5", "no_such_field": 1}]
    asked = [{"custom_id": f"c{index}", "url": "/v1/completions", "body": body} for index, body in enumerate(bodies)]
    random.Random(3).shuffle(asked)
    path = tmp_path_factory.mktemp("in") / "in.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in asked) + "this is not JSON\n")
    return path


def answers(path):
    """What was answered to whom, without names and times."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    texts = {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"]
        for answer in found
        if answer["response"] and answer["response"]["status_code"] == 200
    }
    return len(found), texts


def has_lines(path, num_lines):
    return path.exists() and path.read_bytes().count(b"\n") >= num_lines


@pytest.fixture(scope="module")
def whole(folder, asked, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "out.jsonl"
    done = penstock_text("batch", asked, path, folder, "--json")
    assert done.returncode == 3, done.stderr
    return path, json.loads(done.stdout)


def test_every_line_is_answered_and_what_is_shared_is_read_once(whole):
    path, counts = whole
    num_answers, texts = answers(path)
    assert (num_answers, len(texts)) == (92, 90)
    assert (counts["num_lines"], counts["num_failed"]) == (92, 2)
    assert counts["cached_tokens"] >= 87 * 192  # all but the first of each document, to its last whole block


def test_a_batch_that_is_killed_is_gone_on_with_and_nothing_is_answered_twice(folder, asked, whole, tmp_path):
    path = tmp_path / "out.jsonl"
    for num_before in (1, 40):
        with open(os.devnull, "rb+", 0) as null:
            process = forked(["batch", *map(str, (asked, path, folder))], files=[null.fileno()] * 3)
        assert within(HANG_S, partial(has_lines, path, num_before))
        process.kill()
        process.wait(HANG_S)
    assert penstock_text("batch", asked, path, folder).returncode == 3
    assert answers(path) == answers(whole[0])
    again = penstock_text("batch", asked, path, folder, "--json")
    assert json.loads(again.stdout)["num_skipped"] == 92
    assert again.returncode == 3


def test_ctrl_c_stops_a_batch_and_says_how_it_goes_on(folder, asked, whole, tmp_path):
    given, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long_lines = [{"prompt": f"w{index}", "max_tokens": 900, "temperature": 0} for index in range(400)]
    given.write_text(asked.read_text() + "".join(json.dumps(one) + "\n" for one in long_lines))
    process = subprocess.Popen([*COMMAND, given, path, folder, "--threads", "1"], stderr=subprocess.PIPE, text=True)
    assert within(HANG_S, partial(has_lines, path, 1))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, "goes on where this one ended" in said) == (130, True), said
    num_answers, texts = answers(path)
    assert 1 <= num_answers < 92 + len(long_lines)
    assert {name: text for name, text in texts.items() if name} == {
        name: text for name, text in answers(whole[0])[1].items() if name in texts
    }


def test_chats_responses_and_embeddings_are_answered_too(tmp_path):
    given = [
        "What is the capital of France?",
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "custom_id": "chat"},
        {"input": "What is the capital of France?", "custom_id": "response"},
        {"url": "/v1/embeddings", "body": {"input": "Paris"}, "custom_id": "embedding"},
    ]
    (tmp_path / "in").write_text("".join(json.dumps(one) + "\n" for one in given))
    done = penstock_text("batch", tmp_path / "in", tmp_path / "out", "--max-tokens", 8, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    assert "answered 4 lines in" in done.stderr
    found = {
        answer["custom_id"]: answer["response"]["body"]
        for answer in map(json.loads, (tmp_path / "out").read_text().splitlines())
    }
    assert "Paris" in found[None]["choices"][0]["message"]["content"]
    assert found["chat"]["choices"] == found[None]["choices"]
    assert "Paris" in found["response"]["output"][0]["content"][0]["text"]
    assert len(found["embedding"]["data"][0]["embedding"]) > 100


def test_files_that_cannot_be_read_or_written_are_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "in").write_text('"hi"\n')
    for given, said in [
        ((tmp_path / "none", tmp_path / "out"), "cannot be read: No such file"),
        ((tmp_path / "in", tmp_path / "in"), "Name two files"),
        ((tmp_path / "in", tmp_path / "no" / "out"), "cannot be written: No such file"),
    ]:
        done = penstock_text("batch", *given, "no-such-model")
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
