"""Function tools: the grammar of a required call, and calls in the shape of chats."""

from __future__ import annotations

import json
from collections.abc import Sequence

from penstock.answer.events import WrittenCall
from penstock.answer.formats import CallFormat
from penstock.errors import InvalidPrompt
from penstock.server.openai.answers import CalledFunction, ToolCall
from penstock.server.openai.chat_asks import Function

# JSON without free white space, of which a small model may never stop writing.
ONE_LINE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def call_grammar(form: CallFormat, functions: Sequence[Function]) -> str:
    """Exactly one call of one of the functions."""
    if form.written is None:
        raise InvalidPrompt(
            f"Calls in the format {form.name} cannot be held to a grammar. Ask with tool_choice auto, or leave it out."
        )
    before, between, after = form.written
    rules = [f"start: {' | '.join(f'call_{index}' for index, _ in enumerate(functions))}"]
    for index, function in enumerate(functions):
        head, schema = json.dumps(before + function.name + between), json.dumps(function.schema_of_arguments | ONE_LINE)
        rules += [f"call_{index}: {head} arguments_{index} {json.dumps(after)}", f"arguments_{index}: %json {schema}"]
    return "\n".join(rules) + "\n"


def tool_call(call: WrittenCall) -> ToolCall:
    return ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
