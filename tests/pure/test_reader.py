"""Answers are read the same way however they arrive, and nothing of them is lost."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.answer.events import CallArguments, CallBegun, CallEnded, ReasoningDelta, TextDelta, WrittenAnswer
from penstock.answer.formats import FORMATS, REASONINGS
from penstock.answer.reader import AnswerFormat, AnswerReader

THINK = REASONINGS["think"]
HERMES = AnswerFormat(calls=FORMATS["hermes"], reasoning=THINK)
LLAMA = AnswerFormat(calls=FORMATS["llama-json"], schemas={"weather": {}})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


def read(form, *pieces):
    """The events of an answer that arrives in pieces, and what they come to."""
    reader = AnswerReader(form)
    events = [event for piece in pieces for event in reader.push(piece)] + reader.end()
    written = WrittenAnswer()
    written.take(events)
    return written, events, reader.num_unread


def told(form, *pieces):
    written, events, num_unread = read(form, *pieces)
    begun = [event.name for event in events if isinstance(event, CallBegun)]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    calls = [(call.name, call.arguments) for call in written.calls]
    return written.text, written.reasoning, calls, begun, arguments, num_unread


def as_text(form, *pieces):
    return told(form, *pieces)[:3]


def test_a_call_is_told_as_it_is_written():
    reader = AnswerReader(HERMES)
    assert reader.push("Let me see.\n<tool_") == [TextDelta(text="Let me see.")]
    assert reader.push('call>\n{"name": "weat') == []
    assert reader.push('her", "arguments"') == []
    (begun, arguments) = reader.push(': {"city": "Bo')
    assert isinstance(begun, CallBegun)
    assert begun.name == "weather"
    assert re.fullmatch("call_[0-9a-f]{24}", begun.id)
    assert arguments == CallArguments(index=0, text='{"city": "Bo')
    assert reader.push('nn"}') == [CallArguments(index=0, text='nn"}')]
    assert reader.push("}") == [CallEnded(index=0)]
    assert reader.push("\n</tool_call>") == reader.end() == []


def test_prose_about_a_marker_flows():
    reader = AnswerReader(HERMES)
    shown = reader.push("Write `<tool_call>` and then") + reader.push(" the call.")
    assert shown == [TextDelta(text="Write `<tool_call>` and then"), TextDelta(text=" the call.")]
    assert reader.num_unread == 1


def test_reasoning_with_and_without_an_opening():
    assert as_text(HERMES, "<think>\nhm\n</think>\n\nYes.") == ("Yes.", "hm", [])
    opened = AnswerFormat(reasoning=THINK, is_reasoning_open=True)
    assert as_text(opened, "\nhm\n</think>\n\nYes.") == ("Yes.", "hm", [])
    assert as_text(opened, "hm, still") == ("", "hm, still", [])
    assert as_text(HERMES, "The tag <think> opens it.") == ("The tag <think> opens it.", "", [])
    assert as_text(HERMES, "\n No thought. \n") == ("\n No thought. \n", "", [])


def test_a_call_ends_the_reasoning_that_was_left_open():
    opened = AnswerFormat(calls=FORMATS["hermes"], reasoning=THINK, is_reasoning_open=True)
    assert as_text(opened, f"I write <tool_call> now.\n{CALL}") == (
        "",
        "I write <tool_call> now.",
        [("weather", '{"city": "Bonn"}')],
    )


def test_the_reasoning_is_told_before_it_ends():
    reader = AnswerReader(HERMES)
    assert reader.push("<think>one ") == [ReasoningDelta(text="one")]
    assert reader.push("two") == [ReasoningDelta(text=" two")]


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"city": tru}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Bo',
        '<tool_call>{"name": "weather"',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        "<tool_call>",
        '<tool_call>{"arguments": {"a": ' + "[" * 100,
    ],
)
def test_what_cannot_be_read_is_text(broken):
    text, _, calls, *_, num_unread = told(HERMES, f"Look:\n{broken} so")
    assert text == f"Look:\n{broken} so"
    assert calls == []
    assert num_unread == 1


@pytest.mark.parametrize(
    "arguments", ['{"a": "x\\ny \\u00e9 /\\/"}', '{ "a":[1,-2.5e3,true,null,{"b":{}}] }', "{}", '{"a": "<tool_call>"}']
)
def test_arguments_are_as_the_model_wrote_them(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert as_text(HERMES, text)[2] == [("f", arguments)]
    held = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'
    assert as_text(HERMES, held)[2] == [("f", arguments)]
    written = json.dumps(arguments)
    assert as_text(HERMES, f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')[2] == [("f", arguments)]


def test_a_line_break_within_a_string_is_escaped():
    call = '<tool_call>{"name": "f", "arguments": {"a": "x\ty\n"}}</tool_call>'
    assert as_text(HERMES, call)[2] == [("f", '{"a": "x\\ty\\n"}')]


def test_bare_json_is_a_call_of_an_offered_function_only():
    call = '{"name": "weather", "parameters": {"city": "Bonn"}}'
    assert as_text(LLAMA, call) == ("", "", [("weather", '{"city": "Bonn"}')])
    assert as_text(LLAMA, f"{call}; {call}\n{call}")[2] == [("weather", '{"city": "Bonn"}')] * 3
    for text in ('{"name": "Bob", "parameters": {}}', f"I write {call}", '{"age": 3}', "{", " {} "):
        assert as_text(LLAMA, text) == (text, "", [])


def test_one_call_alone_where_one_is_asked_for():
    one = AnswerFormat(calls=FORMATS["hermes"], takes_one_call=True)
    assert as_text(one, f"a {CALL}\n{CALL}") == ("a", "", [("weather", '{"city": "Bonn"}')])


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", CALL, "\n", " ", "so", "{", "}", '"', "<", "[1, 2]"),
        *('{"name": ', '"weather"', ', "arguments": ', '{"city": "Bonn"}', "<tool_", "\\", ":", ",", "null", "e5", ";"),
    ]
)


@given(st.lists(PIECES, max_size=12), st.data())
def test_every_cut_tells_the_same(pieces, data):
    text = "".join(pieces)
    form = data.draw(st.sampled_from([HERMES, LLAMA, AnswerFormat(calls=FORMATS["hermes"], is_reasoning_open=True)]))
    whole = told(form, text)
    assert told(form, *text) == whole
    at = data.draw(st.integers(0, len(text)))
    assert told(form, text[:at], text[at:]) == whole
    kept = "".join(whole[:2]) + "".join(name + arguments for name, arguments in whole[2])
    if "<think>" not in text and "</think>" not in text and not whole[2]:
        assert "".join(kept.split()) == "".join(text.split())
