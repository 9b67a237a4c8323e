"""Answers that must match a grammar: which tokens may come next, by llguidance."""

# V vocabulary

from __future__ import annotations

from collections.abc import Collection
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch

from penstock.engine.grammar_proof import GrammarProof, compile_grammar, open_guide, refuse_error
from penstock.errors import InvalidSetting
from penstock.plan.machine import return_freed_memory
from penstock.prompt.tokens import Tokenizer


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
        refuse_error(self._matcher)
        return words

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        refuse_error(self._matcher)


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
        self.proof = GrammarProof(self.described)  # for those of strangers

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
            if self._guide is None:
                self._guide = open_guide(**self.described())
        try:
            return GrammarMatcher(compile_grammar(self._guide, grammar), self._vocab_size)
        except InvalidSetting as error:
            reason = str(error)
        return_freed_memory()  # not before the error is gone, which holds what was built
        raise InvalidSetting(reason)

    def described(self) -> dict[str, Any]:
        """Gives what `open_guide` takes."""
        return {"tokenizer": self._tokenizer.to_json(), "vocab_size": self._vocab_size, "eos_ids": self._eos_ids}
