"""`/v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from penstock.server import sse
from penstock.server.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ToolCallDelta,
    Usage,
)
from penstock.server.chat_asks import ChatAsk
from penstock.server.conversation import Conversation, Ended, Reply, Said
from penstock.server.logprobs import chat_logprobs, prompt_logprobs
from penstock.server.run import CLIENT_CLOSED_REQUEST, Run, unless_disconnected
from penstock.server.service import Service

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatAnswer)
async def chat_completions(ask: ChatAsk, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(ask.model)
    run = Run(service, request, priority=ask.priority or 0)
    chat = Chat(Conversation(service, ask, run))
    await chat.conversation.start()
    if ask.stream:
        return run.streamed(chat.events())
    try:
        answer = await unless_disconnected(request, chat.answer())
    finally:
        run.close()
    if answer is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(answer.model_dump(exclude_unset=True))


class Chat:
    """A conversation in the shape of chat completions."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self._ask, self._run = conversation.ask, conversation.run
        self._tokenizer = conversation.engine.tokenizer
        self._num_written = 0
        self._begun: set[int] = set()

    async def answer(self) -> ChatAnswer:
        replies = await self.conversation.replies()
        return ChatAnswer(
            **self._head("chat.completion"),
            choices=[self._choice(index, reply) for index, reply in enumerate(replies)],
            usage=Usage.of_outputs([reply.output for reply in replies], self._ask.num_choices),
        )

    async def events(self) -> AsyncIterator[bytes]:
        ask = self._ask
        async for part in self.conversation.parts():
            if isinstance(part, Said):
                yield sse.event(self._token_chunk(part))
            elif isinstance(part, Ended):
                for choice in self._last_choices(part):
                    yield sse.event(self._chunk([choice], **self._running_usage()))
            elif ask.return_progress:
                yield sse.event(self._chunk([], prompt_progress=self._run.progress()))
            else:
                yield sse.NOTHING
        if ask.wants_usage:
            usage = Usage.of_outputs(self._run.ordered_outputs, ask.num_choices)
            yield sse.event(self._chunk([], usage=usage))
        yield sse.DONE

    def _token_chunk(self, said: Said) -> ChatChunk:
        self._num_written += 1
        is_first = said.choice not in self._begun
        self._begun.add(said.choice)
        delta = ChatDelta(role="assistant", content=said.text) if is_first else ChatDelta(content=said.text)
        choice = ChatChunkChoice(index=said.choice, delta=delta, finish_reason=None)
        if said.logprob is not None:
            choice.logprobs = chat_logprobs(self._tokenizer, [said.logprob])
        return self._chunk([choice], **self._running_usage())

    def _last_choices(self, ended: Ended) -> list[ChatChunkChoice]:
        """What was held back, if anything, and the reason why it ended."""
        deltas = []
        if ended.text:
            deltas.append(ChatDelta(content=ended.text))
        if ended.calls:
            calls = [ToolCallDelta(index=i, **call.model_dump()) for i, call in enumerate(ended.calls)]
            deltas.append(ChatDelta(tool_calls=calls))
        found = [ChatChunkChoice(index=ended.choice, delta=delta, finish_reason=None) for delta in deltas]
        return [*found, ChatChunkChoice(index=ended.choice, delta=ChatDelta(), finish_reason=ended.reason)]

    def _choice(self, index: int, reply: Reply) -> ChatChoice:
        content = None if reply.calls and not reply.text else reply.text
        message = ChatMessage(role="assistant", content=content, refusal=None)
        if reply.calls:
            message.tool_calls = reply.calls
        choice = ChatChoice(index=index, message=message, finish_reason=reply.reason, logprobs=None)
        output = reply.output
        if output.logprobs is not None:
            choice.logprobs = chat_logprobs(self._tokenizer, output.logprobs)
        if output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, self.conversation.prompt, output.prompt_logprobs)
        return choice

    def _running_usage(self) -> dict[str, Usage]:
        return {"usage": self._run.usage_so_far(self._num_written)} if self._ask.wants_usage_always else {}

    def _chunk(self, choices: list[ChatChunkChoice], **fields: Any) -> ChatChunk:
        return ChatChunk(**self._head("chat.completion.chunk"), choices=choices, **fields)

    def _head(self, kind: str) -> dict[str, Any]:
        run = self._run
        return {"id": f"chatcmpl-{run.request_id}", "object": kind, "created": run.created, "model": self._ask.model}
