"""Arguments in the notations that models write, read as JSON while they come."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penstock.answer.scanner import Broken, Pieces, Reading, Scanner, collected

MAX_DEPTH = 64
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", flags=re.ASCII)
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def in_string(text: str) -> str:
    """Writes a text as it stands within the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_value(scan: Scanner, depth: int = 0) -> Pieces[None]:
    """Reads JSON as it is; control characters within strings, which models do write, are escaped."""
    char = yield from scan.peek()
    if char == '"':
        yield from json_string(scan)
    elif char in ("{", "["):
        yield from _json_container(scan, depth + 1)
    else:
        word = yield from scan.run(_SCALAR)
        if word not in ("true", "false", "null") and not is_number(word):
            raise Broken
        yield word


def _json_container(scan: Scanner, depth: int) -> Pieces[None]:
    is_object = scan.text[scan.at] == "{"
    closing = "}" if is_object else "]"
    if depth > MAX_DEPTH:
        raise Broken
    yield from _mark(scan, "{" if is_object else "[")
    if (yield from scan.takes(closing)):
        yield closing
        return
    while True:
        if is_object:
            yield from json_string(scan)
            yield from _gap(scan)
            yield from _mark(scan, ":")
        yield from json_value(scan, depth)
        yield from _gap(scan)
        if (yield from scan.takes(closing)):
            yield closing
            return
        yield from _mark(scan, ",")


def _mark(scan: Scanner, mark: str) -> Pieces[None]:
    yield from scan.must(mark)
    yield mark
    yield from _gap(scan)


def _gap(scan: Scanner) -> Pieces[None]:
    while (char := (yield from scan.peek())) in (" ", "\t", "\n", "\r"):
        scan.at += 1
        yield char


def json_string(scan: Scanner) -> Pieces[None]:
    yield from scan.must('"')
    yield '"'
    while (char := (yield from scan.peek())) != '"':
        if not char:
            raise Broken
        if match := _PLAIN.match(scan.text, scan.at):
            scan.at = match.end()
            yield match.group()
        elif char == "\\":
            yield from _json_escape(scan)
        else:
            scan.at += 1
            yield in_string(char)
    scan.at += 1
    yield '"'


def _json_escape(scan: Scanner) -> Pieces[None]:
    scan.at += 1
    char = yield from scan.peek()
    if char == "u":
        scan.at += 1
        yield "\\u" + (yield from hex_digits(scan, 4))
        return
    if not char or char not in "\"\\/bfnrt'":
        raise Broken
    scan.at += 1
    yield "'" if char == "'" else "\\" + char


def hex_digits(scan: Scanner, num_digits: int) -> Reading[str]:
    digits = ""
    while len(digits) < num_digits:
        char = yield from scan.peek()
        if not char or char not in "0123456789abcdefABCDEF":
            raise Broken
        digits, scan.at = digits + char, scan.at + 1
    return digits


def arguments_object(scan: Scanner) -> Reading[Pieces[None]]:
    """Finds how the arguments of a call are written: an object, an object within a string, or null."""
    char = yield from scan.peek()
    if char == "{":
        return json_value(scan)
    given = yield from collected(json_value(scan))
    try:
        value = json.loads(given)
        given, value = (value, json.loads(value)) if isinstance(value, str) else (given, value)
    except (RecursionError, ValueError):
        raise Broken from None
    if value is None:
        given = "{}"
    elif not isinstance(value, dict):
        raise Broken
    return _given(given)


def _given(text: str) -> Pieces[None]:
    yield text


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follows a reference within the root; what stands beside it stays. A schema without one is given back."""
    if not isinstance(reference := schema.get("$ref"), str):
        return schema
    target: Any = root
    for part in reference.removeprefix("#/").split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    others = {name: value for name, value in schema.items() if name != "$ref"}
    return {**target, **others} if isinstance(target, Mapping) else schema


def types_of(schema: Any, root: Mapping[str, Any], seen: set[str] | None = None) -> frozenset[str]:
    """Lists the types that a schema within another names; none where it says nothing. `seen`: references so far."""
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping) or len(seen) > MAX_DEPTH:
        return frozenset()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {one for one in named or () if isinstance(one, str)}
    for value in schema.get("enum") or ([schema["const"]] if "const" in schema else ()):
        found.add(next((name for name, kinds in TYPES.items() if type(value) in kinds), "string"))
    inner = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key) or ()]
    if (target := resolved(schema, root)) is not schema and schema["$ref"] not in seen:
        seen.add(schema["$ref"])
        inner.append(target)
    return frozenset(found).union(*(types_of(one, root, seen) for one in inner))


def typed(text: str, types: Collection[str]) -> str:
    """Writes a bare value as JSON of one of the types; as a string where it has none of them."""
    value = _parsed(text.strip())
    allowed = tuple(kind for name in types for kind in TYPES.get(name, ()))
    is_bool = isinstance(value, bool)
    if value is not _NOTHING and isinstance(value, allowed) and (not is_bool or "boolean" in types):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


_NOTHING = object()


def _parsed(text: str) -> Any:
    try:
        value = json.loads(WORDS.get(text, text), parse_constant=lambda _: _NOTHING)
        json.dumps(value, allow_nan=False)
        return value
    except (RecursionError, TypeError, ValueError):
        pass
    if text[:1] not in ("{", "["):
        return _NOTHING
    try:  # models write Python where they were shown none
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
        return value
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return _NOTHING


def marked_value(scan: Scanner, quote: str, depth: int = 0) -> Pieces[None]:
    """Reads values as Gemma writes them: bare keys, and strings between two of a marker."""
    if depth > MAX_DEPTH:
        raise Broken
    if (yield from scan.takes(quote)):
        yield '"'
        yield from escaped(scan, quote)
        yield '"'
    elif (yield from scan.takes("{")):
        yield from _marked_members(scan, quote, depth + 1)
    elif (yield from scan.takes("[")):
        yield from items(scan, "[]", "]", lambda: marked_value(scan, quote, depth + 1))
    else:
        text = (yield from scan.header(",", "}", "]")).strip()
        yield (WORDS[text] if text in WORDS else text if is_number(text) else json.dumps(text))


def _marked_members(scan: Scanner, quote: str, depth: int) -> Pieces[None]:
    def member() -> Pieces[None]:
        if (yield from scan.takes(quote)):
            key = yield from collected(scan.flow(quote))
        else:
            key = yield from scan.header(":", "}", ",")
        yield from scan.space()
        yield from scan.must(":")
        yield json.dumps(key.strip(), ensure_ascii=False) + ": "
        yield from scan.space()
        yield from marked_value(scan, quote, depth)

    yield from items(scan, "{}", "}", member)


def escaped(scan: Scanner, *ends: str) -> Pieces[str]:
    """Yields the text up to an end as the inside of a JSON string."""
    flow = scan.flow(*ends)
    while True:
        try:
            piece = next(flow)
        except StopIteration as stopped:
            return stopped.value
        yield None if piece is None else in_string(piece)


def items(scan: Scanner, brackets: str, end: str, item: Callable[[], Pieces[None]]) -> Pieces[None]:
    """Reads items up to an end, behind an opening that was read, and gives them JSON's brackets."""
    yield brackets[0]
    yield from scan.space()
    is_first = True
    while not (yield from scan.takes(end)):
        if not is_first:
            yield from scan.must(",")
            yield from scan.space()
            if (yield from scan.takes(end)):  # Python's trailing comma
                break
            yield ", "
        is_first = False
        yield from item()
        yield from scan.space()
    yield brackets[1]
