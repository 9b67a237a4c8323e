"""Brings the prompts of running requests forward: tokens of streamed ones, embeddings of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.engine.active import Active
from penstock.engine.intake import Intake
from penstock.errors import InvalidMedia, InvalidPrompt, PenstockError
from penstock.lanes.lane import Lane
from penstock.plan.machine import return_freed_memory
from penstock.request import Sequence
from penstock.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Feeding:
    lane: Lane
    scheduler: Scheduler
    intake: Intake
    active: Mapping[int, Active]  # the engine's own
    fail: Callable[[int, Exception], None]  # ends a request whose prompt cannot be had

    def begin(self, request_id: int) -> None:
        """The lane is told what a prompt has beside its tokens, before it reads from the start."""
        self.lane.begin(request_id, self.active[request_id].prompt)

    def encode_next(self) -> None:
        """One call of an encoder per step, so that running streams wait for no more than that."""
        waiting = ((request_id, active.prompt) for request_id, active in self.active.items())
        request_id, prompt = next(((number, one) for number, one in waiting if one.is_encoding), (0, None))
        if prompt is None:
            return
        try:
            prompt.encode_next()
            if not prompt.is_encoding:
                return_freed_memory()  # the encoder's, so that it is not held beside a chunk's
                tokens = list(prompt.positions)
                self.scheduler.extend_prompt(request_id, tokens, is_last=True, media_keys=prompt.keys)
        except Exception as error:  # of a tower that runs out of memory, say: only who asked is to know
            own = error if isinstance(error, PenstockError) else InvalidMedia(f"The images cannot be encoded: {error}")
            self.fail(request_id, own)

    def feed_prompts(self) -> None:
        """Reads streamed prompts just far enough for the next chunk behind what is cached."""
        for sequence in list(self.scheduler.sequences.values()):
            if sequence.prompt_is_complete or sequence.is_leaving:
                continue
            active = self.active.get(sequence.id)
            if active is None or active.feed is None:  # or its images are not encoded yet
                continue
            while not sequence.prompt_is_complete and (num_missing := self._num_missing(sequence)) > 0:
                try:
                    tokens, is_last = active.feed.take(num_missing)
                    if is_last and not active.feed.num_given:
                        raise InvalidPrompt("The prompt is empty: what was read has 0 tokens. Give at least 1.")
                    self.scheduler.extend_prompt(sequence.id, self.intake.prompts.known(tokens), is_last=is_last)
                except PenstockError as error:
                    self.fail(sequence.id, active.feed.told_refusal(error, self.intake.refuse_too_long))
                    break

    def _num_missing(self, sequence: Sequence) -> int:
        num_passed = sequence.num_scheduled + self.scheduler.holdings.num_findable(sequence)
        return self._wanted_ahead(sequence) - (len(sequence.tokens) - num_passed)

    def _wanted_ahead(self, sequence: Sequence) -> int:
        """Tokens of the largest chunk that may come next, and one that says whether the prompt ends with it."""
        own = sequence.request.chunk_size
        ceiling = self.scheduler.budget.ceiling if own is None else own
        if ceiling == 0:
            return self.scheduler.capacity
        return max(ceiling, self.scheduler.limits.block_size) + 1
