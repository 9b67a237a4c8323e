"""Answers that must match a grammar: which tokens may come next, by llguidance."""

# V vocabulary

from __future__ import annotations

from collections.abc import Collection
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch

from penstock.errors import InvalidSetting, UnsupportedModel, first_line
from penstock.plan.machine import return_freed_memory
from penstock.prompt.tokens import Tokenizer

# What a grammar may take: its first step, prepared beside the steps of others, 0.2 s and 40 MB; the mask of each
# later one up to 14 ms, on one core. Schemas and patterns of people take a tenth of that.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,  # of 1 to 2 kB
}


class GrammarMatcher:
    """Keeps where one answer stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, first: GrammarMatcher | None = None) -> None:
        """`first`: what it was copied from, which is found for equal requests as long as it is kept."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._first = first
        self._mask_words = torch.zeros((vocab_size + 31) // 32, dtype=torch.int32)

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, first=self)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def mask_words(self) -> torch.Tensor:
        """Computes which tokens may come next, a bit each; overwritten by the next call."""
        words = self._mask_words
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * 4)
        self._refuse_error()
        return words

    def prepare(self) -> None:
        """Does the work of the first step ahead of it, and goes one token further on a copy: most of what passes the
        limits does so there."""
        allowed_V = allowed_of(self.mask_words(), self._vocab_size)
        if allowed_V.any():
            self.copy().accept(int(allowed_V.nonzero()[0]))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._refuse_error()

    def _refuse_error(self) -> None:
        """A matcher that gave up allows nothing but the end: an answer cut there would look complete."""
        if self._matcher.is_error():
            raise InvalidSetting(
                f"The answer cannot be held to its grammar or schema any further: "
                f"{first_line(self._matcher.get_error() or 'unknown', 300)}. Simplify its patterns and repetitions."
            )


def allowed_of(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Spreads the bits of a mask over tokens, on its device."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(1) >> bits) & 1).flatten()[:vocab_size].bool()


class Grammars:
    """Makes matchers for one model, in any thread; its vocabulary is read when the first grammar comes."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._guide: Any = None
        self._opens = Lock()
        # A large schema takes 50 MB: none is kept that nobody uses.
        self._compiled: WeakValueDictionary[str, GrammarMatcher] = WeakValueDictionary()

    def matcher(self, grammar: str) -> GrammarMatcher:
        return self.compiled(grammar).copy()

    def compiled(self, grammar: str) -> GrammarMatcher:
        """Stays at the beginning; answers are copies of it. Whoever keeps it spares others the work."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._compile(grammar)
        return found

    def _compile(self, grammar: str) -> GrammarMatcher:
        with self._opens:
            guide = self._opened()
        import llguidance

        matcher = llguidance.LLMatcher(guide, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise InvalidSetting(
                f"The grammar or schema cannot be used: {first_line(matcher.get_error() or 'unknown', 300)}."
            )
        compiled = GrammarMatcher(matcher, self._vocab_size)
        try:
            compiled.prepare()
        except InvalidSetting as error:
            reason = str(error)
        else:
            return compiled
        del compiled, matcher
        return_freed_memory()  # not before the error is gone, which holds what was built
        raise InvalidSetting(reason)

    def _opened(self) -> Any:
        if self._guide is not None:
            return self._guide
        try:
            import llguidance
        except ImportError:
            raise UnsupportedModel("Grammars need llguidance. Install penstock[serve].") from None
        try:
            self._guide = llguidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos_ids or None
            )
        except Exception as error:  # a tokenizer that the library cannot read
            raise UnsupportedModel(
                f"This model's tokenizer cannot be held to a grammar: {first_line(error, 300)}. Leave JSON mode out."
            ) from error
        return self._guide
