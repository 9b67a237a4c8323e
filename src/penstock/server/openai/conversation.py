"""A conversation: messages, tools and the format of the answer to a prompt, whichever API it is asked through."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.answer.grammar import GrammarWriter
from penstock.answer.reader import AnswerFormat
from penstock.engine.engine import Prompt
from penstock.errors import InvalidPrompt
from penstock.server.openai.chat_asks import ChatAsk, GivenMessage
from penstock.server.run import Run
from penstock.server.service import Service

ANOTHER = "?"  # a question that goes on in its own way


async def converse(run: Run, ask: ChatAsk) -> None:
    """Starts the choices of a chat, each with a reader for the reasoning and the calls that it may write."""
    run.report("skipped_tools", ask.skipped_tools)
    prompt, form = await asyncio.to_thread(prompt_of, run.service, ask)
    forks = await asyncio.to_thread(_forks, run.service, ask, prompt) if run.engine.states is not None else []
    special_tokens = run.engine.tokenizer.special_tokens
    shown = tuple(id_ for text, id_ in special_tokens.items() if any(text in marker for marker in form.markers))
    sampling = ask.sampling(run.engine.scheduler.capacity, _grammar(ask, form, special_tokens))
    await run.start(
        [prompt],
        replace(sampling, shown_tokens=shown),
        ask.num_choices,
        chunk_size=ask.chunk_size,
        priority=ask.priority,
        form=form,
        forks=forks,
    )


async def num_tokens(service: Service, ask: ChatAsk) -> int:
    """Counts the tokens of the prompt that a chat becomes; nothing is run."""
    prompt, _ = await asyncio.to_thread(prompt_of, service, ask)
    return await service.engine.num_tokens(prompt)


def prompt_of(service: Service, ask: ChatAsk) -> tuple[Prompt, AnswerFormat]:
    """Gives tokens, or a text and the images in it, and how the answer will be read."""
    reader, forms = service.prompts, service.forms
    messages, tools = service.messages(ask.messages), ask.offered_tools
    if tools and not forms.shows_tools:
        raise InvalidPrompt("The model's chat template has no place for tools. Take another model, or leave them out.")
    if tools and forms.calls is None:
        raise InvalidPrompt(
            "The model's chat template shows no form of calls that is known here. Name one by --tool-parser when the "
            "server is started, or leave the tools out."
        )
    if any(message.has_images for message in ask.messages):
        prompt = reader.ask(messages, (), (), **_variables(service, ask))
        text = prompt.text
    else:
        text = reader.rendered(messages, **_variables(service, ask))
        prompt = reader.rendered_tokens(text)
    schemas = {tool.function.name: tool.function.schema_of_arguments for tool in tools} if tools else None
    return prompt, forms.answer_format(text, schemas, takes_one_call=ask.parallel_tool_calls is False)


def _variables(service: Service, ask: ChatAsk) -> dict[str, Any]:
    """What the template is told beside the messages."""
    template, tools = service.prompts.template, [tool.for_template() for tool in ask.offered_tools]
    known = template.knobs if template else frozenset()
    return {name: value for name, value in ask.knobs.items() if name in known} | ({"tools": tools} if tools else {})


def _forks(service: Service, ask: ChatAsk, prompt: Prompt) -> list[int]:
    """Finds after how many tokens other prompts part from this one: what it shares with a conversation that does."""
    if not isinstance(prompt, list):
        return []
    found: list[int] = []
    for num_messages in ask.forks:
        other = [*ask.messages[:num_messages], GivenMessage(role="user", content=ANOTHER)]
        with suppress(InvalidPrompt):  # turns that the template does not take
            variables = _variables(service, ask)
            tokens = service.prompts.message_tokens(service.messages(other), **variables)
            found.append(next((n for n, (one, two) in enumerate(zip(prompt, tokens, strict=False)) if one != two), 0))
    return found


def _grammar(ask: ChatAsk, form: AnswerFormat, special_tokens: Mapping[str, int]) -> str | None:
    """Finds what the answer has to match; None means any text. Reasoning that is open comes first."""
    reasoning = form.reasoning
    writer = GrammarWriter(special_tokens, reasoning if form.is_reasoning_open else None)
    if ask.wants_call and form.calls is not None:
        schemas = {function.name: function.schema_of_arguments for function in ask.callable_functions}
        return writer.call(form.calls, schemas)
    if (schema := ask.schema_of_answer) is not None:
        return writer.json(schema, reasoning.answer_start if reasoning else "")
    return None
