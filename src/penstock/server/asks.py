"""What requests may hold. A field that is not here is refused; one that could not change the answer is accepted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0)]
ChunkSize = Annotated[int, Field(ge=0)] | Literal["auto"] | None  # None: the server's; 0: the prompt is read whole
MAX_STOPS = 16
MAX_PROMPTS = 64


class Ask(BaseModel):
    """Types are taken as they are: a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_unknowns(cls, values: Any) -> Any:
        """An unknown field that holds nothing asks for nothing."""
        if not isinstance(values, dict):
            return values
        return {
            name: value
            for name, value in values.items()
            if name in cls.model_fields or not (value is None or value == [] or value == {})
        }


class InertFields(Ask):
    """Who asks and how it is filed; none of it reaches the model."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class StreamOptions(Ask):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
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

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, choice: int) -> dict[str, Any]:
        """The engine's settings for one of `n` choices; each has its own seed."""
        settings: dict[str, Any] = {
            name: value
            for name in (
                *["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"],
                *["min_tokens", "ignore_eos", "prompt_logprobs", "stop", "chunk_size"],
            )
            if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None and self.top_k not in (0, -1):  # both mean all, among those who serve models
            settings["top_k"] = self.top_k
        if self.seed is not None:
            settings["seed"] = (self.seed + choice) % 2**63
        if self.logit_bias:
            settings["logit_bias"] = {int(token): amount for token, amount in self.logit_bias.items()}
        return settings


class CompletionAsk(SamplingFields):
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
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

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)

    def sampling(self, choice: int) -> dict[str, Any]:
        settings = super().sampling(choice)
        settings["max_tokens"] = max(1, 16 if self.max_tokens is None else self.max_tokens)
        if self.logprobs is not None:
            settings["logprobs"] = self.logprobs
            if self.echo:
                settings["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return settings
