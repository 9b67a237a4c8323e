"""Chat templates: from messages to the text that a model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.errors import InvalidModelFile, InvalidPrompt, first_line
from penstock.prompt.sandbox import Budget, Inspected, Opaque, Sandbox, concat, leaves, length, spending

_STEPS, _STEPS_PER_VALUE = 300_000, 200
_CHARACTERS, _COPIES_OF_INPUT = 8 << 20, 64
_MAX_SOURCE_CHARACTERS = 1 << 16  # some seconds to compile, at worst; those of models have up to 30,000
_GIVEN = ("messages", "tools", "add_generation_prompt")

# Trimming, escaping, quoting and changing case all alter it, so that it comes out whole only if it was just printed.
_SENTINEL = " \n\t <&>\"'\\{{ Penstock's content: Ünïque \u2028 }}\t\n "


class ChatTemplate:
    """A compiled template; rendering it is bounded in steps and in characters, whatever it says."""

    def __init__(self, source: str, *, special_tokens: dict[str, str]) -> None:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise InvalidModelFile(
                f"The chat template has {len(source):,} characters; {_MAX_SOURCE_CHARACTERS:,} is the most. "
                "Give a shorter one."
            )
        self.source = source
        self.special_tokens = dict(special_tokens)
        try:
            self._template = Sandbox().template(source)
        except Exception as error:  # the template is foreign code, and so may be what is wrong with it
            raise InvalidModelFile(
                f"The chat template does not compile: {first_line(error, 300)}. Mend it, or give another one."
            ) from error

    @cached_property
    def knobs(self) -> frozenset[str]:
        """Names the variables that the template reads and that whoever asks may set."""
        return Sandbox().variables(self.source) - {*_GIVEN, *self.special_tokens}

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt; whatever the template refuses or fails at becomes one InvalidPrompt."""
        text, _ = self._render(messages, **variables)
        return text

    def split(self, messages: Sequence[Mapping[str, Any]], content_at: int, **variables: Any) -> tuple[str, str] | None:
        """Finds (before, after) so that the rendering is before + content + after for every content of message
        `content_at` that is not empty; None if that is not proven. The content that is there now plays no part.
        """
        opened = [dict(message) for message in messages]
        opened[content_at]["content"] = Opaque(_SENTINEL)
        try:
            text, was_inspected = self._render(opened, **variables)
        except Inspected:
            return None
        if was_inspected or text.count(_SENTINEL) != 1:
            return None
        before, _, after = text.partition(_SENTINEL)
        return before, after

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> tuple[str, bool]:
        known = {"tools": None, "documents": None, **self.special_tokens, **variables, "messages": messages}
        known["add_generation_prompt"] = add_generation_prompt
        budget = _budget_for(known)
        try:
            with spending(budget):
                text = concat(self._template.generate(known))
        except Exception as error:  # the template is foreign code: whatever it raises is its answer
            raise InvalidPrompt(f"The chat template refused these messages: {first_line(error, 300)}.") from error
        return str.__str__(text), budget.was_inspected


def _budget_for(variables: Mapping[str, Any]) -> Budget:
    with spending(Budget(steps=1 << 62, characters=0)):
        values = [length(value) if isinstance(value, str) else 1 for value in leaves(variables)]
    steps = _STEPS + _STEPS_PER_VALUE * len(values)
    return Budget(steps=steps, characters=_CHARACTERS + _COPIES_OF_INPUT * sum(values))
