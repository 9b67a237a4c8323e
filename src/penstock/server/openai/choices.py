"""What the two completion APIs share: choices, sent whole with their usage or as one event for each token."""

from __future__ import annotations

from typing import Any, ClassVar

from penstock.engine.engine import Event
from penstock.request import Finished, Output, Token
from penstock.server import sse
from penstock.server.openai.answers import ChatAnswer, CompletionAnswer, Usage
from penstock.server.openai.asks import SamplingFields, StreamOptions
from penstock.server.openai.logprobs import prompt_logprobs
from penstock.server.run import Choice, Run, Shape


class ChoiceShape(Shape):
    """Choices side by side. What is streamed of one is a plain dict: it is made for every token."""

    prefix: ClassVar[str]  # of ids
    answer_type: ClassVar[type[ChatAnswer | CompletionAnswer]]
    kind: ClassVar[str]  # of answers
    streamed_kind: ClassVar[str]

    def __init__(self, ask: SamplingFields, run: Run, *, is_scored_only: bool = False) -> None:
        self.run = run
        self.tokenizer = run.engine.tokenizer
        self.is_scored_only = is_scored_only  # what is written is not asked for, and not counted
        self.ask = ask
        self._options = ask.stream_options or StreamOptions()
        self._head = {"id": f"{self.prefix}-{run.request_id}", "created": run.created, "model": ask.model}

    def whole(self, choice: Choice, output: Output) -> dict[str, Any]:
        """Makes a choice that has ended."""
        raise NotImplementedError

    def token(self, choice: Choice, token: Token) -> list[dict[str, Any]]:
        """Tells of a token, as choices of which each is sent by itself."""
        raise NotImplementedError

    def last(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        """Tells of the end in the same way."""
        raise NotImplementedError

    def answer(self) -> dict[str, Any]:
        choices = []
        for choice, output in zip(self.run.choices, self.run.outputs, strict=True):
            choices.append({"index": choice.index} | self.whole(choice, output))
            if self.ask.prompt_logprobs is not None:
                choices[-1]["prompt_logprobs"] = prompt_logprobs(self.tokenizer, output.prompt_logprobs or ())
        answer = self._head | {"object": self.kind, "choices": choices, "usage": self._usage()}
        return self.answer_type.model_validate(answer).model_dump(exclude_unset=True)

    def tell(self, choice: Choice | None, event: Event | None) -> bytes:
        if choice is not None and isinstance(event, Token):
            told = self.token(choice, event)
        elif choice is not None and isinstance(event, Finished):
            told = self.last(choice, event.output)
        else:
            return self._sent([], prompt_progress=self.run.progress()) if self.ask.return_progress else sse.NOTHING
        more: dict[str, Any] = {}
        if self._options.continuous_usage_stats:
            num_written = sum(one.num_written for one in self.run.choices)
            more["usage"] = self.run.usage_so_far(0 if self.is_scored_only else num_written)
        return b"".join([self._sent([{"index": choice.index} | each], **more) for each in told])

    def end(self) -> bytes:
        return (self._sent([], usage=self._usage()) if self._options.include_usage else sse.NOTHING) + sse.DONE

    def _sent(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse.event(self._head | {"object": self.streamed_kind, "choices": choices} | more)

    def _usage(self) -> Usage:
        return Usage.of_outputs(self.run.outputs, self.ask.num_choices, is_scored_only=self.is_scored_only)
