"""Lines of a batch, their order, the file of answers and how a batch runs, without a model."""

import asyncio
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch.answers import AnswerFile
from penstock.batch.lines import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    InvalidLine,
    Line,
    in_order,
    lines_of,
    read_line,
)
from penstock.batch.run import Batch, BatchCounts
from penstock.errors import EngineClosed, InvalidSetting

DEFAULTS = {"model": "m", "max_tokens": 9, "temperature": 0.0}


def line(value, number=1):
    return Line(number=number, raw=value if isinstance(value, bytes) else json.dumps(value).encode())


def lines(values):
    return lines_of(io.BytesIO(b"".join(json.dumps(value).encode() + b"\n" for value in values)))


async def echo(route, body, request_id):
    """Answers with what was asked; the word `refuse` is refused, `down` meets an engine that has ended."""
    await asyncio.sleep(0)
    said = json.loads(body).get("prompt")
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    status = {"refuse": 400, "down": 503}.get(said, 200)
    return status, json.dumps({"said": said, "usage": usage}).encode()


def run(path, source, post=echo, most=4):
    answers = AnswerFile(path)
    seen = []
    try:
        batch = Batch(post, answers, defaults=DEFAULTS, most_at_once=most, watch=lambda c: seen.append(c.num_bytes))
        asyncio.run(batch.run(source))
    finally:
        answers.close()
    assert seen == sorted(seen)
    return batch.counts, answers


def answered(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("value", "route", "body"),
    [
        ("hi", CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ({"prompt": "hi", "max_tokens": 3}, COMPLETIONS, {"prompt": "hi", "max_tokens": 3}),
        ({"custom_id": "a", "messages": []}, CHAT, {"messages": []}),
        ({"url": EMBEDDINGS, "method": "POST", "body": {"input": "x"}}, EMBEDDINGS, {"input": "x"}),
        ({"url": RESPONSES, "body": {"input": "x", "temperature": 1}}, RESPONSES, {"input": "x", "temperature": 1}),
    ],
)
def test_a_line_is_openais_form_or_a_body_or_a_text(value, route, body):
    ask = read_line(line(value), DEFAULTS)
    names = {RESPONSES: ["model", "max_output_tokens", "temperature"], EMBEDDINGS: ["model"]}
    assert ask.route == route
    assert body.items() <= ask.body.items()
    assert set(ask.body) == {*body, *names.get(route, DEFAULTS)}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (3, "is a JSON int"),
        ({"custom_id": 3, "prompt": "x"}, "custom_id is no text"),
        ({"custom_id": "a", "body": []}, "body is no object"),
        ({"custom_id": "a"}, "has no url"),
        ({"custom_id": "a", "url": "/v1/models", "body": {}}, "'/v1/models'"),
        ({"custom_id": "a", "url": [1], "body": {}}, "url is"),
        ({"custom_id": "a", "method": "GET", "prompt": "x"}, "'GET'"),
        ({"custom_id": "a", "prompt": "x", "stream": True}, "answers of a batch come whole"),
    ],
)
def test_a_line_that_asks_for_nothing_says_why_and_keeps_its_name(value, said, tmp_path):
    with pytest.raises(InvalidLine, match=said):
        read_line(line(value), {})
    run(tmp_path / "out", iter([line(value)]))
    [answer] = answered(tmp_path / "out")
    assert answer["response"] is None
    assert said in answer["error"]["message"]
    assert answer["custom_id"] == ("a" if isinstance(value, dict) and value["custom_id"] == "a" else None)


def test_a_line_that_is_too_long_is_refused_and_the_next_one_is_read(monkeypatch):
    monkeypatch.setattr("penstock.batch.lines.MAX_LINE_BYTES", 20)
    long, short = lines_of(io.BytesIO(b'"' + b"x" * 50 + b'"\n\n"hi"\n'))
    assert (long.number, short.number) == (1, 3)
    assert read_line(short, {}).shared == '[{"role": "user", "content": "hi"}]'
    with pytest.raises(InvalidLine, match="longer than 20 bytes"):
        read_line(long, {})


@given(st.lists(st.text("ab", max_size=4), max_size=30), st.integers(0, 40_000))
def test_every_line_comes_once_and_equal_beginnings_come_together(texts, window_bytes):
    found = list(in_order(lines(texts), window_bytes))
    assert sorted(one.number for one in found) == [*range(1, len(texts) + 1)]
    if window_bytes == 40_000:
        assert [json.loads(one.raw) for one in found] == sorted(texts)


def test_lines_that_wait_take_no_more_than_a_window():
    taken = 0

    def endless():
        nonlocal taken
        for taken in range(1, 10**9):
            yield line({"prompt": "x" * 1000}, number=taken)

    ordered = in_order(endless(), 100_000)
    assert next(ordered).number == 1
    assert taken < 100


def test_answers_tell_the_line_the_status_and_the_body(tmp_path):
    counts, answers = run(tmp_path / "out", lines([{"custom_id": "ü", "prompt": "x"}, {"prompt": "refuse"}]))
    first, second = sorted(answered(tmp_path / "out"), key=lambda answer: answer["response"]["status_code"])
    assert first["custom_id"] == "ü"
    assert first["id"] == first["response"]["request_id"]
    assert first["response"]["body"]["said"] == "x"
    assert (first["error"], second["response"]["status_code"], second["custom_id"]) == (None, 400, None)
    assert (answers.num_failed, counts.num_lines, counts.prompt_tokens, counts.cached_tokens) == (1, 2, 6, 2)


def test_a_batch_that_was_cut_at_any_byte_is_gone_on_with(tmp_path):
    asked = [{"custom_id": f'"{index}\\', "prompt": "refuse" if index == 2 else "x"} for index in range(4)]
    run(tmp_path / "whole", lines(asked), most=1)
    whole = (tmp_path / "whole").read_bytes()
    for cut in range(len(whole) + 1):
        (tmp_path / "out").write_bytes(whole[:cut])
        counts, answers = run(tmp_path / "out", lines(asked), most=1)
        assert (tmp_path / "out").read_bytes() == whole
        assert counts.num_skipped == whole[:cut].count(b"\n")
        assert answers.num_failed == 1


def test_answers_to_another_input_are_refused(tmp_path):
    run(tmp_path / "out", lines([{"prompt": "x"}]))
    with pytest.raises(InvalidSetting, match="another line 1: it belongs to another input"):
        run(tmp_path / "out", lines([{"prompt": "y"}]))
    (tmp_path / "notes").write_text("my notes\n")
    with pytest.raises(InvalidSetting, match="no answer of a batch"):
        AnswerFile(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "my notes\n"


def test_two_batches_do_not_write_one_file(tmp_path):
    first = AnswerFile(tmp_path / "out")
    with pytest.raises(InvalidSetting, match="Another batch writes"):
        AnswerFile(tmp_path / "out")
    first.close()
    AnswerFile(tmp_path / "out").close()
    with pytest.raises(InvalidSetting, match="cannot be written: Is a directory"):
        AnswerFile(tmp_path)


def test_what_an_ending_engine_did_not_answer_is_left_for_the_next_run(tmp_path):
    with pytest.raises(EngineClosed, match="goes on where it ended"):
        run(tmp_path / "out", lines([{"prompt": "down"}]))
    assert answered(tmp_path / "out") == []


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_lines_are_asked_at_once_than_may_be(tmp_path, most):
    running = most_running = 0

    async def count(route, body, request_id):
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        answer = await echo(route, body, request_id)
        running -= 1
        return answer

    run(tmp_path / "out", lines([{"prompt": str(index)} for index in range(20)]), count, most)
    assert most_running == most


def test_usage_of_every_api_is_counted():
    counts = BatchCounts()
    counts.add_usage({"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}})
    counts.add_usage({"prompt_tokens": 1, "total_tokens": 1})
    assert (counts.prompt_tokens, counts.cached_tokens, counts.written_tokens) == (6, 4, 2)
