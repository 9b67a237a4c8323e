"""Arguments and values as Python writes them, read as JSON while they come."""

from __future__ import annotations

import json
import re

from penstock.answer.scanner import Broken, Pieces, Reading, Scanner, collected
from penstock.answer.values import MAX_DEPTH, WORDS, hex_digits, in_string, is_number, items

KEY = re.compile(r"[^\W\d][-.\w]{0,199}")  # as tools name their arguments, which Python would not
_WORD = re.compile(r"[-+.\w]*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"'}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}


def python_arguments(scan: Scanner) -> Pieces[None]:
    """Reads `key=value, ...)` as an object, behind the opening parenthesis."""

    def argument() -> Pieces[None]:
        key = yield from scan.run(_WORD)
        yield from scan.space()
        yield from scan.must("=")
        yield from scan.space()
        if not KEY.fullmatch(key):
            raise Broken
        yield json.dumps(key, ensure_ascii=False) + ": "
        yield from python_value(scan)

    yield from items(scan, "{}", ")", argument)


def python_value(scan: Scanner, depth: int = 0) -> Pieces[None]:
    char = yield from scan.peek()
    if depth > MAX_DEPTH:
        raise Broken
    if char in ("'", '"'):
        yield from _string(scan, char)
    elif char in ("[", "("):
        scan.at += 1
        yield from items(scan, "[]", "]" if char == "[" else ")", lambda: python_value(scan, depth + 1))
    elif char == "{":
        scan.at += 1
        yield from items(scan, "{}", "}", lambda: _member(scan, depth + 1))
    else:
        word = yield from scan.run(_WORD)
        if word not in WORDS and not is_number(word):
            raise Broken
        yield WORDS.get(word, word)


def _member(scan: Scanner, depth: int) -> Pieces[None]:
    key = yield from collected(python_value(scan, MAX_DEPTH))
    yield key if key.startswith('"') else json.dumps(key)
    yield from scan.space()
    yield from scan.must(":")
    yield ": "
    yield from scan.space()
    yield from python_value(scan, depth)


def _string(scan: Scanner, quote: str) -> Pieces[None]:
    end = quote * 3 if (yield from scan.takes(quote * 3)) else quote
    if end == quote:
        yield from scan.must(quote)
    yield '"'
    while not (yield from scan.takes(end)):
        char = yield from scan.peek()
        if not char:
            raise Broken
        scan.at += 1
        yield in_string((yield from _escape(scan)) if char == "\\" else char)
    yield '"'


def _escape(scan: Scanner) -> Reading[str]:
    char = yield from scan.peek()
    if not char:
        raise Broken
    scan.at += 1
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char not in _NUM_DIGITS:
        return "\\" + char
    code = int((yield from hex_digits(scan, _NUM_DIGITS[char])), 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise Broken
    return chr(code)
