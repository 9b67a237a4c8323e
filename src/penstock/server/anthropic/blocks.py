"""What answers of `/v1/messages` hold: blocks, usage, and the events by which blocks are streamed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel

from penstock.answer.events import (
    AnswerEvent,
    CallArguments,
    CallBegun,
    CallEnded,
    ReasoningDelta,
    TextDelta,
    WrittenAnswer,
)
from penstock.request import HitReason
from penstock.server import sse

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class WrittenText(BaseModel):
    type: Literal["text"] = "text"
    text: str


class WrittenThinking(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class WrittenToolUse(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """Counts the tokens of the prompt apart: found in the prefix cache, written to it, and neither."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_read_by_reason: dict[HitReason, int] = {}  # why they were still there; only of answers that have ended


class Message(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[WrittenThinking | WrittenText | WrittenToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


def signature(thoughts: str) -> str:
    """Marks thoughts as ours, for clients that send only signed ones back."""
    return hashlib.sha256(thoughts.encode("utf-8", "replace")).hexdigest()


def blocks_of(written: WrittenAnswer) -> list[WrittenThinking | WrittenText | WrittenToolUse]:
    thoughts, text = written.reasoning, written.text
    thinking = [WrittenThinking(thinking=thoughts, signature=signature(thoughts))] if thoughts else []
    texts = [WrittenText(text=text)] if text else []
    calls = [WrittenToolUse(id=call.id, name=call.name, input=_object(call.arguments)) for call in written.calls]
    return [*thinking, *texts, *calls]


def _object(arguments: str) -> dict[str, Any]:
    found = json.loads(arguments or "{}")
    return found if isinstance(found, dict) else {"value": found}


class BlockStream:
    """Tells blocks while they are written: one is open at a time, and it is closed before the next begins."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None  # the type of the block that is open
        self._thoughts = ""

    def tell(self, news: Iterable[AnswerEvent]) -> bytes:
        return b"".join(part for event in news for part in self._tell(event))

    def close(self) -> bytes:
        if self._open is None:
            return sse.NOTHING
        signed = sse.NOTHING
        if self._open == "thinking":
            signed = self._delta("signature_delta", signature=signature(self._thoughts))
            self._thoughts = ""
        self._open = None
        return signed + event("content_block_stop", index=self._index)

    def _tell(self, told: AnswerEvent) -> list[bytes]:
        match told:
            case TextDelta(text=text):
                return [self._turn_to("text", text=""), self._delta("text_delta", text=text)]
            case ReasoningDelta(text=text):
                begun = self._turn_to("thinking", thinking="", signature="")
                self._thoughts += text
                return [begun, self._delta("thinking_delta", thinking=text)]
            case CallBegun(id=call_id, name=name):
                return [self.close(), self._turn_to("tool_use", id=call_id, name=name, input={})]
            case CallArguments(text=text):
                return [self._delta("input_json_delta", partial_json=text)]
            case CallEnded(unread=""):
                return [self.close()]
            case CallEnded(unread=text):
                return [self.close(), self._turn_to("text", text=""), self._delta("text_delta", text=text)]

    def _turn_to(self, kind: str, **begun: Any) -> bytes:
        if self._open == kind:
            return sse.NOTHING
        closed = self.close()
        self._open = kind
        self._index += 1
        return closed + event("content_block_start", index=self._index, content_block={"type": kind} | begun)

    def _delta(self, kind: str, **delta: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind} | delta)


def event(name: str, **fields: Any) -> bytes:
    return sse.event({"type": name} | fields, name)
