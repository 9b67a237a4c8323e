"""`/v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from penstock.errors import InvalidPrompt
from penstock.request import Finished, Output, PrefillProgress, Token
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
from penstock.server.logprobs import chat_logprobs, prompt_logprobs
from penstock.server.problems import NotHonoured
from penstock.server.run import CLIENT_CLOSED_REQUEST, PROGRESS_PERIOD_S, Choice, Run, unless_disconnected
from penstock.server.service import Service
from penstock.server.tools import CallFormat, CallReader, call_format, call_grammar, described

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatAnswer)
async def chat_completions(ask: ChatAsk, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(ask.model)
    chat = Chat(service, ask, Run(service, request, priority=ask.priority or 0))
    await chat.start()
    if ask.stream:
        return sse.EventStream(chat.events(), request_id=chat.run.request_id, close=chat.run.close)
    try:
        answer = await unless_disconnected(request, chat.answer())
    finally:
        chat.run.close()
    if answer is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(answer.model_dump(exclude_unset=True))


class Chat:
    """The `n` choices of one request."""

    def __init__(self, service: Service, ask: ChatAsk, run: Run) -> None:
        self.run = run
        self._service = service
        self._ask = ask
        self._engine = service.engine.engine
        self._format: CallFormat | None = None  # None: no tools are offered
        self._readers: dict[int, CallReader] = {}
        self._prompt: Any = None
        self._num_written = 0
        self._begun: set[int] = set()

    async def start(self) -> None:
        ask, settings = self._ask, self._service.settings
        if ask.num_choices > settings.max_choices:
            raise NotHonoured(f"n is {ask.num_choices}; {settings.max_choices} is the most.", param="n")
        self._prompt = await asyncio.to_thread(self._encoded)
        has_tokens = isinstance(self._prompt[0], int) if self._prompt else True
        num_tokens = len(self._prompt) if has_tokens else 0
        self._service.check_length(num_tokens)
        if self._format is not None:
            takes_one = ask.parallel_tool_calls is False
            self._readers = {i: CallReader(self._format, takes_one=takes_one) for i in range(ask.num_choices)}
        capacity = self._engine.scheduler.capacity
        extra = {} if (grammar := self._grammar()) is None else {"grammar": grammar}
        await self.run.start(
            [
                Choice(
                    prompt=self._prompt, settings=ask.chat_sampling(i, capacity) | extra, num_prompt_tokens=num_tokens
                )
                for i in range(ask.num_choices)
            ]
        )

    async def answer(self) -> ChatAnswer:
        outputs = await self.run.finish()
        return ChatAnswer(
            **self._head("chat.completion"),
            choices=[self._choice(index, output) for index, output in enumerate(outputs)],
            usage=Usage.of_outputs(outputs, self._ask.num_choices),
        )

    async def events(self) -> AsyncIterator[bytes]:
        ask = self._ask
        wants_progress, period_s = bool(ask.return_progress), self._service.settings.keep_alive_s
        async for happening in self.run.happenings(PROGRESS_PERIOD_S if wants_progress else period_s):
            if happening is None or isinstance(happening.event, PrefillProgress):
                if wants_progress:
                    yield sse.event(self._chunk([], prompt_progress=self.run.progress()))
                elif happening is None:
                    yield sse.KEEP_ALIVE
            elif isinstance(happening.event, Token):
                yield sse.event(self._token_chunk(happening.choice, happening.event))
            elif isinstance(happening.event, Finished):
                for choice in self._last_choices(happening.choice, happening.event.output):
                    yield sse.event(self._chunk([choice], **self._running_usage()))
        if ask.wants_usage:
            usage = Usage.of_outputs(self.run.ordered_outputs, ask.num_choices)
            yield sse.event(self._chunk([], usage=usage))
        yield sse.DONE

    def _token_chunk(self, index: int, token: Token) -> ChatChunk:
        self._num_written += 1
        reader = self._readers.get(index)
        text = token.text if reader is None else reader.push(token.text)
        is_first = index not in self._begun
        self._begun.add(index)
        delta = ChatDelta(role="assistant", content=text) if is_first else ChatDelta(content=text)
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=None)
        if token.logprob is not None:
            choice.logprobs = chat_logprobs(self._engine.tokenizer, [token.logprob])
        return self._chunk([choice], **self._running_usage())

    def _last_choices(self, index: int, output: Output) -> list[ChatChunkChoice]:
        """What was held back, if anything, and the reason why it ended."""
        found = []
        reason = output.finish_reason
        if reader := self._readers.get(index):
            text, calls = reader.finish()
            if text:
                found.append(ChatChunkChoice(index=index, delta=ChatDelta(content=text), finish_reason=None))
            if calls:
                deltas = [ToolCallDelta(index=i, **call.model_dump()) for i, call in enumerate(calls)]
                found.append(ChatChunkChoice(index=index, delta=ChatDelta(tool_calls=deltas), finish_reason=None))
                reason = "tool_calls"
        return [*found, ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)]

    def _choice(self, index: int, output: Output) -> ChatChoice:
        reason, message = output.finish_reason, ChatMessage(role="assistant", content=output.text, refusal=None)
        if reader := self._readers.get(index):
            shown = reader.push(output.text)
            held, calls = reader.finish()
            content = (shown + held).strip() if calls else shown + held
            message.content = content if content or not calls else None
            if calls:
                message.tool_calls, reason = calls, "tool_calls"
        choice = ChatChoice(index=index, message=message, finish_reason=reason, logprobs=None)
        if output.logprobs is not None:
            choice.logprobs = chat_logprobs(self._engine.tokenizer, output.logprobs)
        if output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._engine.tokenizer, self._prompt, output.prompt_logprobs)
        return choice

    def _encoded(self) -> list[int] | list[dict[str, Any]]:
        """Tokens; of an image-text model the messages themselves, which the engine reads with their images."""
        ask, reader = self._ask, self._engine.prompts
        max_bytes = self._service.settings.max_image_bytes
        messages = [message.for_template(max_bytes) for message in ask.messages]
        if self._engine.model.media is not None or any(message.has_images for message in ask.messages):
            if ask.offered_tools:
                raise InvalidPrompt("Tools beside an image-text model are not read. Leave the tools out.")
            return messages
        if not ask.offered_tools:
            return reader.message_tokens(messages)
        self._format = call_format(reader)
        return reader.message_tokens(messages, tools=described(ask.offered_tools))

    def _grammar(self) -> str | None:
        ask = self._ask
        if ask.wants_call and self._format is not None:
            return call_grammar(self._format, ask.callable_functions)
        if (schema := ask.schema_of_answer) is not None:
            return json.dumps({"grammars": [{"json_schema": schema}]})
        return None

    def _running_usage(self) -> dict[str, Usage]:
        return {"usage": self.run.usage_so_far(self._num_written)} if self._ask.wants_usage_always else {}

    def _chunk(self, choices: list[ChatChunkChoice], **fields: Any) -> ChatChunk:
        return ChatChunk(**self._head("chat.completion.chunk"), choices=choices, **fields)

    def _head(self, kind: str) -> dict[str, Any]:
        run = self.run
        return {"id": f"chatcmpl-{run.request_id}", "object": kind, "created": run.created, "model": self._ask.model}
