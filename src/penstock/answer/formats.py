"""`FORMATS` and `REASONINGS`: how models mark calls and reasoning. A model's format is a row, chosen by `probe`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.answer.notations import JsonCall, Notation


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Says where calls stand in an answer. White space around them is part of none."""

    name: str
    notation: Notation
    openings: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()  # the same, but they are part of the call
    bare_start: str = ""  # a call without an opening may begin an answer, with one of these characters
    prefixes: tuple[str, ...] = ()  # between an opening and a call
    suffixes: tuple[str, ...] = ()  # behind a call
    separators: tuple[str, ...] = ()  # between a call and another that has no opening
    written: tuple[str, str, str] | None = None  # a call around its name and its JSON; None: arguments are no JSON
    id_length: int | None = None  # of the ids that templates of such models take; None: any

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openings, *self.starts, *self.prefixes, *self.suffixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    name: str
    opening: str
    closing: str
    is_anywhere: bool = False  # it may come behind a text too, because its markers are no text
    ignored: tuple[str, ...] = ()  # markers around texts, which say nothing

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *self.ignored)


FORMATS = {
    row.name: row
    for row in (
        CallFormat(
            name="hermes",
            notation=JsonCall(),
            openings=("<tool_call>",),
            suffixes=("</tool_call>",),
            written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        ),
        CallFormat(
            name="llama-json",
            notation=JsonCall(),
            openings=("<|python_tag|>",),
            bare_start="{",
            separators=(";",),
            written=('{"name": "', '", "parameters": ', "}"),
        ),
    )
}
REASONINGS = {row.name: row for row in (ReasoningFormat(name="think", opening="<think>", closing="</think>"),)}
