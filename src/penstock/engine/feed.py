"""A prompt that is still being read: tokens come as the steps need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.errors import InvalidPrompt, PenstockError, PromptTooLong

COUNTED_BYTES = 8_000_000  # what is longer is refused before its last token is counted


class ByteMeter:
    """Passes text pieces through and counts their bytes, so that the length of a stream can be estimated."""

    def __init__(self, pieces: Iterable[str], num_bytes_total: int | None) -> None:
        self.num_bytes_read = 0
        self.num_bytes_total = num_bytes_total
        self._pieces = pieces

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self.num_bytes_read += len(piece.encode("utf-8", errors="surrogatepass"))
            yield piece


@dataclass(slots=True, kw_only=True)
class TokenFeed:
    """The tokens of one prompt, in order. Reads ahead by no more than is asked for and one encoded piece."""

    batches: Iterator[list[int]]
    meter: ByteMeter | None = None
    num_total: int | None = None  # None: not known before the end
    adjustments: tuple[str, ...] = ()
    num_given: int = 0
    _pending: list[int] = field(default_factory=list)
    _is_exhausted: bool = False
    _failure: PenstockError | None = None  # why the rest cannot be had

    def take(self, num_tokens: int) -> tuple[list[int], bool]:
        """Up to `num_tokens` tokens, and whether they were the last."""
        while len(self._pending) <= num_tokens and not self._is_exhausted:
            self._pending += self._next_batch()
        taken, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        self.num_given += len(taken)
        is_last = self._is_exhausted and not self._pending
        if is_last:
            self.num_total = self.num_given
        return taken, is_last

    def take_all(self, refuse_past: Callable[..., None]) -> list[int]:
        """Every token, for a reader that needs them all before it begins; `refuse_past` is called with the count."""
        while not self._is_exhausted:
            self._pending += self._next_batch()
            try:
                refuse_past(len(self._pending), is_all=self._is_exhausted)
            except PromptTooLong as error:
                raise self.told_refusal(error, refuse_past) from None
        return self.take(len(self._pending))[0]

    def told_refusal(self, error: PenstockError, refuse_past: Callable[..., None]) -> PenstockError:
        """Finds what to say of a stream that is too long: by all of its tokens, where its end comes soon enough."""
        if not isinstance(error, PromptTooLong):
            return error
        num_tokens, meter = self.num_given + len(self._pending), self.meter
        try:
            while not self._is_exhausted and (meter is None or meter.num_bytes_read < COUNTED_BYTES):
                num_tokens += len(self._next_batch())
            refuse_past(num_tokens, is_all=self._is_exhausted)
        except PenstockError as known:
            return known
        return error

    def _next_batch(self) -> list[int]:
        """Empty at the end. What broke once looks like what has ended, and must not be taken for it."""
        if self._failure is not None:
            raise self._failure
        try:
            batch = next(self.batches, None)
        except PenstockError as error:
            self._failure = error
            raise
        except BaseException as error:  # of a file or pipe that breaks while it is read, say
            self._failure = InvalidPrompt(f"The prompt cannot be read to its end: {error!r}. Send it again.")
            if not isinstance(error, Exception):
                raise
            raise self._failure from error
        self._is_exhausted = batch is None
        return batch or []

    @property
    def num_total_estimate(self) -> int:
        """Estimates the prompt's tokens from the share of bytes that the tokens so far came from."""
        if self.num_total is not None:
            return self.num_total
        num_encoded = self.num_given + len(self._pending)
        meter = self.meter
        if meter is None or not meter.num_bytes_total or not meter.num_bytes_read:
            return num_encoded
        return max(num_encoded, round(num_encoded * meter.num_bytes_total / meter.num_bytes_read))


def count_tokens(batches: Iterable[list[int]], *, refuse_past: Callable[..., None], to_the_end: bool) -> int:
    """Counts and keeps nothing; `refuse_past` is called with the count, also on the way if not `to_the_end`."""
    count = 0
    for batch in batches:
        count += len(batch)
        if not to_the_end:
            refuse_past(count, is_all=False)
    refuse_past(count)
    return count
