"""Grammars, as llguidance reads them, of answers that must be a call or match a schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.answer.formats import CallFormat, ReasoningFormat
from penstock.answer.notations import MarkedCall, PythonCall, Schemas, XmlCall
from penstock.answer.rules import ANY_KEY, BareText, Rules, ValueWriter
from penstock.answer.values import resolved, types_of


class GrammarWriter:
    """Writes rules; markers that are special tokens of the model stand in them as tokens."""

    def __init__(self, special_tokens: Mapping[str, int], thought: ReasoningFormat | None = None) -> None:
        """`thought`: the reasoning that is open where the answer begins, and is left to the model."""
        self._rules = Rules(special_tokens)
        self._start = "" if thought is None else self._rules.up_to(thought.closing) + ' "\\n\\n" '

    def call(self, form: CallFormat, schemas: Schemas) -> str:
        """Exactly one call of one of the functions."""
        starts = [self._call(form, name, schema) for name, schema in schemas.items()]
        return self._rules.written(f"{self._start}({' | '.join(map(self._rules.add, starts))})")

    def json(self, schema: Mapping[str, Any], start: str = "") -> str:
        return self._rules.written(f"{self._start}({self._rules.literal(start)} {self._rules.json(schema)})")

    def _call(self, form: CallFormat, name: str, schema: Mapping[str, Any]) -> str:
        literal = self._rules.literal
        if form.written is not None:
            before, between, after = form.written
            values = ValueWriter(self._rules, form.notation, schema)
            is_json = not isinstance(form.notation, MarkedCall | PythonCall)
            arguments = self._rules.json(schema) if is_json else f"({values.arguments()})"
            return f"{literal(before + name + between)} {arguments} {literal(after)}"
        assert isinstance(form.notation, XmlCall), f"calls in the format {form.name} have no grammar"
        xml, (opening, closing) = form.notation, (form.openings[0], form.suffixes[0] if form.suffixes else "")
        head = opening + ("\n" if xml.name[0] else "") + name.join(xml.name) + "\n"
        tail = xml.end + ("\n" + closing if closing else "")
        return " ".join([literal(head), *self._elements(xml, schema), literal(tail)])

    def _elements(self, xml: XmlCall, schema: Mapping[str, Any]) -> Iterator[str]:
        """The arguments in the order of the schema; any, where it names none."""
        values, further = ValueWriter(self._rules, xml, schema), schema.get("additionalProperties", {})
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        for key, given in properties.items() or ([(None, further)] if further is not False else []):
            forms = values.forms(given) if xml.type_mark else self._bare_forms(values, given, schema)
            element = self._element(xml, ANY_KEY if key is None else self._rules.literal(key), forms)
            yield element + ("*" if key is None else "" if key in required else "?")

    def _element(self, xml: XmlCall, key: str, forms: Iterable[str | BareText]) -> str:
        literal, end = self._rules.literal, xml.padding + xml.value[1] + "\n"
        values: dict[str, list[str]] = {}  # by what stands behind the key
        for form in forms:
            is_text = isinstance(form, BareText)
            value = f"({form}) {literal(end)}" if not is_text else literal((form.value or "") + end)
            if is_text and form.value is None:
                value = f"{self._rules.up_to(xml.value[1])} {literal(end[-1])}"
            mark = xml.type_mark and xml.type_mark + ("true" if is_text else "false")
            values.setdefault(mark, []).append(value)
        space = "\n" + xml.value[0] if xml.value[0] else xml.padding
        starts = {mark: f"{literal(xml.key[0])} {key} {literal(mark + xml.key[1] + space)}" for mark in values}
        return self._rules.add(" | ".join(f"{starts[mark]} ({' | '.join(values[mark])})" for mark in values))

    def _bare_forms(self, values: ValueWriter, given: Any, schema: Mapping[str, Any]) -> Iterator[str | BareText]:
        """Yields what a value may be whose type the schema alone tells; any text where it may be any string."""
        known = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        types = types_of(given, schema)
        if types and "string" not in types:
            yield self._rules.json({**known, **resolved(given, schema)})
        else:
            forms = [*values.forms(given)]
            yield from [BareText(None)] if BareText(None) in forms else forms
