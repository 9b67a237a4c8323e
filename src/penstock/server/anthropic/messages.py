"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, over the same conversation as OpenAI's."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.engine.engine import Event
from penstock.request import Finished, Output, Token
from penstock.server import sse
from penstock.server.anthropic.asks import CountAsk, MessagesAsk
from penstock.server.anthropic.blocks import (
    BlockStream,
    Message,
    MessageUsage,
    StopReason,
    TokenCount,
    blocks_of,
    event,
)
from penstock.server.openai.conversation import converse, num_tokens
from penstock.server.problems import ANTHROPIC_PATHS, AnthropicProblem, as_asked
from penstock.server.run import PROGRESS_PERIOD_S, Choice, Run, Shape
from penstock.server.service import Service

router = APIRouter(prefix="/v1/messages", responses={"default": {"model": AnthropicProblem}})


@router.post("", response_model=Message)
async def messages(ask: MessagesAsk, request: Request) -> Response:
    run = Run(Service.of(request, ask.model), request)
    if ask.thread is not None and ask.thread.previous_message_id is not None:
        ask = ask.after(run.service.threads.messages(run.sharing_scope, ask.thread.previous_message_id)[0])
    run.report("skipped_blocks", ask.skipped_blocks)
    await converse(run, as_asked(ask.as_chat))
    return await run.respond(AnsweredMessage(ask, run), is_streamed=ask.stream)


@router.post("/count_tokens")
async def count_tokens(ask: CountAsk, request: Request) -> TokenCount:
    return TokenCount(input_tokens=await num_tokens(Service.of(request, ask.model), as_asked(ask.as_chat)))


class AnsweredMessage(Shape):
    """A conversation in the shape of a message. Pings tell the progress while the prompt is read."""

    keep_alive = event("ping")

    def __init__(self, ask: MessagesAsk, run: Run) -> None:
        self._ask, self._run = ask, run
        self._id = f"msg_{run.request_id}"
        self._blocks = BlockStream()
        self._has_begun = False
        self._pinged_at = 0.0

    def answer(self) -> dict[str, Any]:
        (choice,), (output,) = self._run.choices, self._run.outputs
        reason, sequence = self._stopped(choice, output)
        self._keep(choice)
        found = {"content": blocks_of(choice.written), "stop_reason": reason, "stop_sequence": sequence}
        return self._message(self._final_usage(output), **found).model_dump()

    def tell(self, choice: Choice | None, event: Event | None) -> bytes:
        """Begins with the first thing that happens, because only then it is known what the cache held."""
        begun = sse.NOTHING if self._has_begun else self._begin()
        if choice is not None and isinstance(event, Token):
            return begun + self._blocks.tell(choice.news)
        if choice is not None and isinstance(event, Finished):
            return begun + self._blocks.tell(choice.news) + self._blocks.close() + self._end(choice, event.output)
        return begun + self._ping()

    def failed(self, error: BaseException, request_id: str) -> bytes:
        return sse.failure(error, request_id, ANTHROPIC_PATHS)

    def _begin(self) -> bytes:
        self._has_begun = True
        usage = self._run.usage_so_far(0)
        known = self._usage(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, 0)
        return event("message_start", message=self._message(known))

    def _ping(self) -> bytes:
        now = time.monotonic()
        if now - self._pinged_at < PROGRESS_PERIOD_S:
            return sse.NOTHING
        self._pinged_at = now
        return event("ping", prompt_progress=self._run.progress())

    def _end(self, choice: Choice, output: Output) -> bytes:
        reason, sequence = self._stopped(choice, output)
        usage = self._final_usage(output)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._keep(choice)
        return event("message_delta", delta=delta, usage=usage) + event("message_stop")

    def _keep(self, choice: Choice) -> None:
        """Keeps the conversation of a thread, with this answer."""
        if self._ask.thread is None:
            return
        kept, content = self._ask.conversation, [block.model_dump() for block in blocks_of(choice.written)]
        kept["messages"].append({"role": "assistant", "content": content})
        self._run.service.threads.keep(self._run.sharing_scope, {"id": self._id}, [kept])

    def _message(self, usage: MessageUsage, **found: Any) -> Message:
        ended: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None} | found
        return Message(id=self._id, model=self._ask.model, usage=usage, **ended)

    def _final_usage(self, output: Output) -> MessageUsage:
        usage = self._usage(output.num_prompt_tokens, output.num_cached_tokens, len(output.token_ids))
        return usage.model_copy(update={"cache_read_by_reason": asdict(output.hits)})

    def _usage(self, num_prompt: int, num_cached: int, num_written: int) -> MessageUsage:
        """Counts as written to the cache the whole blocks of the prompt that were not found there."""
        engine = self._run.engine
        block_size = engine.config.block_size
        num_kept = num_prompt // block_size * block_size if engine.scheduler.prefix is not None else 0
        num_created = max(0, num_kept - num_cached)
        return MessageUsage(
            input_tokens=num_prompt - num_cached - num_created,
            cache_creation_input_tokens=num_created,
            cache_read_input_tokens=num_cached,
            output_tokens=num_written,
        )

    def _stopped(self, choice: Choice, output: Output) -> tuple[StopReason, str | None]:
        if choice.written.calls and not choice.written.is_broken:
            return "tool_use", None
        if output.finish_reason == "length":
            return "max_tokens", None
        stops = self._ask.stop_sequences or []
        if stops and output.token_ids and output.token_ids[-1] not in self._run.engine.model.eos_ids:
            text = self._run.engine.tokenizer.decode(list(output.token_ids), skip_special_tokens=False)
            return "stop_sequence", next((stop for stop in stops if stop in text), None)
        return "end_turn", None
