"""How one call reads between the markers around it: its name, then its arguments, which become JSON as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.answer.python_values import python_arguments
from penstock.answer.scanner import Broken, Pieces, Reading, Scanner, collected
from penstock.answer.values import (
    TYPES,
    arguments_object,
    escaped,
    json_string,
    json_value,
    marked_value,
    typed,
    types_of,
)

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_MAX_NAME = 128
_MARKED = {"true": frozenset({"string"}), "false": frozenset(TYPES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Says that from here on it is a call. `id` is empty, or what the model called it."""

    name: str
    id: str = ""


# By the name of a function, the schema of its arguments.
Schemas = Mapping[str, Mapping[str, Any]]
CallReading = Generator[Named | str | None, None, None]


class Notation(Protocol):
    def call(self, scan: Scanner, schemas: Schemas) -> CallReading:
        """Yields the name, then pieces of the arguments' JSON; None where more text is needed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """`{"name": ..., "arguments": {...}}`, under one of a few keys; `is_keyed`: `{name: {...}}`."""

    is_keyed: bool = False

    def call(self, scan: Scanner, schemas: Schemas) -> CallReading:
        yield from scan.must("{")
        yield from scan.space()
        name, held, is_begun = "", "{}", False
        while True:
            key = yield from self._key(scan)
            if self.is_keyed and not is_begun:
                name, key = key, "arguments"
            if key in ("name", "function", "tool_name") and not is_begun:
                name = _name((yield from _text(scan)))
            elif key in ("arguments", "parameters") and name and not is_begun:
                arguments = yield from arguments_object(scan)
                yield Named(name=name)
                yield from arguments
                is_begun = True
            elif key in ("arguments", "parameters") and not is_begun:
                held = yield from collected((yield from arguments_object(scan)))
            elif key in ("id", "type", "tool_call_id") or is_begun:
                yield from collected(json_value(scan))
            else:
                raise Broken
            yield from scan.space()
            if (yield from scan.takes("}")):
                break
            yield from scan.must(",")
            yield from scan.space()
        if not is_begun:
            yield Named(name=_name(name))
            yield held

    def _key(self, scan: Scanner) -> Reading[str]:
        key = yield from _text(scan)
        yield from scan.space()
        yield from scan.must(":")
        yield from scan.space()
        return key


def _text(scan: Scanner) -> Reading[str]:
    written = yield from collected(json_string(scan))
    return json.loads(written)


def _name(text: str) -> str:
    if not text or len(text) > _MAX_NAME or not _NAME.fullmatch(text):
        raise Broken
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJson:
    """A name, then its arguments as a JSON object. `header` matches all before that, with `name` and perhaps `id`."""

    header: re.Pattern[str]

    def call(self, scan: Scanner, schemas: Schemas) -> CallReading:
        match = self.header.fullmatch((yield from scan.header("{")))
        if match is None:
            raise Broken
        yield Named(name=_name(match["name"]), id=match.groupdict().get("id") or "")
        yield from json_value(scan)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOrNamed(NamedJson):
    """Either of the two."""

    def call(self, scan: Scanner, schemas: Schemas) -> CallReading:
        is_json = (yield from scan.peek()) in ("{", "[")
        yield from (JsonCall().call(scan, schemas) if is_json else NamedJson.call(self, scan, schemas))


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlCall:
    """Arguments as elements, whose values are written as they are: the function's schema says what type they have."""

    name: tuple[str, str]  # what stands before and behind it; nothing behind: it ends where a name does
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    padding: str = ""  # around values, and no part of them
    type_mark: str = ""  # behind a key, and followed by whether its value is a string; empty: the schema says so

    def call(self, scan: Scanner, schemas: Schemas) -> CallReading:
        yield from scan.must(self.name[0])
        name = _name((yield from scan.run(_NAME)))
        yield from scan.must(self.name[1])
        yield from scan.space()
        is_empty = yield from scan.takes(self.end)
        if not is_empty:
            yield from scan.must(self.key[0])
        yield Named(name=name)
        schema = schemas.get(name, {})
        properties = schema.get("properties") or {}
        mark = "{"
        while not is_empty:
            key, _, is_text = (yield from scan.header(self.key[1])).partition(self.type_mark or "\0")
            yield from scan.must(self.key[1])
            yield mark + json.dumps(key, ensure_ascii=False) + ": "
            mark = ", "
            yield from self._value(scan, _MARKED.get(is_text) or types_of(properties.get(key), schema))
            yield from scan.space()
            is_empty = yield from scan.takes(self.end)
            if not is_empty:
                yield from scan.must(self.key[0])
        yield "{}" if mark == "{" else "}"

    def _value(self, scan: Scanner, types: frozenset[str]) -> Pieces[None]:
        if self.value[0]:
            yield from scan.space()
            yield from scan.must(self.value[0])
        if self.padding:
            yield from scan.takes(self.padding)
        ends = (self.padding + self.value[1], self.value[1])
        if types <= {"string"}:
            yield '"'
            yield from escaped(scan, *ends)
            yield '"'
        else:
            yield typed((yield from collected(scan.flow(*ends))), types)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCall:
    """`call:name{key:value}` with strings between two of a marker."""

    quote: str

    def call(self, scan: Scanner, schemas: Schemas) -> CallReading:
        yield from scan.must("call:")
        name = _name((yield from scan.run(_NAME)))
        if (yield from scan.peek()) != "{":
            raise Broken
        yield Named(name=name)
        yield from marked_value(scan, self.quote)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCall:
    """`name(key=value)`."""

    def call(self, scan: Scanner, schemas: Schemas) -> CallReading:
        name = _name((yield from scan.run(_NAME)))
        yield from scan.must("(")
        yield Named(name=name)
        yield from python_arguments(scan)
