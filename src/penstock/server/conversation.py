"""A conversation: messages to a prompt, and the answer to text and calls, whichever API it is asked through."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidPrompt
from penstock.request import Finished, Output, PrefillProgress, Token, TokenLogprob
from penstock.server.answers import FinishReason, ToolCall
from penstock.server.chat_asks import ChatAsk
from penstock.server.problems import NotHonoured
from penstock.server.run import Choice, Run
from penstock.server.service import Service
from penstock.server.tools import ONE_LINE, CallFormat, CallReader, call_format, call_grammar, described


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One token. Its text may be empty: half a character, or what may be the beginning of a call."""

    choice: int
    text: str
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a choice: the text that was held back, and the calls."""

    choice: int
    text: str
    calls: list[ToolCall]
    reason: FinishReason
    output: Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole choice."""

    text: str
    calls: list[ToolCall]
    reason: FinishReason
    output: Output


class Conversation:
    """The `n` choices of one request."""

    def __init__(self, service: Service, ask: ChatAsk, run: Run) -> None:
        self.ask = ask
        self.run = run
        self.prompt: Any = None
        self.engine = service.engine.engine
        self._service = service
        self._format: CallFormat | None = None  # None: no tools are offered
        self._readers: dict[int, CallReader] = {}

    async def start(self) -> None:
        ask, settings = self.ask, self._service.settings
        if ask.num_choices > settings.max_choices:
            raise NotHonoured(f"n is {ask.num_choices}; {settings.max_choices} is the most.", param="n")
        self.prompt = await asyncio.to_thread(self._encoded)
        has_tokens = not self.prompt or isinstance(self.prompt[0], int)
        num_tokens = len(self.prompt) if has_tokens else 0
        self._service.check_length(num_tokens)
        if self._format is not None:
            takes_one = ask.parallel_tool_calls is False
            self._readers = {i: CallReader(self._format, takes_one=takes_one) for i in range(ask.num_choices)}
        capacity = self.engine.scheduler.capacity
        extra = {} if (grammar := self._grammar()) is None else {"grammar": grammar}
        settings_by_choice = [ask.chat_sampling(index, capacity) | extra for index in range(ask.num_choices)]
        await self.run.start(
            [Choice(prompt=self.prompt, settings=each, num_prompt_tokens=num_tokens) for each in settings_by_choice]
        )

    async def parts(self) -> AsyncIterator[Said | Ended | PrefillProgress | None]:
        """What happens, one token at a time; None when nothing did for a period."""
        async for happening in self.run.happenings():
            if happening is None:
                yield None
                continue
            event = happening.event
            if isinstance(event, PrefillProgress):
                yield event
            elif isinstance(event, Token):
                reader = self._readers.get(happening.choice)
                text = event.text if reader is None else reader.push(event.text)
                yield Said(choice=happening.choice, text=text, logprob=event.logprob)
            elif isinstance(event, Finished):
                yield self._ended(happening.choice, event.output)

    async def replies(self) -> list[Reply]:
        texts, ends = [""] * self.ask.num_choices, {}
        async for part in self.parts():
            if isinstance(part, Said | Ended):
                texts[part.choice] += part.text
            if isinstance(part, Ended):
                ends[part.choice] = part
        return [
            Reply(
                text=text.strip() if ends[i].calls else text,
                calls=ends[i].calls,
                reason=ends[i].reason,
                output=ends[i].output,
            )
            for i, text in enumerate(texts)
        ]

    def _ended(self, choice: int, output: Output) -> Ended:
        text, calls = self._readers[choice].finish() if self._readers else ("", [])
        reason: FinishReason = "tool_calls" if calls else output.finish_reason
        return Ended(choice=choice, text=text, calls=calls, reason=reason, output=output)

    def _encoded(self) -> list[int] | list[dict[str, Any]]:
        """Tokens; of an image-text model the messages themselves, which the engine reads with their images."""
        ask, reader = self.ask, self.engine.prompts
        max_bytes = self._service.settings.max_image_bytes
        messages = [message.for_template(max_bytes) for message in ask.messages]
        if self.engine.model.media is not None or any(message.has_images for message in ask.messages):
            if ask.offered_tools:
                raise InvalidPrompt("Tools beside an image-text model are not read. Leave the tools out.")
            return messages
        if not ask.offered_tools:
            return reader.message_tokens(messages)
        self._format = call_format(reader)
        return reader.message_tokens(messages, tools=described(ask.offered_tools))

    def _grammar(self) -> str | None:
        ask = self.ask
        if ask.wants_call and self._format is not None:
            return call_grammar(self._format, ask.callable_functions)
        if (schema := ask.schema_of_answer) is not None:
            return json.dumps({"grammars": [{"json_schema": schema | ONE_LINE}]})
        return None
