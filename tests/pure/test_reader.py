"""Answers are read the same way however they arrive, and nothing of them is lost."""

import json
import re

import pytest
from call_templates import CALLS, template
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


# --- every family ---

GIVEN = [("weather", {"city": 'a "b"\n<c> \u00e9', "days": 3, "near": [1, {"x": None}]}), ("clock", {})]
SCHEMAS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "near": {"type": "array"}}},
    "clock": {"properties": {}},
}


def answer_of(name, given, content="Let me see."):
    """What a model of a family writes: some text, then calls."""
    calls = [
        {"id": f"functions.{called}:{index}", "type": "function", "function": {"name": called, "arguments": arguments}}
        for index, (called, arguments) in enumerate(given)
    ]
    user = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": content, "tool_calls": calls}
    printed = template(CALLS[name])
    start = printed.render([user])
    text = printed.render([user, answer], add_generation_prompt=False)
    assert text.startswith(start)
    return text.removeprefix(start).removesuffix("<|over|>\n")


def given_of(name):
    """Python has no null, and a model that writes it as Gemma does has no such strings."""
    (called, arguments), clock = GIVEN
    return [(called, arguments | {"near": [1, {"x": 2}]}), clock] if name == "pythonic" else GIVEN


def form_of(name):
    reasoning = REASONINGS["harmony"] if name == "harmony" else THINK
    return AnswerFormat(calls=FORMATS[name], schemas=SCHEMAS, reasoning=reasoning)


def calls_of(form, *pieces):
    text, reasoning, calls, *_, num_unread = told(form, *pieces)
    return text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls], num_unread


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_a_family_are_read_at_every_cut(name):
    is_bare = bool(FORMATS[name].bare_start) and name != "json-list"
    content = "" if is_bare or name == "harmony" else "Let me see."
    if name in ("gemma4", "functiongemma"):
        given = [("weather", {"city": 'a "b"\n<c> \u00e9', "days": 3}), ("clock", {})]
    else:
        given = given_of(name)
    form, text = form_of(name), answer_of(name, given, content)
    expected = (content, "Hm." if name == "harmony" else "", given, 0)
    assert calls_of(form, text) == expected
    assert calls_of(form, *text) == expected
    for at in range(len(text)):
        assert calls_of(form, text[:at], text[at:]) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_a_family_that_is_cut_off_is_text(name):
    form, text = form_of(name), answer_of(name, [("weather", {"city": "Bonn"})], "")
    at = text.index("Bonn") + 2
    written, events, num_unread = read(form, text[:at])
    start = text[:at].removeprefix("<|channel|>analysis<|message|>Hm.<|end|>")
    shown = start.removeprefix("<|start|>assistant<|channel|>commentary ")
    assert (written.text.strip(), written.calls, num_unread) == (shown.strip(), [], 1)
    streamed = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert streamed.startswith('{"city": "Bo')


@pytest.mark.parametrize("name", FORMATS)
def test_no_marker_begins_another(name):
    row = FORMATS[name]
    for reasoning in REASONINGS.values():
        marks = [*row.openings, *row.starts, reasoning.opening, reasoning.closing, *reasoning.ignored]
        found = [(one, other) for one in marks for other in marks if other != one and other.startswith(one)]
        assert found == []


@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_broken_calls_of_every_family_lose_nothing_and_raise_nothing(name, data):
    text = answer_of(name, [("weather", {"city": "Bonn", "days": 3}), ("clock", {})], "")
    at, num_cut = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 5))
    put = data.draw(st.sampled_from(["", "x", '"', "}", "<", "]", "\\", "\n", "=", ")"]))
    broken = text[:at] + put + text[at + num_cut :]
    whole = told(form_of(name), broken)
    assert told(form_of(name), *broken) == whole
    cut = data.draw(st.integers(0, len(broken)))
    assert told(form_of(name), broken[:cut], broken[cut:]) == whole
    if not whole[2] and name != "harmony":
        assert "".join(whole[0].split()) == "".join(broken.split())


def test_what_harmony_says_is_told_apart():
    form = AnswerFormat(reasoning=REASONINGS["harmony"])
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes, 2 < 3."
    assert as_text(form, text) == as_text(form, *text) == ("Yes, 2 < 3.", "Hm.", [])


def test_the_ids_of_calls_are_those_that_the_family_takes():
    text = answer_of("kimi-k2", GIVEN)
    assert [call.id for call in read(form_of("kimi-k2"), text)[0].calls] == ["functions.weather:0", "functions.clock:1"]
    (call, _) = read(form_of("mistral"), answer_of("mistral", GIVEN))[0].calls
    assert re.fullmatch("[0-9a-f]{9}", call.id)
