"""What `/v1/responses` takes, and how it is asked as a chat."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from penstock.server.openai.asks import (
    FIRST_MISTAKE,
    Ask,
    ChunkSize,
    InertFields,
    JsonObject,
    OtherTool,
    Reasoning,
    Said,
    StreamOptions,
    TextOr,
    kinds,
    tool_kind,
)
from penstock.server.openai.chat_asks import ChatAsk, ChosenTool, ResponseFormat


class InputText(Said):
    type: Literal["input_text", "output_text", "text"]
    text: str

    def for_chat(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class InputImage(Said):
    type: Literal["input_image"]
    image_url: str

    def for_chat(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


Content = TextOr[
    Annotated[
        Annotated[InputText, Tag("other")] | Annotated[InputImage, Tag("input_image")],
        Discriminator(kinds("input_image")),
    ]
]


class InputMessage(Said):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def for_chat(self) -> dict[str, Any]:
        return {"role": self.role, "content": _chat_content(self.content)}


class ReasoningText(Said):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Said):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], FIRST_MISTAKE] | None = None
    encrypted_content: str | None = None

    def for_chat(self) -> dict[str, Any]:
        thoughts = "".join(part.text for part in self.content or []) or sealed_text(self.encrypted_content or "")
        return {"role": "assistant", "reasoning_content": thoughts}


class GivenCallItem(Said):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}


class CallOutputItem(Said):
    type: Literal["function_call_output"]
    call_id: str
    output: Content

    def for_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _chat_content(self.output)}


class OtherItem(OtherTool):
    """Something that only another server makes; it is left out of the prompt, and that is reported."""

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value == "item_reference":
            raise ValueError("items are not kept one by one; send the item itself, or previous_response_id")
        return value


SEAL = "penstock:"
AS_IN_CHATS = ("model", "temperature", "top_p", "chunk_size", "stream", "tool_choice", "parallel_tool_calls")
AS_IN_CHATS += ("reasoning", "chat_template_kwargs")
Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[GivenCallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(kinds("message", "reasoning", "function_call", "function_call_output", otherwise="message")),
]


class FunctionTool(Said):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(tool_kind)
]


class TextOptions(Ask):
    format: ResponseFormat | None = None
    verbosity: str | None = None


class ResponseAsk(InertFields):
    model: str
    input: TextOr[Item]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    tools: Annotated[list[AnyTool], FIRST_MISTAKE] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: Annotated[list[str], FIRST_MISTAKE] | None = None
    previous_response_id: str | None = None
    max_tool_calls: int | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: JsonObject | None = None
    stream_options: StreamOptions | None = None
    background: Literal[False] | None = None
    chunk_size: ChunkSize = None
    stream: bool | None = False

    def as_chat(self, before: list[dict[str, Any]]) -> ChatAsk:
        """Asks as a chat that goes on after the messages of an earlier response."""
        asked: dict[str, Any] = self.same(*AS_IN_CHATS) | {
            "messages": [*self._first(), *turns_of([*before, *self.given_messages()])],
            "max_tokens": self.max_output_tokens,
            "tools": [tool.for_chat() for tool in self.tools or []] or None,
            "response_format": self.text and self.text.format,
        }
        return ChatAsk.model_validate(asked)

    def _first(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.instructions}] if self.instructions else []

    def given_messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [item.for_chat() for item in self.input if not isinstance(item, OtherItem)]

    @property
    def skipped_items(self) -> list[str]:
        """Lists the types of input items that are left out."""
        return OtherItem.types_in([] if isinstance(self.input, str) else self.input)


def sealed(thoughts: str) -> str:
    """Packs thoughts for clients that send back nothing of them but `encrypted_content`; it is no secret."""
    return SEAL + base64.b64encode(thoughts.encode("utf-8", "replace")).decode()


def sealed_text(content: str) -> str:
    """Unpacks them; what another server packed stays closed."""
    if not content.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        return ""


def turns_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins what the assistant did in one turn (it thought, said something, called) as the model once wrote it."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        last = turns[-1] if turns else {}
        if message["role"] == last.get("role") == "assistant" and not last.keys() & message.keys() & {"content"}:
            calls = [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
            thoughts = (last.get("reasoning_content") or "") + (message.get("reasoning_content") or "")
            turns[-1] = last | message | {"tool_calls": calls or None, "reasoning_content": thoughts or None}
        else:
            turns.append(message)
    return [turn for turn in turns if turn.get("content") is not None or turn.get("tool_calls")]


def _chat_content(content: Content) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.for_chat() for part in content]
