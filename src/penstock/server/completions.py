"""`/v1/completions`: text or tokens in, text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from penstock.request import Finished, Output, PrefillProgress, Token, TokenLogprob
from penstock.server import sse
from penstock.server.answers import CompletionAnswer, CompletionChoice, CompletionLogprobs, Usage
from penstock.server.asks import CompletionAsk
from penstock.server.logprobs import completion_logprobs, prompt_logprobs
from penstock.server.problems import NotHonoured
from penstock.server.run import CLIENT_CLOSED_REQUEST, Choice, Run, unless_disconnected
from penstock.server.service import Service

router = APIRouter()


@router.post("/v1/completions", response_model=CompletionAnswer)
async def completions(ask: CompletionAsk, request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(ask.model)
    completion = Completion(service, ask, Run(service, request, priority=ask.priority or 0))
    await completion.start()
    if ask.stream:
        return completion.run.streamed(completion.events())
    try:
        answer = await unless_disconnected(request, completion.answer())
    finally:
        completion.run.close()
    if answer is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(answer.model_dump(exclude_unset=True))


class Completion:
    """The choices of one request: `n` for each of its prompts, side by side."""

    def __init__(self, service: Service, ask: CompletionAsk, run: Run) -> None:
        self.run = run
        self._service = service
        self._ask = ask
        self._tokenizer = service.engine.engine.tokenizer
        self._prompts: list[list[int]] = []
        self._offset: dict[int, int] = {}  # characters written so far, by choice
        self._num_written = 0

    async def start(self) -> None:
        ask, settings = self._ask, self._service.settings
        num_choices = ask.num_choices * len(ask.prompts)
        if num_choices > settings.max_choices:
            raise NotHonoured(f"{num_choices} choices are asked for; {settings.max_choices} is the most.", param="n")
        self._prompts = await asyncio.to_thread(self._encoded)
        for tokens in self._prompts:
            self._service.check_length(len(tokens))
        await self.run.start(
            [
                Choice(prompt=tokens, settings=ask.sampling(index), num_prompt_tokens=len(tokens))
                for tokens in self._prompts
                for index in range(ask.num_choices)
            ]
        )

    async def answer(self) -> CompletionAnswer:
        outputs = await self.run.finish()
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return self._answer(choices, usage=self._usage(outputs))

    async def events(self) -> AsyncIterator[bytes]:
        ask = self._ask
        async for happening in self.run.happenings():
            if happening is None or isinstance(happening.event, PrefillProgress):
                progress = {"prompt_progress": self.run.progress()} if ask.return_progress else None
                yield sse.event(self._answer([], **progress)) if progress else sse.NOTHING
            elif isinstance(happening.event, Token):
                for choice in self._token_choices(happening.choice, happening.event):
                    yield sse.event(self._chunk([choice]))
            elif isinstance(happening.event, Finished):
                reason = happening.event.output.finish_reason
                choice = CompletionChoice(index=happening.choice, text="", logprobs=None, finish_reason=reason)
                yield sse.event(self._chunk([choice]))
        if ask.wants_usage:
            yield sse.event(self._answer([], usage=self._usage(self.run.ordered_outputs)))
        yield sse.DONE

    def _token_choices(self, index: int, token: Token) -> list[CompletionChoice]:
        """The token, after the prompt where that is echoed."""
        found = []
        if index not in self._offset:
            self._offset[index] = 0
            if self._ask.echo:
                text = self._prompt_text(index)
                self._offset[index] = len(text)
                found.append(CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None))
        if self._ask.max_tokens == 0:
            return found
        self._num_written += 1
        logprobs = None
        if token.logprob is not None:
            logprobs = completion_logprobs(self._tokenizer, [token.token_id], [token.logprob], self._offset[index])
        self._offset[index] += len(token.text)
        return [*found, CompletionChoice(index=index, text=token.text, logprobs=logprobs, finish_reason=None)]

    def _choice(self, index: int, output: Output) -> CompletionChoice:
        ask, prompt = self._ask, self._prompts[index // self._ask.num_choices]
        text = "" if ask.max_tokens == 0 else output.text
        if ask.echo:
            text = self._prompt_text(index) + text
        choice = CompletionChoice(
            index=index, text=text, logprobs=self._logprobs(prompt, output), finish_reason=output.finish_reason
        )
        if ask.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, prompt, output.prompt_logprobs or ())
        return choice

    def _logprobs(self, prompt: list[int], output: Output) -> CompletionLogprobs | None:
        if output.logprobs is None:
            return None
        token_ids, found = [*output.token_ids], [*output.logprobs]
        if self._ask.max_tokens == 0:
            token_ids, found = [], []
        both: list[TokenLogprob | None] = [*(output.prompt_logprobs or ()), *found] if self._ask.echo else [*found]
        return completion_logprobs(self._tokenizer, [*prompt, *token_ids] if self._ask.echo else token_ids, both, 0)

    def _prompt_text(self, index: int) -> str:
        given = self._ask.prompts[index // self._ask.num_choices]
        return given if isinstance(given, str) else self._tokenizer.decode(given, skip_special_tokens=False)

    def _encoded(self) -> list[list[int]]:
        reader = self._service.engine.engine.prompts
        return [reader.text_tokens(given) if isinstance(given, str) else given for given in self._ask.prompts]

    def _usage(self, outputs: list[Output]) -> Usage:
        return Usage.of_outputs(outputs, self._ask.num_choices, is_scored_only=self._ask.max_tokens == 0)

    def _chunk(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        if self._ask.wants_usage_always:
            return self._answer(choices, usage=self.run.usage_so_far(self._num_written))
        return self._answer(choices)

    def _answer(self, choices: list[CompletionChoice], **fields: object) -> CompletionAnswer:
        return CompletionAnswer(
            id=f"cmpl-{self.run.request_id}",
            object="text_completion",
            created=self.run.created,
            model=self._ask.model,
            choices=choices,
            **fields,  # ty: ignore[invalid-argument-type]
        )
