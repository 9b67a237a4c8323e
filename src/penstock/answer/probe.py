"""`probe`: finds how a model writes calls and reasoning by what its chat template prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from penstock.answer.events import WrittenAnswer
from penstock.answer.formats import FORMATS, REASONINGS, CallFormat, ReasoningFormat
from penstock.answer.reader import AnswerFormat, AnswerReader
from penstock.errors import InvalidPrompt

_IDS = ("call00001", "functions.a_probe:0")  # some templates want nine letters, some print the id for the name
_NAME, _ARGUMENTS = "a_probe", {"a_key": "a value"}
_SYSTEM = {"role": "system", "content": "!"}  # without which some show no tools
_USER = {"role": "user", "content": "?"}
_SCHEMA = {"type": "object", "properties": {"a_key": {"type": "string", "description": ""}}, "required": ["a_key"]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": _SCHEMA}}
# Of templates that print the values of Python without quotes, or leave the writing of calls to others.
_SIGNS_OF_PYTHON = (f"[{_NAME}(", "<|tool_list_start|>")
Rendered = Callable[..., str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForms:
    """What a chat template shows and expects."""

    prompt: str = ""  # an example
    shows_tools: bool = False
    calls: CallFormat | None = None  # None: it shows none that can be read
    reasoning: ReasoningFormat | None = None
    takes_arguments_as_text: bool = False  # of calls in the history, where most take an object

    @property
    def names(self) -> dict[str, str | None]:
        return {
            "tool_parser": self.calls.name if self.calls else None,
            "reasoning_parser": self.reasoning.name if self.reasoning else None,
        }

    def answer_format(
        self, prompt: str, schemas: Mapping[str, Mapping[str, Any]] | None, *, takes_one_call: bool = False
    ) -> AnswerFormat:
        """Gives the format of an answer to a rendered prompt. `schemas`: of the functions that are offered, if any."""
        reasoning = self.reasoning
        return AnswerFormat(
            calls=None if schemas is None else self.calls,
            reasoning=reasoning,
            schemas=schemas or {},
            is_reasoning_open=reasoning is not None and prompt.rstrip().endswith(reasoning.opening.rstrip()),
            takes_one_call=takes_one_call,
        )


def probe(rendered: Rendered, source: str = "") -> TemplateForms:
    """Reads back a call that the template prints; `source` is the template's, where markers are looked for at last."""

    def shown(*messages: dict[str, Any], **variables: Any) -> str:
        try:
            return rendered(messages, **{"tools": [_TOOL], **variables})
        except InvalidPrompt:
            return ""

    prompt = shown(_USER)
    starts = (prompt, shown(_USER, add_generation_prompt=False))
    turns: list[str] = []  # of the assistant, with a call
    for id_, arguments in product(_IDS, (_ARGUMENTS, json.dumps(_ARGUMENTS))):
        answer = shown(_USER, _called(id_, arguments), add_generation_prompt=False)
        turns = [rest for rest in (_rest(answer, start) for start in starts) if _NAME in rest] or turns
        calls = next((row for row in FORMATS.values() if any(_reads_back(row, turn) for turn in turns)), None)
        if calls is not None:
            break
    else:
        calls, arguments = _announced(prompt, source, turns), _ARGUMENTS
    return TemplateForms(
        prompt=shown(_USER, tools=None),
        shows_tools=any(_NAME in text for text in (prompt, shown(_SYSTEM, _USER))),
        calls=calls,
        reasoning=_reasoning(prompt + source),
        takes_arguments_as_text=isinstance(arguments, str),
    )


def _called(id_: str, arguments: Any) -> dict[str, Any]:
    call = {"id": id_, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _rest(answer: str, start: str) -> str:
    """Gives what follows where an answer departs from a start: the assistant's turn, or what is left of it."""
    same = next((at for at, pair in enumerate(zip(answer, start, strict=False)) if len(set(pair)) > 1), len(start))
    return answer[same:]


def _reads_back(row: CallFormat, text: str) -> bool:
    reader, answer = AnswerReader(AnswerFormat(calls=row)), WrittenAnswer()
    answer.take(reader.push(text) + reader.end())
    found = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    return found == [(_NAME, _ARGUMENTS)]


def _announced(prompt: str, source: str, turns: Sequence[str]) -> CallFormat | None:
    """Finds the format that the template tells the model to write, where it prints no call itself: the one of whose
    markers it names most."""
    if any(sign in text for sign in _SIGNS_OF_PYTHON for text in (prompt, *turns)):
        return FORMATS["pythonic"]
    text = prompt + source
    rows = [row for row in FORMATS.values() if any(mark in text for mark in (*row.openings, *row.starts))]
    return None if turns else max(rows, key=lambda row: sum(mark in text for mark in row.markers), default=None)


def _reasoning(text: str) -> ReasoningFormat | None:
    def is_shown(row: ReasoningFormat) -> bool:
        return row.opening in text or (not row.is_anywhere and row.closing in text)

    return next((row for row in REASONINGS.values() if is_shown(row)), None)
