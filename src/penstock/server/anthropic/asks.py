"""What `/v1/messages` takes, and how it is asked as a chat."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from penstock.server.openai.asks import (
    FIRST_MISTAKE,
    MAX_STOPS,
    Ask,
    Block,
    ChunkSize,
    JsonObject,
    OtherTool,
    TextOr,
    Thinking,
    kinds,
)
from penstock.server.openai.chat_asks import MAX_TOOLS, ChatAsk
from penstock.server.problems import Refused

BILLING = "x-anthropic-billing-header"  # differs from request to request, and would end every shared prefix
BETWEEN = "\n"  # blocks of the user and of the system


class TextBlock(Block):
    type: Literal["text"]
    text: str

    def for_chat(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ImageSource(Block):
    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class ImageBlock(Block):
    type: Literal["image"]
    source: ImageSource

    def for_chat(self) -> dict[str, Any]:
        source = self.source
        url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str


class OtherBlock(OtherTool):
    """Something that only another server makes; it is left out of the prompt, and that is reported."""

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value in ("redacted_thinking", "tool_reference") or value.endswith(("_tool_use", "_tool_result")):
            return value
        raise ValueError("blocks of this type are not read; send their text")


Shown = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[ImageBlock, Tag("image")] | Annotated[OtherBlock, Tag("other")],
    Discriminator(kinds("text", "image")),
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[Shown] | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": _chat_content(self.content or "")}


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(kinds("text", "image", "tool_use", "tool_result", "thinking")),
]


class AnthropicMessage(Block):
    role: Literal["user", "assistant", "system"]
    content: TextOr[AnyBlock]

    @property
    def blocks(self) -> list[Any]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    def for_chat(self) -> list[dict[str, Any]]:
        return [_assistant_turn(self.blocks)] if self.role == "assistant" else _other_turns(self.role, self.blocks)


def _assistant_turn(blocks: list[Any]) -> dict[str, Any]:
    """Makes one message of what the assistant did in a turn; its texts are joined as the model wrote them."""
    calls = [block.for_chat() for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    told = {"role": "assistant", "content": text, "tool_calls": calls or None, "reasoning_content": thoughts or None}
    return told | _mark(blocks)


def _other_turns(role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """Makes a message of each result of a tool, and one of the blocks between them."""
    turns: list[dict[str, Any]] = []
    for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            turns += [block.for_chat() | _mark([block]) for block in group]
        elif shown := [block for block in group if isinstance(block, TextBlock | ImageBlock)]:
            turns.append({"role": role, "content": _chat_content(shown)} | _mark(shown))
    return turns


def _mark(blocks: list[Any]) -> dict[str, Any]:
    """Keeps the mark of a block, which says where other prompts will go on in their own way."""
    marks = (getattr(block, "cache_control", None) for block in reversed(blocks))
    return {"cache_control": next((mark for mark in marks if mark), None)}


def _chat_content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    shown = [block for block in content if not isinstance(block, OtherBlock)]
    if all(isinstance(block, TextBlock) for block in shown):
        return BETWEEN.join(block.text for block in shown)
    return [block.for_chat() for block in shown]


class AnthropicTool(Block):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: JsonObject

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


OfferedTool = Annotated[
    Annotated[AnthropicTool, Tag("custom")] | Annotated[OtherTool, Tag("other")],
    Discriminator(kinds("custom", otherwise="custom")),
]


class ToolChoice(Ask):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Any:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name goes with the type tool")
        return self

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Block):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Ask):
    effort: str | None = None
    format: OutputFormat | None = None


class Thread(Ask):
    """Asks to keep the conversation, or to go on after an earlier answer whose conversation was kept."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None

    @model_validator(mode="after")
    def _check_previous(self) -> Any:
        if (self.type == "continue") != (self.previous_message_id is not None):
            raise ValueError("previous_message_id goes with the type continue")
        return self


class CountAsk(Ask):
    """A conversation. What it brings beside that is metadata: it changes nothing."""

    model_config = ConfigDict(extra="ignore")
    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1), FIRST_MISTAKE]
    system: TextOr[TextBlock] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS), FIRST_MISTAKE] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where it was first
    chat_template_kwargs: JsonObject | None = None
    metadata: JsonObject | None = None
    cache_control: JsonObject | None = None
    context_management: JsonObject | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None

    @model_validator(mode="after")
    def _check_last(self) -> Any:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's; an answer that was begun is not continued here")
        return self

    @property
    def skipped_blocks(self) -> list[str]:
        """Lists the types of blocks that are left out."""
        return OtherBlock.types_in(block for message in self.messages for block in message.blocks)

    def as_chat(self) -> ChatAsk:
        return ChatAsk.model_validate(self._asked())

    def _asked(self) -> dict[str, Any]:
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        form = config.format or self.output_format
        return self.same("model", "thinking", "chat_template_kwargs") | {
            "messages": [*self._system(), *(turn for message in self.messages for turn in message.for_chat())],
            "tools": [tool.for_chat() for tool in self.tools or []] or None,
            "tool_choice": choice and choice.for_chat(),
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            "reasoning_effort": config.effort,
            "response_format": form and {"type": "json_schema", "schema": form.schema_},
        }

    def _system(self) -> list[dict[str, Any]]:
        texts = [self.system] if isinstance(self.system, str) else [block.text for block in self.system or []]
        kept = [text for text in texts if not text.startswith(BILLING)]
        return [{"role": "system", "content": BETWEEN.join(kept)}] if kept else []


class MessagesAsk(CountAsk):
    model_config = ConfigDict(extra="forbid")
    max_tokens: Annotated[int, Field(ge=1)]
    thread: Thread | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    chunk_size: ChunkSize = None
    stream: bool | None = False

    @property
    def conversation(self) -> dict[str, Any]:
        """Gives what a thread keeps of it, as it came."""
        return self.model_dump(include={"messages", "system", "tools"}, by_alias=True, exclude_none=True)

    def after(self, kept: dict[str, Any]) -> MessagesAsk:
        """Asks the same behind a conversation that was kept, with its system prompt and its tools."""
        if self.system is not None or self.tools is not None:
            raise Refused("A thread that is continued has its system prompt and its tools. Leave them out.")
        messages = [*kept["messages"], *self.conversation["messages"]]
        return MessagesAsk.model_validate(self.model_dump(by_alias=True) | kept | {"messages": messages})

    def _asked(self) -> dict[str, Any]:
        same = self.same("max_tokens", "temperature", "top_p", "top_k", "chunk_size", "stream")
        return super()._asked() | same | {"stop": self.stop_sequences or None}
