"""Function tools: how a model's template writes calls, the grammar of a required call, and reading calls back."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.prompts import PromptReader
from penstock.engine.stopping import StopText
from penstock.errors import InvalidPrompt
from penstock.server.openai.answers import CalledFunction, ToolCall
from penstock.server.openai.chat_asks import Function

# JSON without free white space, of which a small model may never stop writing.
ONE_LINE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_PROBE = [{"role": "user", "content": "?"}]
_PROBE_TOOL = {"type": "function", "function": {"name": "a_probe", "description": "", "parameters": {}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A call is `opening`, a JSON object, `closing`; `arguments` is the key that its arguments have."""

    opening: str
    closing: str
    arguments: str


TAGGED = CallFormat(opening="<tool_call>", closing="</tool_call>", arguments="arguments")
BARE = CallFormat(opening="", closing="", arguments="parameters")


def call_format(reader: PromptReader) -> CallFormat:
    """Finds the form of calls that the template shows to the model; a template with no place for tools is refused."""
    with_tools = reader.rendered(_PROBE, tools=[_PROBE_TOOL])
    if "a_probe" not in with_tools:
        raise InvalidPrompt("The model's chat template has no place for tools. Take another model, or leave them out.")
    if TAGGED.opening in with_tools and "<function=" not in with_tools:
        return TAGGED
    if '"parameters"' in with_tools and "<function=" not in with_tools:
        return BARE
    raise InvalidPrompt("The model writes calls in a way that this server does not read. Leave the tools out.")


def call_grammar(form: CallFormat, functions: Sequence[Function]) -> str:
    """Exactly one call of one of the functions."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, form.arguments: function.schema_of_arguments},
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema = json.dumps(({"anyOf": calls} if len(calls) > 1 else calls[0]) | ONE_LINE)
    opening = json.dumps(form.opening + "\n") + " " if form.opening else ""
    closing = " " + json.dumps("\n" + form.closing) if form.closing else ""
    return f"start: {opening}call{closing}\ncall: %json {schema}\n"


class CallReader:
    """Separates the text of an answer from its calls while it is being written; without a format, all is text."""

    def __init__(self, form: CallFormat | None = None, *, takes_one: bool = False) -> None:
        self._form = form
        self._takes_one = takes_one
        self._before = StopText((form.opening,)) if form is not None and form.opening else None
        self._all: list[str] = []
        self._num_shown = 0

    def push(self, text: str) -> str:
        """Returns what is surely no call and may be shown."""
        if self._form is None:
            return text
        self._all.append(text)
        shown = "" if self._before is None else self._before.push(text)
        self._num_shown += len(shown)
        return shown

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Gives (the text that was still held back, the calls). What looks like a call and cannot be read is text."""
        if self._form is None:
            return "", []
        text = "".join(self._all)
        calls = read_calls(self._form, text)[: 1 if self._takes_one else None]
        return ("" if calls else text[self._num_shown :]), calls

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """Gives the text and the calls of an answer that is whole."""
        shown = self.push(text)
        held, calls = self.finish()
        return (shown.strip() if calls else shown + held), calls


def read_calls(form: CallFormat, text: str) -> list[ToolCall]:
    if not form.opening:
        return [call] if (call := _call(form, text)) else []
    pattern = re.escape(form.opening) + r"(.*?)(?:" + re.escape(form.closing) + r"|$)"
    found = [_call(form, inner) for inner in re.findall(pattern, text, flags=re.DOTALL)]
    calls = [call for call in found if call]
    return calls if len(calls) == len(found) else []


def _call(form: CallFormat, text: str) -> ToolCall | None:
    try:
        given = json.loads(text)
    except (RecursionError, ValueError):
        return None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    arguments = given.get(form.arguments, {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = CalledFunction(name=given["name"], arguments=arguments)
    return ToolCall(id=f"call_{secrets.token_hex(12)}", type="function", function=function)
