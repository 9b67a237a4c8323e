"""Grammars, as llguidance reads them, of answers that must be a call or match a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.answer.formats import CallFormat, ReasoningFormat
from penstock.answer.notations import Schemas, XmlCall
from penstock.answer.values import resolved, types_of
from penstock.errors import InvalidPrompt

# JSON without free white space, of which a small model may never stop writing.
ONE_LINE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ANYTHING = "/(.|\\n)*/"


class GrammarWriter:
    """Writes rules; markers that are special tokens of the model stand in them as tokens."""

    def __init__(self, special_tokens: Mapping[str, int], thought: ReasoningFormat | None = None) -> None:
        """`thought`: the reasoning that is open where the answer begins, and is left to the model."""
        self._special_tokens = special_tokens
        self._rules: list[str] = []
        self._start = "" if thought is None else self._up_to(thought.closing) + ' "\\n\\n" '

    def call(self, form: CallFormat, schemas: Schemas) -> str:
        """Exactly one call of one of the functions. Where no grammar has the notation, only its name is held."""
        starts = [self._call(form, name, schema) for name, schema in schemas.items()]
        return self._written(" | ".join(self._rule(start) for start in starts))

    def json(self, schema: Mapping[str, Any], start: str = "") -> str:
        return self._written(f"{self._literal(start)} {self._json(schema)}")

    def _call(self, form: CallFormat, name: str, schema: Mapping[str, Any]) -> str:
        if form.written is not None:
            before, between, after = form.written
            return f"{self._literal(before + name + between)} {self._json(schema)} {self._literal(after)}"
        if form.head is not None:
            tokens = (f"<[{self._special_tokens[one]}]>" for one in self._special_tokens if _is_within(one, form))
            rest = " | ".join([_ANYTHING.replace("*", "+"), *tokens])
            return f"{self._literal(name.join(form.head))} ({rest})*"
        if not isinstance(form.notation, XmlCall):
            raise InvalidPrompt(f"Calls in the format {form.name} cannot be required. Ask with tool_choice auto.")
        xml, (opening, closing) = form.notation, (form.openings[0], form.suffixes[0] if form.suffixes else "")
        head = opening + ("\n" if xml.name[0] else "") + name.join(xml.name) + "\n"
        tail = xml.end + ("\n" + closing if closing else "")
        return " ".join([self._literal(head), *self._members(xml, schema), self._literal(tail)])

    def _members(self, xml: XmlCall, schema: Mapping[str, Any]) -> Iterator[str]:
        known = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for key, given in (schema.get("properties") or {}).items():
            kind = {**known, **resolved(given, schema)} if isinstance(given, Mapping) else {}
            start = key.join(xml.key) + ("\n" + xml.value[0] if xml.value[0] else xml.padding)
            end = xml.padding + xml.value[1] + "\n"
            choices = kind.get("enum")
            if choices and all(isinstance(choice, str) for choice in choices):
                value = "(" + " | ".join(self._literal(choice + end) for choice in choices) + ")"
            elif types_of(kind, schema) <= {"string"}:
                value = self._up_to(end)
            else:
                value = f"{self._json(kind)} {self._literal(end)}"
            member = self._rule(f"{self._literal(start)} {value}")
            yield member if key in (schema.get("required") or ()) else member + "?"

    def _up_to(self, end: str) -> str:
        if any(token in end for token in self._special_tokens):
            return f"{self._rule(_ANYTHING)} {self._literal(end)}"
        return self._rule(_ANYTHING, f"[suffix={_quoted(end)}]")

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps({**schema, **ONE_LINE})}")

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _literal(self, text: str) -> str:
        tokens = [re.escape(token) for token in sorted(self._special_tokens, key=len, reverse=True) if token in text]
        parts = re.split(f"({'|'.join(tokens)})", text) if tokens else [text]
        known = self._special_tokens
        return " ".join(f"<[{known[part]}]>" if part in known else _quoted(part) for part in parts if part)

    def _written(self, start: str) -> str:
        return "\n".join([f"start: {self._start}({start})", *self._rules]) + "\n"


def _is_within(token: str, form: CallFormat) -> bool:
    return any(token in marker for marker in form.markers)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
