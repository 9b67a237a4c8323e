"""`/v1/completions`: text or tokens in, text out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.request import Output, Token, TokenLogprob
from penstock.server.openai.answers import CompletionAnswer, CompletionLogprobs
from penstock.server.openai.asks import CompletionAsk, listed
from penstock.server.openai.choices import ChoiceShape
from penstock.server.openai.logprobs import completion_logprobs
from penstock.server.run import Choice, Run
from penstock.server.service import Service

router = APIRouter()


@router.post("/v1/completions", response_model=CompletionAnswer)
async def completions(ask: CompletionAsk, request: Request) -> Response:
    run = Run(Service.of(request, ask.model), request)
    prompts = await run.service.encoded(listed(ask.prompt))
    await run.start(prompts, ask.sampling(), ask.num_choices, chunk_size=ask.chunk_size, priority=ask.priority)
    return await run.respond(Completion(ask, run, prompts), is_streamed=ask.stream)


class Completion(ChoiceShape):
    """The choices of one request: `n` for each of its prompts."""

    prefix = "cmpl"
    answer_type = CompletionAnswer
    kind = streamed_kind = "text_completion"
    ask: CompletionAsk

    def __init__(self, ask: CompletionAsk, run: Run, prompts: list[list[int]]) -> None:
        super().__init__(ask, run, is_scored_only=ask.max_tokens == 0)
        self._prompts = prompts
        self._num_letters = [0] * len(run.choices)  # told so far, by choice

    def whole(self, choice: Choice, output: Output) -> dict[str, Any]:
        text = self._echo(choice) + ("" if self.is_scored_only else output.text)
        prompt = self._prompts[choice.index // self.ask.num_choices]
        return _choice(text, output.finish_reason, self._logprobs(prompt, output))

    def token(self, choice: Choice, token: Token) -> list[dict[str, Any]]:
        """Tells of the token, after the prompt where that is echoed."""
        told = []
        if choice.num_written == 1 and self.ask.echo:
            echo = self._echo(choice)
            self._num_letters[choice.index] = len(echo)
            told.append(_choice(echo))
        if self.is_scored_only:
            return told
        logprobs, offset = None, self._num_letters[choice.index]
        if token.logprob is not None:
            logprobs = completion_logprobs(self.tokenizer, [token.token_id], [token.logprob], offset)
        self._num_letters[choice.index] += len(token.text)
        return [*told, _choice(token.text, logprobs=logprobs)]

    def last(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        return [_choice("", output.finish_reason)]

    def _logprobs(self, prompt: list[int], output: Output) -> CompletionLogprobs | None:
        if output.logprobs is None:
            return None
        token_ids: list[int] = [] if self.is_scored_only else [*output.token_ids]
        found: list[TokenLogprob | None] = [] if self.is_scored_only else [*output.logprobs]
        if self.ask.echo:
            token_ids, found = [*prompt, *token_ids], [*(output.prompt_logprobs or ()), *found]
        return completion_logprobs(self.tokenizer, token_ids, found, 0)

    def _echo(self, choice: Choice) -> str:
        """Gives the text of the prompt, where that is asked for."""
        if not self.ask.echo:
            return ""
        given = listed(self.ask.prompt)[choice.index // self.ask.num_choices]
        return given if isinstance(given, str) else self.tokenizer.decode(given, skip_special_tokens=False)


def _choice(text: str, reason: str | None = None, logprobs: CompletionLogprobs | None = None) -> dict[str, Any]:
    return {"text": text, "logprobs": logprobs, "finish_reason": reason}
