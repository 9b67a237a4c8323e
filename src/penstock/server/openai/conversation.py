"""A conversation: messages, tools and the format of the answer to a prompt, whichever API it is asked through."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from penstock.errors import InvalidPrompt
from penstock.server.openai.chat_asks import ChatAsk
from penstock.server.openai.tools import ONE_LINE, CallFormat, CallReader, call_format, call_grammar
from penstock.server.run import Run


async def converse(run: Run, ask: ChatAsk) -> None:
    """Starts the choices of a chat, with a reader for the calls that each may write."""
    if ask.skipped_tools:
        run.report("skipped_tools", ask.skipped_tools)
    prompt, form = await asyncio.to_thread(_prompt, run, ask)
    await run.start(
        [prompt],
        ask.sampling(run.engine.scheduler.capacity, _grammar(ask, form)),
        ask.num_choices,
        chunk_size=ask.chunk_size,
        priority=ask.priority,
        reader=partial(CallReader, form, takes_one=ask.parallel_tool_calls is False),
    )


def _prompt(run: Run, ask: ChatAsk) -> tuple[list[int] | list[dict[str, Any]], CallFormat | None]:
    """Gives tokens, and how calls are written where tools are offered.

    Of an image-text model it gives the messages themselves, which the engine reads with their images.
    """
    reader = run.engine.prompts
    messages = run.service.messages(ask.messages)
    if run.engine.lane.reads_images or any(message.has_images for message in ask.messages):
        if ask.offered_tools:
            raise InvalidPrompt("Tools beside an image-text model are not read. Leave the tools out.")
        return messages, None
    known = reader.template.knobs if reader.template else frozenset()
    knobs = {name: value for name, value in ask.knobs.items() if name in known}
    if not ask.offered_tools:
        return reader.message_tokens(messages, **knobs), None
    tools = [tool.for_template() for tool in ask.offered_tools]
    return reader.message_tokens(messages, tools=tools, **knobs), call_format(reader)


def _grammar(ask: ChatAsk, form: CallFormat | None) -> str | None:
    """Finds what the answer has to match; None means any text."""
    if ask.wants_call and form is not None:
        return call_grammar(form, ask.callable_functions)
    if (schema := ask.schema_of_answer) is not None:
        return json.dumps({"grammars": [{"json_schema": schema | ONE_LINE}]})
    return None
