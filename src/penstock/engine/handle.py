"""What a caller gets for a submitted request: its number, and what can be known of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.plan.prompt_plan import PromptPlan
from penstock.request import Event

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.intake import Admitted


class Handle(int):
    """The number of a request, by which events name it and `abort` ends it, with its plan and its events."""

    _engine: Engine
    _admitted: Admitted
    _chunk_size: int | str | None

    @classmethod
    def of(cls, engine: Engine, admitted: Admitted, *, chunk_size: int | str | None) -> Handle:
        handle = cls(admitted.request.id)
        handle._engine, handle._admitted, handle._chunk_size = engine, admitted, chunk_size
        return handle

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to be done to the prompt before it could be read."""
        return self._admitted.notes

    @property
    def plan(self) -> PromptPlan:
        """The plan of this prompt, with what was adjusted. One that is still streamed has its estimated length."""
        feed, prompt = self._admitted.feed, self._admitted.prompt
        num_tokens = prompt.num_tokens if feed is None else feed.num_total_estimate
        plan = self._engine.plan(max(1, num_tokens), prompt.atomic, chunk_size=self._chunk_size)
        return dataclasses.replace(plan, adjustments=(*self.notes, *plan.adjustments))

    def events(self) -> Iterator[Event]:
        """Progress, tokens and the end, running steps as they are needed. Closing cancels the request."""
        return self._engine.events(self)
