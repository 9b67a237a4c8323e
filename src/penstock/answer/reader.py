"""`AnswerReader`: separates reasoning, text and calls of an answer while it is being written."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.answer.events import AnswerEvent, CallArguments, CallBegun, CallEnded, ReasoningDelta, TextDelta, merged
from penstock.answer.formats import CallFormat, ReasoningFormat
from penstock.answer.notations import Named, Schemas
from penstock.answer.scanner import Broken, Reading, Scanner, first_of, num_open

Events = Generator[AnswerEvent | None, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How an answer is read: its reasoning, its calls, and where it begins. Without either, all of it is text."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    schemas: Schemas = field(default_factory=dict[str, Mapping[str, Any]])  # of the functions that are offered
    is_reasoning_open: bool = False  # the prompt ends within the reasoning
    takes_one_call: bool = False  # later ones are dropped

    @property
    def markers(self) -> tuple[str, ...]:
        """Lists the texts that the reader has to see, even where they are special tokens."""
        return tuple(marker for form in (self.reasoning, self.calls) if form is not None for marker in form.markers)


ALL_TEXT = AnswerFormat()


class AnswerReader:
    """Turns text, as it comes, into the events that are certain. They are the same however the text was cut."""

    def __init__(self, form: AnswerFormat = ALL_TEXT) -> None:
        self.num_unread = 0  # times that something opened like a call and was none
        self._form = form
        self._scan = Scanner()
        self._num_calls = 0
        self._is_reasoning = form.is_reasoning_open and form.reasoning is not None
        self._is_fresh = True  # no text stands before this place, or none since a marker
        self._is_behind_marker = self._is_reasoning
        self._space = ""  # before the marker that was read last
        self._is_plain = form.calls is None and form.reasoning is None
        self._events = self._answer()

    def push(self, text: str) -> list[AnswerEvent]:
        if self._is_plain:
            return [TextDelta(text=text)] if text else []
        self._scan.text += text
        return list(merged(self._ready()))

    def end(self) -> list[AnswerEvent]:
        """Says that nothing more comes; gives what was held back."""
        self._scan.is_ended = True
        return list(merged(self._ready()))

    def _ready(self) -> Generator[AnswerEvent]:
        while (event := next(self._events, None)) is not None:
            yield event

    def _answer(self) -> Events:
        reasoning = self._form.reasoning
        while (marker := (yield from self._text())) is not None:
            self._is_behind_marker = True
            if reasoning is not None and marker in (reasoning.opening, reasoning.closing):
                self._is_reasoning, self._is_fresh = marker == reasoning.opening, True
            elif reasoning is None or marker not in reasoning.ignored:
                yield from self._calls(marker)
            self._scan.forget()

    def _text(self) -> Generator[AnswerEvent | None, None, str | None]:
        """Tells of the text up to a marker, and returns that; empty: a call without one; None: the end."""
        scan = self._scan
        while True:
            if self._is_behind_marker:
                yield from scan.space()
            if self._is_fresh and (first := (yield from self._first())) is not None:
                return first
            found = first_of(self._markers, scan.text, scan.at)
            is_end = found is None and scan.is_ended
            end = found[0] if found else len(scan.text) - (0 if is_end else num_open(self._markers, scan.text, scan.at))
            shown = scan.text[scan.at : end]
            text = shown if is_end else shown.rstrip()
            scan.at += len(text)
            yield from self._tell(text)
            if is_end:
                return None
            if found is not None:
                self._space = shown[len(text) :]
                scan.at = end + len(found[1])
                return found[1]
            yield None

    def _first(self) -> Reading[str | None]:
        """Steps over a marker that only begins an answer; returns it, or None where there is none."""
        scan, form = self._scan, self._form
        opening = form.reasoning.opening if form.reasoning and not self._is_reasoning else ""
        bare = form.calls.bare_start if form.calls and not self._is_reasoning else ""
        while True:
            rest = scan.text[scan.at :].lstrip()
            start = len(scan.text) - len(rest)
            is_opening = bool(opening) and rest.startswith(opening)
            if is_opening or (rest and rest[0] in bare):
                self._space = scan.text[scan.at : start]
                scan.at = start + (len(opening) if is_opening else 0)
                return opening if is_opening else ""
            if scan.is_ended or not (opening or bare) or (rest and not opening.startswith(rest)):
                return None
            yield None

    @property
    def _markers(self) -> tuple[str, ...]:
        """Lists what is looked for within a text, or within the reasoning."""
        form = self._form
        found = (*form.calls.openings, *form.calls.starts) if form.calls else ()
        if form.reasoning is None:
            return found
        if self._is_reasoning:
            return (form.reasoning.closing, *found)
        return (*form.reasoning.ignored, *found, *((form.reasoning.opening,) if form.reasoning.is_anywhere else ()))

    def _tell(self, text: str) -> Events:
        if text:
            self._is_fresh = self._is_behind_marker = False
            yield (ReasoningDelta(text=text) if self._is_reasoning else TextDelta(text=text))

    def _calls(self, marker: str) -> Events:
        """Tells of the calls behind a marker; if there is none, the marker is text."""
        scan, form = self._scan, self._form.calls
        assert form is not None, "a marker of calls without a format of calls"
        while True:
            start = scan.at - len(marker)
            if marker in form.starts:
                scan.at = start
            yield from self._step_over(form.prefixes)
            num_before, was_bare = self._num_calls, not marker
            is_read = yield from self._call(form, start, was_bare)
            if self._num_calls == num_before:
                scan.at = start + max(1, len(marker))
                yield from self._tell(self._space + scan.text[start : scan.at])
            if not is_read:
                return
            self._is_fresh = self._is_behind_marker = True
            yield from self._step_over(form.suffixes)
            self._space = ""
            marker = yield from self._separator(form)
            if not marker:
                return

    def _call(self, form: CallFormat, start: int, is_bare: bool) -> Generator[AnswerEvent | None, None, bool]:
        """Tells of a call; returns whether it could be read to its end. It is counted as soon as its name is known."""
        index, is_begun = self._num_calls, False
        is_dropped = self._form.takes_one_call and index > 0
        try:
            for piece in form.notation.call(self._scan, self._form.schemas):
                if piece is None:
                    yield None
                elif isinstance(piece, Named):
                    if is_bare and self._form.schemas and piece.name not in self._form.schemas:
                        raise Broken
                    self._num_calls, is_begun, self._is_reasoning = (index + 1, True, False)
                    if not is_dropped:
                        yield CallBegun(index=index, id=piece.id or _new_id(form.id_length), name=piece.name)
                elif not is_dropped:
                    yield CallArguments(index=index, text=piece)
        except Broken:
            self.num_unread += 1
            if is_begun:
                self._is_fresh = self._is_behind_marker = False
                yield CallEnded(index=index, unread=self._space + self._scan.text[start : self._scan.at])
            return False
        if not is_dropped:
            yield CallEnded(index=index)
        return True

    def _step_over(self, literals: tuple[str, ...]) -> Reading[None]:
        yield from self._scan.space()
        while (yield from self._scan.takes(*literals)):
            yield from self._scan.space()

    def _separator(self, form: CallFormat) -> Reading[str]:
        for separator in form.separators:
            if (yield from self._scan.takes(separator)):
                return separator
        return ""


def _new_id(length: int | None) -> str:
    return f"call_{secrets.token_hex(12)}" if length is None else secrets.token_hex(length)[:length]
