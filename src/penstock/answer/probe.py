"""`probe`: finds how a model writes calls and reasoning by what its chat template prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.answer.events import WrittenAnswer
from penstock.answer.formats import FORMATS, REASONINGS, CallFormat, ReasoningFormat
from penstock.answer.reader import AnswerFormat, AnswerReader
from penstock.errors import InvalidPrompt

_NAME, _ARGUMENTS = "a_probe", {"a_key": "a value"}
_USER = {"role": "user", "content": "?"}
_SCHEMA = {"type": "object", "properties": {"a_key": {"type": "string", "description": ""}}, "required": ["a_key"]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": _SCHEMA}}
Rendered = Callable[..., str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForms:
    """What a chat template shows and expects."""

    shows_tools: bool = False
    calls: CallFormat | None = None  # None: it shows none that can be read
    reasoning: ReasoningFormat | None = None
    takes_arguments_as_text: bool = False  # of calls in the history, where most take an object

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
            return rendered([_USER, *messages], **variables)
        except InvalidPrompt:
            return ""

    prompt = shown(tools=[_TOOL])
    calls, takes_text = None, False
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        answer = shown(_called(arguments), tools=[_TOOL], add_generation_prompt=False)
        starts = (prompt, shown(tools=[_TOOL], add_generation_prompt=False))
        calls = next(
            (row for rest in _rests(answer, starts) for row in FORMATS.values() if _reads_back(row, rest)), None
        )
        if calls is not None:
            takes_text = isinstance(arguments, str)
            break
    return TemplateForms(
        shows_tools=_NAME in prompt,
        calls=calls or _announced(prompt),
        reasoning=_reasoning(prompt + source),
        takes_arguments_as_text=takes_text,
    )


def _called(arguments: Any) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


def _rests(answer: str, starts: tuple[str, ...]) -> Iterator[str]:
    """Gives what follows in an answer where it departs from each start: the assistant's turn, or what is left of it."""
    for start in starts:
        same = next((at for at, pair in enumerate(zip(answer, start, strict=False)) if len(set(pair)) > 1), len(start))
        yield answer[same:]


def _reads_back(row: CallFormat, text: str) -> bool:
    reader, answer = AnswerReader(AnswerFormat(calls=row)), WrittenAnswer()
    answer.take(reader.push(text) + reader.end())
    found = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    return found == [(_NAME, _ARGUMENTS)]


def _announced(prompt: str) -> CallFormat | None:
    """Finds the format whose opening the template tells the model to write."""
    rows = [row for row in FORMATS.values() if any(mark in prompt for mark in (*row.openings, *row.starts))]
    return rows[0] if rows else None


def _reasoning(text: str) -> ReasoningFormat | None:
    return next((row for row in REASONINGS.values() if row.opening in text or row.closing in text), None)
