"""What answers hold, in the shapes that OpenAI's clients read."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel

from penstock.answer.events import WrittenCall
from penstock.request import FinishReason as EngineReason
from penstock.request import HitReason, Hits, Output

# An answer that was cut off by a deadline or a shutdown is an error, and reaches nobody in this shape.
FinishReason = EngineReason | Literal["tool_calls"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    cached_tokens_by_reason: dict[HitReason, int] = {}  # why they were still there; only of answers that have ended

    @classmethod
    def of(cls, *found: Hits) -> PromptTokensDetails:
        by_reason = {reason: sum(getattr(hits, reason) for hits in found) for reason in get_args(HitReason)}
        return cls(cached_tokens=sum(by_reason.values()), cached_tokens_by_reason=by_reason)


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails(cached_tokens=0)

    @classmethod
    def of(cls, *, num_prompt: int, cached: PromptTokensDetails, num_written: int) -> Usage:
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_written,
            total_tokens=num_prompt + num_written,
            prompt_tokens_details=cached,
        )

    @classmethod
    def of_outputs(cls, outputs: list[Output], num_choices: int, *, is_scored_only: bool = False) -> Usage:
        """A prompt counts once, however many choices were written for it."""
        firsts = outputs[::num_choices]
        return cls.of(
            num_prompt=sum(output.num_prompt_tokens for output in firsts),
            cached=PromptTokensDetails.of(*(output.hits for output in firsts)),
            num_written=0 if is_scored_only else sum(len(output.token_ids) for output in outputs),
        )


class PromptProgress(BaseModel):
    total: int
    cached: int
    processed: int
    time_ms: float
    eta_ms: float | None  # None: nothing was read yet
    queue_position: int  # 0: it is being read


class PromptLogprob(BaseModel):
    """Tells the logprob of one possible token at one place of the prompt."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def of(cls, call: WrittenCall) -> ToolCall:
        return cls(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under its newer name


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Answer(BaseModel):
    id: str
    created: int
    model: str


class ChatAnswer(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class CompletionAnswer(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_progress: PromptProgress | None = None
