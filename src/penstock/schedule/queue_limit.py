"""How much may wait, and when whoever is refused should try again."""

from __future__ import annotations

from collections.abc import Collection

from penstock.errors import QueueFull
from penstock.request import Sequence

# The rate behind a retry hint until prompts have been read.
FIRST_GUESS_TOKENS_PER_S = 500.0
# The share of one step in the rate, whatever its size.
NEWEST_STEP = 0.1


class QueueLimit:
    """None: no limit. An empty queue takes a prompt of any length."""

    def __init__(self, *, max_waiting: int | None, max_waiting_tokens: int | None) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._tokens_per_s = FIRST_GUESS_TOKENS_PER_S

    def refuse_if_full(
        self, num_tokens: int, *, waiting: Collection[Sequence], present: Collection[Sequence], num_free: int
    ) -> None:
        """`present`: those that wait and those that run, all of which are read before whoever comes later.

        `num_free`: places of running requests that the first in the queue take; those do not count as waiting.
        """
        num_waiting = len(waiting) - num_free  # below 0: whoever comes now has a place too
        if self._max_waiting is not None and num_waiting >= self._max_waiting:
            raise self._full(f"{num_waiting} requests wait, the limit is {self._max_waiting}.", present)
        if self._max_waiting_tokens is None or not waiting:
            return
        queued = sum(max(s.request.num_slots(s.num_prompt_tokens), s.request.num_announced) for s in waiting)
        if queued + num_tokens > self._max_waiting_tokens:
            raise self._full(
                f"{queued} prompt tokens wait and this prompt has {num_tokens}, the limit is "
                f"{self._max_waiting_tokens}.",
                present,
            )

    def observe(self, num_prompt_tokens: int, elapsed_s: float) -> None:
        if num_prompt_tokens and elapsed_s > 0:
            self._tokens_per_s += NEWEST_STEP * (num_prompt_tokens / elapsed_s - self._tokens_per_s)

    def _full(self, reason: str, present: Collection[Sequence]) -> QueueFull:
        unread = sum(max(0, max(s.num_prompt_tokens, s.request.num_announced) - s.num_computed) for s in present)
        retry_after_s = max(1.0, unread / self._tokens_per_s)
        return QueueFull(f"{reason} Try again in {retry_after_s:.0f} s.", retry_after_s=retry_after_s)
