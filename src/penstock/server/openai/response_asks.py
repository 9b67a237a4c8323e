"""What `/v1/responses` takes, and how it is asked as a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.server.openai.asks import Ask, ChunkSize, InertFields, JsonObject
from penstock.server.openai.chat_asks import ChatAsk


class InputText(Ask):
    type: Literal["input_text", "output_text", "text"]
    text: str

    def for_chat(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class InputImage(Ask):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto"] | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


class InputMessage(Ask):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage]
    id: str | None = None
    status: str | None = None

    def for_chat(self) -> dict[str, Any]:
        is_text = isinstance(self.content, str)
        return {"role": self.role, "content": self.content if is_text else [part.for_chat() for part in self.content]}


class GivenCallItem(Ask):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}


class CallOutputItem(Ask):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: str | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class FunctionTool(Ask):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedTool(Ask):
    type: Literal["function"]
    name: str


class TextFormat(Ask):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Any:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("type json_schema goes with a name and a schema")
        return self

    def for_chat(self) -> dict[str, Any]:
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.schema_}}


class TextOptions(Ask):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseAsk(InertFields):
    model: str
    input: str | Annotated[list[InputMessage | GivenCallItem | CallOutputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    chunk_size: ChunkSize = None
    stream: bool | None = False

    def as_chat(self) -> ChatAsk:
        choice = self.tool_choice
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "chunk_size": self.chunk_size,
            "stream": self.stream,
            "tools": [tool.for_chat() for tool in self.tools] if self.tools else None,
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, NamedTool)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.for_chat() if self.text and self.text.format else None,
        }
        return ChatAsk.model_validate(asked)

    def _messages(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        return [*first, *(item.for_chat() for item in self.input)]
