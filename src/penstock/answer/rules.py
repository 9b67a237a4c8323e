"""`Rules`: a grammar, as llguidance reads it, while it is written. `ValueWriter`: the values that match a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

from penstock.answer.notations import Notation, PythonCall, XmlCall
from penstock.answer.python_values import KEY
from penstock.answer.values import MAX_DEPTH, TYPES, WORDS, resolved

# JSON without free white space, of which a small model may never stop writing.
ONE_LINE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ANYTHING = "/(.|\\n)*/"
_KINDS = ("string", *TYPES)
_MAX_RULES, _MAX_VARIANTS = 4096, 256  # of the arguments of a function, and of a value; what is beyond is not held
_MAX_COUNT, _MAX_NUMBER = 1024, 10**18
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,99}/"
_DOUBLE_QUOTED = r"/\"([^\"\\\x00-\x1f\x7f]|\\[\"\\bfnrt])*\"/"
_SINGLE_QUOTED = r"/'([^'\\\x00-\x1f\x7f]|\\(['\"\\nrtbf]|x[0-9a-f]{2}|u[0-9a-cef][0-9a-f]{3}))*'/"
_INTEGER = "-?(0|[1-9][0-9]{0,17})"
_NUMBERS = {"integer": f"/{_INTEGER}/", "number": f"/{_INTEGER}(\\.[0-9]{{1,17}})?([eE][+-]?[0-9]{{1,2}})?/"}
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# What a schema that names no type is about.
_SIGNS = {"properties": "object", "required": "object", "items": "array", **dict.fromkeys(_BOUNDS, "number")}


class Rules:
    """Names the rules; markers that are special tokens of the model stand in them as tokens."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._bodies: dict[str, str] = {}  # by their names
        self._names: dict[str, str] = {}  # by their bodies

    def add(self, body: str, *, name: str = "", attribute: str = "", kind: str = "part") -> str:
        """Equal rules are one. `name`: of an empty one, that was added before what it refers to."""
        written = f"{attribute}: {body}"
        name = name or (self._names.get(written) if body else None) or f"{kind}_{len(self._bodies)}"
        self._names[written], self._bodies[name] = name, written
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.add(f"%json {json.dumps({**schema, **ONE_LINE})}")

    def literal(self, text: str) -> str:
        known = self._special_tokens
        return " ".join(f"<[{known[part]}]>" if part in known else quoted(part) for part in self._parts(text))

    def up_to(self, end: str) -> str:
        """Any text without an end, and that end."""
        first, *rest = self._parts(end)
        if not rest and first not in self._special_tokens:
            return self.add(_ANYTHING, attribute=f"[suffix={quoted(end)}]")
        # Of a text nothing is given back for what stands before the token; and the tokens of text can spell the end.
        before = "" if first in self._special_tokens else first
        text = f"({_ANYTHING} {quoted(before)}) & ~({_ANYTHING} {quoted(end)} {_ANYTHING})"
        return f"{self.add(text, kind='TEXT')} {self.literal(end.removeprefix(before))}"

    def written(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(name + body for name, body in self._bodies.items())]) + "\n"

    def _parts(self, text: str) -> list[str]:
        tokens = [re.escape(token) for token in sorted(self._special_tokens, key=len, reverse=True) if token in text]
        return [part for part in (re.split(f"({'|'.join(tokens)})", text) if tokens else [text]) if part]


class BareText(NamedTuple):
    """A string that a value may be; None: any."""

    value: str | None


class ValueWriter:
    """Holds types, choices, required keys, bounds of numbers and numbers of items, and nothing else that a schema asks.
    An object that names its keys gets no others."""

    def __init__(self, rules: Rules, notation: Notation, root: Mapping[str, Any]) -> None:
        self._rules, self._root = rules, root
        self._known: dict[str, str] = {}  # the rules of schemas
        self._is_python, self._quote = isinstance(notation, PythonCall), getattr(notation, "quote", "")
        self._end = notation.value[1] if isinstance(notation, XmlCall) else ""  # of values in JSON, and in none of them
        self._comma, self._colon = ('", "', '": "') if self._end else ("/, ?/", "/: ?/")

    def arguments(self) -> str:
        """All members, in Python as keywords."""
        variants = self._variants(self._root)
        return " | ".join(self._members(one, 0, is_called=self._is_python) for one in variants) or quoted("")

    def forms(self, schema: Any, depth: int = 0) -> Iterator[str | BareText]:
        """Yields what a value may be: strings, and grammars of others."""
        for one in self._variants(schema):
            types = [kind for kind in _list(one.get("type")) if kind in _KINDS]
            choices = [one["const"]] if "const" in one else _list(one.get("enum", []))
            scalars = [choice for choice in choices if not isinstance(choice, list | Mapping)]
            fitting = [one for one in scalars if any(type(one) in TYPES.get(kind, (str,)) for kind in types or _KINDS)]
            if scalars:
                yield from (BareText(one) if isinstance(one, str) else self._exactly(one) for one in fitting or scalars)
            else:
                signs = [_SIGNS[sign] for sign in _SIGNS if one.get(sign) not in (None, {}, [])]
                for kind in dict.fromkeys(types or signs or _KINDS):
                    yield BareText(None) if kind == "string" else self._of_kind(kind, one, depth)

    def _variants(self, schema: Any) -> Iterator[dict[str, Any]]:
        """Yields schemas without references, `allOf` and alternatives; a value must match one of them."""
        pending: list[tuple[dict[str, Any], list[Any]]] = [({}, [schema])]
        for found, (first, *rest) in pending:
            part = _mapping(first)
            name = next((name for name in ("allOf", "anyOf", "oneOf") if isinstance(part.get(name), list)), "")
            others = {key: value for key, value in part.items() if key != name}
            if (target := resolved(part, self._root)) is not part:
                further = [(found, [target, *rest])]
            elif name:
                branches = [part[name]] if name == "allOf" else [[one] for one in part[name]]
                further = [(found, [others, *branch, *rest]) for branch in branches]
            else:
                properties = {**_mapping(found.get("properties")), **_mapping(part.get("properties"))}
                required = _list(found.get("required", [])) + _list(part.get("required", []))
                further = [({**found, **part, "properties": properties, "required": required}, rest)]
            yield from (whole for whole, parts in further if not parts)
            pending += [one for one in further if one[1]][: _MAX_VARIANTS - len(pending)]

    def _value(self, schema: Any, depth: int) -> str:
        if depth > MAX_DEPTH or len(self._known) > _MAX_RULES:
            schema = {}
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            if "$ref" in key or key == "{}":  # it may hold itself
                self._known[key] = self._rules.add("")
            spelled = [self._text(one.value) if isinstance(one, BareText) else one for one in self.forms(schema, depth)]
            body = " | ".join(dict.fromkeys(spelled)) or self._value({}, depth)
            self._known[key] = self._rules.add(body, name=self._known.get(key, ""))
        return self._known[key]

    def _text(self, value: str | None) -> str:
        """A string; any, where none is given."""
        mark = self._rules.literal(self._quote)
        if mark and (value is None or self._quote in value):
            return f"{mark} {self._rules.up_to(self._quote)}"
        if value is None:
            text = f"{_DOUBLE_QUOTED} & ~({_ANYTHING} {quoted(self._end or chr(0))} {_ANYTHING})"
            return self._rules.add(text, kind="TEXT") + (f" | {_SINGLE_QUOTED}" if self._is_python else "")
        spelled = [value] if mark else [quoted(value), repr(value)][: 1 + self._is_python]
        return " | ".join(f"{mark} {quoted(one)} {mark}" for one in spelled)

    def _exactly(self, value: float | None) -> str:
        words = [] if self._end else [one for one in WORDS if WORDS[one] == json.dumps(value)]
        return " | ".join(map(quoted, words or [json.dumps(value)]))

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return f'"{{" ({self._members(schema, depth)}) "}}"'
        if kind == "array":
            return f'"[" {self._items(schema, depth)} "]"'
        if kind in _NUMBERS:
            bounds = _bounds(schema, kind)
            return self._rules.json({"type": kind, **bounds}) if bounds else _NUMBERS[kind]
        return " | ".join(map(self._exactly, (True, False) if kind == "boolean" else (None,)))

    def _members(self, schema: Mapping[str, Any], depth: int, *, is_called: bool = False) -> str:
        further, given = schema.get("additionalProperties", {}), dict(_mapping(schema.get("properties")))
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        given |= {name: further for name in required if name not in given}
        colon, are_bare = '"="' if is_called else self._colon, is_called or bool(self._quote)
        if not given and further is not False:
            key = ANY_KEY if are_bare else self._text(None)
            member = self._rules.add(f"({key}) {colon} {self._value(further, depth + 1)}")
            return f"({member} ({self._comma} {member})*)?"
        members: list[tuple[str, bool]] = []
        for name in sorted(given, key=str.lower) if self._quote else given:
            key = quoted(name) if are_bare and KEY.fullmatch(name) else self._text(name)
            if KEY.fullmatch(name) or not is_called:  # others cannot be written
                member = self._rules.add(f"({key}) {colon} {self._value(given[name], depth + 1)}")
                members.append((member, name in required))
        some, is_required = self._separated(members) if members else (quoted(""), True)
        return some if is_required else f"({some})?"

    def _separated(self, members: list[tuple[str, bool]]) -> tuple[str, bool]:
        """Some of the members, each with whether it must come; in halves: llguidance crashes on deep grammars."""
        if len(members) == 1:
            return members[0]
        half = len(members) // 2
        (one, needs_one), (two, needs_two) = self._separated(members[:half]), self._separated(members[half:])
        ways = (f"{one} {self._comma} {two}", "" if needs_two else one, "" if needs_one else two)
        return self._rules.add(" | ".join(filter(None, ways))), needs_one or needs_two

    def _items(self, schema: Mapping[str, Any], depth: int) -> str:
        item = self._value({} if "prefixItems" in schema else schema.get("items", {}), depth + 1)
        low, high = schema.get("minItems"), schema.get("maxItems")
        low = max(low, 0) if type(low) is int and low <= _MAX_COUNT else 0
        high = high if type(high) is int and low <= high <= _MAX_COUNT else None
        if high == 0:
            return quoted("")
        further = "" if high == 1 else f"({self._comma} {item}){{{max(low, 1) - 1},{high - 1 if high else ''}}}"
        return f"({item} {further}){'' if low else '?'}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _bounds(schema: Mapping[str, Any], kind: str) -> dict[str, float]:
    """The bounds of a number; none where nothing is within them."""
    numbers = {name: schema[name] for name in _BOUNDS if type(schema.get(name)) in (int, float)}
    given = {name: one for name, one in numbers.items() if abs(one) < _MAX_NUMBER}
    lows, highs = ([given[name] for name in names if name in given] for names in (_BOUNDS[:2], _BOUNDS[2:]))
    room, num_open = min(highs, default=inf) - max(lows, default=-inf), sum("exclusive" in name for name in given)
    has_room = room >= num_open if kind == "integer" else room > 0
    return {"minimum": -_MAX_NUMBER, "maximum": _MAX_NUMBER, **given} if given and has_room else {}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
