"""The lines of a batch: what each asks of which route, and what they share with each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from penstock.errors import PenstockError, brief, first_line

MAX_LINE_BYTES = 32 << 20
WINDOW_BYTES = 16 << 20  # of lines that are put in order together
HELD_BYTES = 512  # about, of a line beside its text
CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
READ_FIELDS = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input", EMBEDDINGS: "input"}
ENVELOPE = ("custom_id", "url", "method")  # around the body of a line; a line without a body is one itself
# Where a line goes that names no route, by the field that it has.
ROUTES = {"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES}
OTHER_NAMES = {
    RESPONSES: {"max_tokens": "max_output_tokens", "priority": None},
    EMBEDDINGS: {"max_tokens": None, "temperature": None, "priority": None},
}


class InvalidLine(PenstockError):
    """A line that asks for nothing that can be answered; the others go on."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    number: int  # from 1
    raw: bytes

    @property
    def digest(self) -> int:
        """64 bits of what the line says, never 0."""
        return int.from_bytes(hashlib.blake2b(self.raw, digest_size=8).digest(), "big") or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAsk:
    custom_id: str | None
    route: str
    body: Mapping[str, Any]

    @property
    def shared(self) -> str:
        """What is read, as text: lines that sort beside each other begin alike."""
        return json.dumps(self.body.get(READ_FIELDS[self.route]), ensure_ascii=False)


def lines_of(file: BinaryIO) -> Iterator[Line]:
    """Reads lines that hold something; one that is too long comes cut, and is refused where it is asked."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        whole = raw
        while not raw.endswith(b"\n") and (raw := file.readline(MAX_LINE_BYTES)):
            pass  # the rest of a line that is refused
        if whole.strip():
            yield Line(number=number, raw=whole.strip() if len(whole) <= MAX_LINE_BYTES else whole)


def read_line(line: Line, defaults: Mapping[str, Any], route: str | None = None) -> LineAsk:
    """Reads OpenAI's form, a body alone, or a text: one message. `defaults`: of fields that the line leaves out.

    `route`: the only one that it may ask.
    """
    if len(line.raw) > MAX_LINE_BYTES:
        raise InvalidLine(f"The line is longer than {MAX_LINE_BYTES:,} bytes, the most that is read. Shorten it.")
    try:
        given = json.loads(line.raw)
    except (ValueError, RecursionError) as error:
        raise InvalidLine(f"The line is not JSON ({first_line(str(error))}). Write one JSON value a line.") from None
    if isinstance(given, str):
        given = {"messages": [{"role": "user", "content": given}]}
    if not isinstance(given, dict):
        raise InvalidLine(f"The line is a JSON {type(given).__name__}. Write an object, or a text.")
    custom_id = given.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        raise InvalidLine("custom_id is no text. Write it in quotes.")
    try:
        ask = _read_object(given, custom_id, defaults)
        if route not in (None, ask.route):
            raise InvalidLine(f"The line asks {ask.route}; this batch is for {route}.")
        return ask
    except InvalidLine as error:
        raise InvalidLine(str(error), custom_id) from None


def _read_object(given: Mapping[str, Any], custom_id: str | None, defaults: Mapping[str, Any]) -> LineAsk:
    body = given.get("body", {name: value for name, value in given.items() if name not in ENVELOPE})
    if not isinstance(body, dict):
        raise InvalidLine("body is no object. Write the body of a request.")
    if given.get("method", "POST") != "POST":
        raise InvalidLine(f"method is {brief(given['method'])}; it must be POST.")
    route = given.get("url") or next((ROUTES[name] for name in ROUTES if name in body), None)
    if route is None:
        raise InvalidLine(f"The line has no url, and its body none of {', '.join(ROUTES)}. Add one.")
    if not isinstance(route, str) or route not in READ_FIELDS:
        raise InvalidLine(f"url is {brief(route)}; it must be one of {', '.join(READ_FIELDS)}.")
    if body.get("stream"):
        raise InvalidLine("stream is true; answers of a batch come whole. Leave it out.")
    names = OTHER_NAMES.get(route, {})
    others = {names.get(name, name): value for name, value in defaults.items()}
    return LineAsk(custom_id=custom_id, route=route, body={name: others[name] for name in others if name} | body)


def in_order(lines: Iterator[Line], window_bytes: int = WINDOW_BYTES) -> Iterator[Line]:
    """Brings lines that begin alike beside each other, so that what they share is read once.

    Lines are ordered within a window of so many bytes: what is held does not grow with the file.
    """
    window: list[tuple[str, int, Line]] = []
    num_bytes = 0
    for line in lines:
        window.append((_sort_key(line), line.number, line))
        num_bytes += len(line.raw) + HELD_BYTES
        if num_bytes >= window_bytes:
            yield from (line for _, _, line in sorted(window))
            window, num_bytes = [], 0
    yield from (line for _, _, line in sorted(window))


def _sort_key(line: Line) -> str:
    try:
        return read_line(line, {}).shared
    except InvalidLine:
        return ""
