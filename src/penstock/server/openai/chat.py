"""`/v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.answer.events import AnswerEvent, CallArguments, CallBegun, CallEnded, ReasoningDelta, TextDelta
from penstock.request import Output, Token
from penstock.server.openai.answers import ChatAnswer, ToolCall
from penstock.server.openai.chat_asks import ChatAsk
from penstock.server.openai.choices import ChoiceShape
from penstock.server.openai.conversation import converse
from penstock.server.openai.logprobs import chat_logprobs
from penstock.server.run import Choice, Run
from penstock.server.service import Service

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatAnswer)
async def chat_completions(ask: ChatAsk, request: Request) -> Response:
    run = Run(Service.of(request, ask.model), request)
    await converse(run, ask)
    return await run.respond(Chat(ask, run), is_streamed=ask.stream)


class Chat(ChoiceShape):
    """A conversation in the shape of chat completions."""

    prefix = "chatcmpl"
    answer_type = ChatAnswer
    kind, streamed_kind = "chat.completion", "chat.completion.chunk"

    def whole(self, choice: Choice, output: Output) -> dict[str, Any]:
        text, calls, reasoning = choice.written.text, choice.written.calls, choice.written.reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [ToolCall.of(call) for call in calls]
        if reasoning:
            message |= _reasoning(reasoning)
        logprobs = None if output.logprobs is None else chat_logprobs(self.tokenizer, output.logprobs)
        return {"message": message, "logprobs": logprobs, "finish_reason": _reason(choice, output)}

    def token(self, choice: Choice, token: Token) -> list[dict[str, Any]]:
        """Tells what a token brought; of one that is held back, that there was one."""
        deltas = _deltas(choice.news) or [{"content": ""}]
        if choice.num_written == 1:
            deltas[0]["role"] = "assistant"
        told: list[dict[str, Any]] = [{"delta": delta, "finish_reason": None} for delta in deltas]
        if token.logprob is not None:
            told[0]["logprobs"] = chat_logprobs(self.tokenizer, [token.logprob]).model_dump(exclude_unset=True)
        return told

    def last(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        """Tells what was held back, and why it ended."""
        told = [{"delta": delta, "finish_reason": None} for delta in _deltas(choice.news)]
        return [*told, {"delta": {}, "finish_reason": _reason(choice, output)}]


def _deltas(news: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for event in news:
        match event:
            case TextDelta(text=text):
                found.append({"content": text})
            case ReasoningDelta(text=text):
                found.append(_reasoning(text))
            case CallBegun():
                begun = {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
                found.append({"tool_calls": [{"index": event.index} | begun]})
            case CallArguments(index=index, text=text):
                found.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            case CallEnded(unread=text) if text:
                found.append({"content": text})
            case _:
                pass
    return found


def _reasoning(text: str) -> dict[str, Any]:
    """Names the reasoning in both of the ways in which clients ask for it."""
    return {"reasoning_content": text, "reasoning": text}


def _reason(choice: Choice, output: Output) -> str:
    return "tool_calls" if choice.written.calls and not choice.written.is_broken else output.finish_reason
