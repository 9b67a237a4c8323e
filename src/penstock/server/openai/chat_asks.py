"""What chat requests hold: messages, tools, and the format of the answer."""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from penstock.answer.values import resolved
from penstock.errors import InvalidMedia, InvalidPrompt
from penstock.request import SamplingParams
from penstock.server.openai.asks import (
    FIRST_MISTAKE,
    MAX_DEPTH,
    Ask,
    Block,
    JsonObject,
    OtherTool,
    Reasoning,
    Said,
    SamplingFields,
    TextOr,
    Thinking,
    shallow,
    tool_kind,
)

MAX_TOOLS = 1024
MAX_MARKS = 4  # by which clients say where prompts part; of more, the last
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", flags=re.IGNORECASE)


class GivenText(Block):
    type: Literal["text"]
    text: str


class ImageUrl(Said):
    url: str


class ImagePart(Block):
    type: Literal["image_url"]
    image_url: ImageUrl | str


AnyPart = Annotated[GivenText | ImagePart, Discriminator("type")]


class GivenFunction(Said):
    name: str
    arguments: str | JsonObject


class GivenCall(Said):
    id: str = ""
    function: GivenFunction


class GivenMessage(Block):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[AnyPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[GivenCall], FIRST_MISTAKE] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # what the model thought before, for templates that print it again
    reasoning: str | None = None  # the same, as others call it
    prefix: Literal[False] | None = None  # whether the answer goes on from here, which none does

    @property
    def has_images(self) -> bool:
        return isinstance(self.content, list) and any(isinstance(part, ImagePart) for part in self.content)

    @property
    def is_marked(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return any(given.cache_control is not None for given in (self, *parts))

    def for_template(self, max_image_bytes: int, arguments_as_text: bool = False) -> dict[str, Any]:
        """Gives the message as templates know it; text alone is one string, because most know nothing else.

        Most print the arguments of calls as an object; `arguments_as_text` is for those that join them as they came.
        """
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if self.has_images:
            assert isinstance(self.content, list)
            message["content"] = [_part(part, max_image_bytes) for part in self.content]
        elif isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content if isinstance(part, GivenText))
        elif self.content is None and self.role not in ("assistant", "tool"):
            raise InvalidPrompt(f"A message of the {self.role} has no content. Give it a text.")
        else:
            message["content"] = self.content or ""
        message |= self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        if self.tool_calls:
            message["tool_calls"] = [_call(call, arguments_as_text) for call in self.tool_calls]
        if thoughts := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thoughts
            if not (self.tool_calls and self.content):  # gpt-oss's template refuses it beside both
                message["thinking"] = thoughts
        return message


def _part(part: GivenText | ImagePart, max_image_bytes: int) -> dict[str, Any]:
    if isinstance(part, GivenText):
        return {"type": "text", "text": part.text}
    url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
    return {"type": "image", "image": _image_bytes(url, max_image_bytes)}


def _image_bytes(url: str, max_bytes: int) -> bytes:
    """Decoded within limits; nothing is fetched and no path is opened."""
    match = _DATA_URL.match(url)
    if match is None:
        shown = url[:40] + ("..." if len(url) > 40 else "")
        raise InvalidMedia(f"The image {shown!r} is no data URL. Send data:image/...;base64,...; nothing is fetched.")
    encoded = url[match.end() :]
    num_bytes = len(encoded) * 3 // 4
    if num_bytes > max_bytes:
        raise InvalidMedia(f"An image has {num_bytes:,} bytes; {max_bytes:,} is the most. Scale it down.")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidMedia("The base64 of an image is broken. Encode it again.") from None


def _call(call: GivenCall, arguments_as_text: bool) -> dict[str, Any]:
    given = call.function.arguments or "{}"
    written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        arguments = shallow(json.loads(written))
    except json.JSONDecodeError:  # a call that was cut, say, and that the model is told of
        arguments = {"arguments": written}
    except (RecursionError, ValueError):
        raise InvalidPrompt(
            f"The arguments of the call {call.id!r} are nested deeper than {MAX_DEPTH} levels, or hold a number of "
            f"more than {sys.get_int_max_str_digits():,} digits. Send shorter ones."
        ) from None
    function = {"name": call.function.name, "arguments": written if arguments_as_text else arguments}
    return {"id": call.id, "type": "function", "function": function}


Messages = Annotated[list[GivenMessage], Field(min_length=1, fail_fast=True)]


class Function(Said):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        given = self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
        return dict(resolved(given, given))


class Tool(Block):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}, "cache_control": True})


AnyTool = Annotated[Annotated[Tool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(tool_kind)]


class ChosenName(Ask):
    name: str


class ChosenTool(Ask):
    type: Literal["function"]
    function: ChosenName | None = None
    name: str | None = None  # where responses have it

    @property
    def chosen(self) -> str | None:
        return self.function.name if self.function else self.name


class NamedSchema(Ask):
    name: str
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Ask):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    name: str | None = None  # these where responses have them
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Any:
        is_given = self.json_schema is not None or self.schema_ is not None
        if is_given if self.type == "text" else self.type == "json_schema" and not is_given:
            raise ValueError("type json_schema goes with json_schema: {name, schema}")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Finds the schema that the answer keeps to; None means any text."""
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        return {"type": "object"} if schema is None and self.type == "json_object" else schema


class ChatAsk(SamplingFields):
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: JsonObject | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Any:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs go with logprobs: true")
        if taken := OWN_VARIABLES & (self.chat_template_kwargs or {}).keys():
            raise ValueError(f"chat_template_kwargs has {min(taken)!r}, which the server sets itself")
        if self.wants_call and not self.offered_tools:
            raise ValueError("tool_choice goes with tools that are functions")
        if isinstance(self.tool_choice, ChosenTool) and not self.callable_functions:
            raise ValueError(f"tool_choice names {self.tool_choice.chosen!r}, which is not among the tools")
        if self.schema_of_answer is not None and self.wants_call:
            raise ValueError("response_format and a required tool exclude each other")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        return None if self.response_format is None else self.response_format.schema_of_answer

    @property
    def forks(self) -> list[int]:
        """Lists after how many messages other prompts may part from this one: what is marked, and behind the system."""
        system = [message.role in ("system", "developer") for message in self.messages]
        marked = [number for number, message in enumerate(self.messages, 1) if message.is_marked]
        return [system.index(False) if False in system else 0, *marked[-MAX_MARKS:]]

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else [tool for tool in self.tools or [] if isinstance(tool, Tool)]

    @property
    def skipped_tools(self) -> list[str]:
        """Lists the types of tools that are left out."""
        return OtherTool.types_in(self.tools or [])

    @property
    def knobs(self) -> dict[str, Any]:
        """Gives what the template is told if it asks: how much to think, and what its own variables should be."""
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)
        thinks = self.thinking.is_wanted if self.thinking else self.enable_thinking
        if thinks is None and effort is not None:
            thinks = effort != "none"
        given = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        return {name: value for name, value in given.items() if value is not None} | (self.chat_template_kwargs or {})

    @property
    def wants_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)

    @property
    def callable_functions(self) -> list[Function]:
        """Lists the functions that a required call may name."""
        functions = [tool.function for tool in self.offered_tools]
        if isinstance(self.tool_choice, ChosenTool):
            return [function for function in functions if function.name == self.tool_choice.chosen]
        return functions

    def sampling(self, capacity: int, grammar: str | None) -> SamplingParams:
        """Gives the sampling of the answer, which may fill the context where no limit is asked for."""
        max_tokens = self.max_completion_tokens or self.max_tokens or capacity
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)
