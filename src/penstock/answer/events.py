"""What is told of an answer while it is being written, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegun:
    """A call whose name is known. Calls are counted from 0, those that break off too."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """More of the arguments' JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """The end of a call. `unread` is empty, or all that was written of a call that broke off: then it is text."""

    index: int
    unread: str = ""


_Piece = TextDelta | ReasoningDelta | CallArguments
AnswerEvent = TextDelta | ReasoningDelta | CallBegun | CallArguments | CallEnded


def merged(events: Iterable[AnswerEvent]) -> Iterator[AnswerEvent]:
    """Joins neighbours that say more of the same."""
    last: AnswerEvent | None = None
    for event in events:
        if isinstance(last, _Piece) and isinstance(event, _Piece) and type(last) is type(event):
            last = replace(last, text=last.text + event.text)
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    id: str
    name: str
    arguments: str  # JSON


def text_of(events: Iterable[AnswerEvent]) -> str:
    """Joins the text of the events, with that of calls that broke off."""
    texts = (
        event.text if isinstance(event, TextDelta) else event.unread if isinstance(event, CallEnded) else ""
        for event in events
    )
    return "".join(texts)


class WrittenAnswer:
    """What the events so far come to. A call counts when it has ended; one that broke off is text."""

    def __init__(self) -> None:
        self.calls: list[WrittenCall] = []
        self.is_broken = False  # the last call was
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._begun: CallBegun | None = None
        self._arguments: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasonings)

    def take(self, events: Iterable[AnswerEvent]) -> None:
        for event in events:
            match event:
                case TextDelta():
                    self._texts.append(event.text)
                case ReasoningDelta():
                    self._reasonings.append(event.text)
                case CallBegun():
                    self._begun, self._arguments = event, []
                case CallArguments():
                    self._arguments.append(event.text)
                case CallEnded():
                    self._end_call(event.unread)

    def _end_call(self, unread: str) -> None:
        self.is_broken = bool(unread)
        if unread:
            self._texts.append(unread)
        elif self._begun is not None:
            arguments = "".join(self._arguments)
            self.calls.append(WrittenCall(id=self._begun.id, name=self._begun.name, arguments=arguments))
