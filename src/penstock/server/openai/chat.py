"""`/v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.request import Output, Token
from penstock.server.openai.answers import ChatAnswer
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
        text, calls = choice.calls.read(output.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        logprobs = None if output.logprobs is None else chat_logprobs(self.tokenizer, output.logprobs)
        reason = "tool_calls" if calls else output.finish_reason
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}

    def token(self, choice: Choice, token: Token) -> list[dict[str, Any]]:
        delta = {"content": choice.calls.push(token.text)}
        if choice.num_written == 1:
            delta["role"] = "assistant"
        told: dict[str, Any] = {"delta": delta, "finish_reason": None}
        if token.logprob is not None:
            told["logprobs"] = chat_logprobs(self.tokenizer, [token.logprob]).model_dump(exclude_unset=True)
        return [told]

    def last(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        """Tells what was held back, the calls, and why it ended."""
        held, calls = choice.calls.finish()
        numbered = [call.model_dump() | {"index": index} for index, call in enumerate(calls)]
        deltas = [delta for delta in ({"content": held}, {"tool_calls": numbered}) if any(delta.values())]
        reason = "tool_calls" if calls else output.finish_reason
        return [*({"delta": delta, "finish_reason": None} for delta in deltas), {"delta": {}, "finish_reason": reason}]
