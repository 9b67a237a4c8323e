"""What requests may hold. A field that is not here is refused; one that could not change the answer is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.request import SamplingParams

TokenId = Annotated[int, Field(ge=0)]
FIRST_MISTAKE = Field(fail_fast=True)  # of a list: one is told, and a list of a million takes as long as one of few
ChunkSize = Annotated[int, Field(ge=0)] | Literal["auto"] | None  # None: the server's; 0: the prompt is read whole
MAX_STOPS = 16
MAX_PROMPTS = 64
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
# One text or many, as text or as tokens.
Texts = (
    str
    | Tokens
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


def text_or_items(value: Any) -> Literal["text", "items"]:
    """Tells a text from a list by its type, so that a mistake in an item is told as one."""
    return "text" if isinstance(value, str) else "items"


Part = TypeVar("Part")
TextOr = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], FIRST_MISTAKE, Tag("items")], Discriminator(text_or_items)
]

MAX_DEPTH = 64
_SAMPLED = {field.name for field in fields(SamplingParams)}


def shallow(value: Any) -> Any:
    """Returns a value that is not nested too deeply for the templates, encoders and compilers that walk it."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [*chain.from_iterable(inner)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels, the most that is read")


JsonObject = Annotated[dict[str, Any], AfterValidator(shallow)]


def listed(texts: Any) -> list[str | list[int]]:
    """Lists what `Texts` holds, where it may hold a single one."""
    return [texts] if isinstance(texts, str) or isinstance(texts[0], int) else list(texts)


# What other servers are asked by these names, and with these values, is done here anyway.
_TRUE = "add_generation_prompt cache_prompt include_reasoning separate_reasoning skip_special_tokens"
_FALSE = "continue_final_message include_stop_str_in_output spaces_between_special_tokens use_beam_search"
AS_IT_IS = {"top_logprobs": 0} | dict.fromkeys(_TRUE.split(), True) | dict.fromkeys(_FALSE.split(), False)


class Ask(BaseModel):
    """Types are taken as they are: a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_unknowns(cls, values: Any) -> Any:
        """An unknown field that holds nothing, or what holds without it, asks for nothing."""
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            name: value
            for name, value in values.items()
            if name in known or not (value is None or value == [] or value == {} or value is AS_IT_IS.get(name, ...))
        }

    def same(self, *names: str) -> dict[str, Any]:
        """Gives fields under their own names, for a request in another shape."""
        return {name: getattr(self, name) for name in names}


class Said(BaseModel):
    """Something said before, or offered, as clients keep it; what no model reads of it, such as ids, is left out."""

    model_config = ConfigDict(strict=True)


class Block(Said):
    cache_control: JsonObject | None = None


class InertFields(Ask):
    """Who asks, how it is filed and what another server should keep; none of it reaches the model."""

    user: str | None = None
    metadata: JsonObject | None = None
    client_metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    cache_control: JsonObject | None = None
    verbosity: str | None = None
    usage: JsonObject | None = None  # whether to count tokens, which is always done


class Thinking(Said):
    """Whether the model should think; how long is its own affair."""

    type: Literal["enabled", "disabled", "adaptive"]

    @property
    def is_wanted(self) -> bool | None:
        return None if self.type == "adaptive" else self.type == "enabled"


class Reasoning(BaseModel):
    """How much the model should think, where its template has a knob for it; what else is asked for is left out."""

    effort: str | None = None


class OtherTool(BaseModel):
    """A tool of a type that only another server has; it is left out of the prompt, and that is reported."""

    type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type}

    @classmethod
    def types_in(cls, given: Iterable[Any]) -> list[str]:
        """Lists the types of what is left out."""
        return sorted({one.type for one in given if isinstance(one, cls)})


def kinds(*known: str, otherwise: str = "other") -> Callable[[Any], str]:
    """Tells what is given apart by its type, so that a mistake in one of the known types is told as one.

    `otherwise`: the kind of what has no type.
    """

    def kind(given: Any) -> str:
        found = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return found if found in known else "other" if isinstance(found, str) else otherwise

    return kind


tool_kind = kinds("function", otherwise="function")


class StreamOptions(Ask):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(InertFields):
    model: str
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1)] | None = 1
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chunk_size: ChunkSize = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_progress: bool | None = False

    @model_validator(mode="after")
    def _check_together(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed; leave stream out")
        if self.return_progress and not self.stream:
            raise ValueError("return_progress goes with stream: true")
        for token in self.logit_bias or {}:
            if not token.isascii() or not token.isdecimal() or len(token) > 9:
                raise ValueError(f"logit_bias names {token!r}, which is no token id")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def _sampling(self, **own: Any) -> SamplingParams:
        """Makes the engine's settings of the fields that have its names and of `own`; null is the engine's default."""
        asked = self.model_dump(include=_SAMPLED) | own
        if self.top_k in (0, -1):  # both mean all, among those who serve models
            asked["top_k"] = None
        if self.seed is not None:
            asked["seed"] = self.seed % 2**63
        if self.logit_bias:
            asked["logit_bias"] = {int(token): amount for token, amount in self.logit_bias.items()}
        return SamplingParams.of({name: value for name, value in asked.items() if value is not None})


class CompletionAsk(SamplingFields):
    prompt: Texts
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Any:
        if self.best_of not in (None, self.num_choices):
            raise ValueError(f"best_of is {self.best_of}; only the value of n is taken")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; that goes with echo: true, to score a prompt")
        return self

    def sampling(self) -> SamplingParams:
        scored = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scored = max(self.logprobs, scored or 0)
        max_tokens = max(1, 16 if self.max_tokens is None else self.max_tokens)
        return self._sampling(max_tokens=max_tokens, prompt_logprobs=scored)
