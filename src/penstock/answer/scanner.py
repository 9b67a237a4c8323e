"""`Scanner`: a text that arrives in pieces, read by generators that yield None where they need more of it.

What a generator reads depends on the text alone, never on how it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from typing import TypeVar

T = TypeVar("T")
# A generator that asks for more text, and returns what it read; and one that also yields text on the way.
Reading = Generator[None, None, T]
Pieces = Generator[str | None, None, T]

_SPACE = re.compile(r"\s*")
_MAX_HEADER = 200  # characters that are held back to find out whether a call begins


class Broken(Exception):
    """What was to be read is not there."""


class Scanner:
    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # what is before it was read
        self.is_ended = False

    def forget(self) -> None:
        """Drops what was read."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """Returns the next character; empty at the end."""
        while self.at >= len(self.text):
            if self.is_ended:
                return ""
            yield None
        return self.text[self.at]

    def takes(self, *literals: str) -> Reading[bool]:
        """Steps over one of the literals if it comes next."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    self.at += len(literal)
                    return True
            rest = self.text[self.at :]
            if self.is_ended or not any(literal.startswith(rest) for literal in literals):
                return False
            yield None

    def must(self, *literals: str) -> Reading[None]:
        if not (yield from self.takes(*literals)):
            raise Broken

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads a short text as far as the pattern matches, which matches any number of characters of a kind."""
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match else self.at
            if end - self.at > _MAX_HEADER:
                raise Broken
            if end < len(self.text) or self.is_ended:
                found, self.at = self.text[self.at : end], end
                return found
            yield None

    def space(self) -> Reading[None]:
        while (yield from self.peek()).isspace():
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at

    def header(self, *ends: str) -> Reading[str]:
        """Reads a short text up to one of the ends, which is not read."""
        while True:
            found = first_of(ends, self.text, self.at)
            end = found[0] if found else len(self.text)
            if end - self.at > _MAX_HEADER or (found is None and self.is_ended):
                raise Broken
            if found is not None:
                text, self.at = self.text[self.at : end], end
                return text
            yield None

    def flow(self, *ends: str) -> Pieces[str]:
        """Yields the text up to one of the ends as it comes; steps over that end, and returns it."""
        while True:
            found = first_of(ends, self.text, self.at)
            if found is not None:
                end, literal = found
            elif self.is_ended:
                end, literal = len(self.text), ""
            else:
                end, literal = len(self.text) - num_open(ends, self.text, self.at), ""
            if end > self.at:
                piece, self.at = self.text[self.at : end], end
                yield piece
            if literal:
                self.at += len(literal)
                return literal
            if self.is_ended:
                raise Broken
            yield None


def first_of(literals: Collection[str], text: str, start: int) -> tuple[int, str] | None:
    """Finds (where, which) of the literals comes first."""
    found = [(where, literal) for literal in literals if (where := text.find(literal, start)) >= 0]
    return min(found, default=None)


def num_open(literals: Collection[str], text: str, start: int) -> int:
    """Counts the characters at the end of the text that may be the beginning of a literal."""
    longest = max(map(len, literals), default=0)
    for where in range(max(start, len(text) - longest + 1), len(text)):
        if any(literal.startswith(text[where:]) for literal in literals):
            return len(text) - where
    return 0


def collected(pieces: Pieces[object]) -> Reading[str]:
    """Joins what is yielded on the way."""
    found = []
    for piece in pieces:
        if piece is None:
            yield None
        else:
            found.append(piece)
    return "".join(found)
