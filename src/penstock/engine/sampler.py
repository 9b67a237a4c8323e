"""What the choice of a request's tokens needs: its seed, its grammar, and the tokens that penalties count."""

# V vocabulary

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Sequence

import numpy as np
import torch

from penstock.engine.draws import Draw
from penstock.engine.grammar import GrammarMatcher
from penstock.request import SamplingParams, TokenLogprob


class Sampler:
    """The sampling of one request. `choices.Choices` chooses for all rows of a step at once."""

    def __init__(
        self, params: SamplingParams, *, eos_ids: Collection[int] = (), grammar: GrammarMatcher | None = None
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.is_plain = params.is_likeliest and params.logprobs is None
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._bias = _arrays(params.logit_bias)
        ends = [] if params.ignore_eos or not params.min_tokens else sorted(eos_ids)
        self._early = _arrays([*params.logit_bias, *((token, -np.inf) for token in ends)])
        self.history = History(counts_prompt=params.repetition_penalty != 1) if params.is_penalized else None

    def draw(self, num_written: int) -> Draw:
        return Draw.of(self.params, self._seed, num_written)

    def additions(self, num_written: int) -> tuple[np.ndarray, np.ndarray]:
        """Gives (tokens, what is added to their logits): an end that comes too early gets minus infinity."""
        return self._early if num_written < self.params.min_tokens else self._bias

    def accept(self, token: int) -> None:
        if self.grammar is not None:
            self.grammar.accept(token)

    @property
    def is_complete(self) -> bool:
        """The grammar takes nothing more."""
        return self.grammar is not None and self.grammar.is_complete


class History:
    """Tokens that were seen, each once, and how often the answer has them; it grows with the sequence."""

    def __init__(self, *, counts_prompt: bool) -> None:
        """`counts_prompt`: repetition counts prompt and answer; frequency and presence count the answer alone."""
        self._counts_prompt = counts_prompt
        self._place_by_token: dict[int, int] = {}
        self._tokens, self._counts = array("i"), array("f")
        self._num_read = 0

    def read(self, tokens: Sequence[int], *, first: int, num_prompt: int) -> tuple[np.ndarray, np.ndarray]:
        """Gives (tokens, counts) of `tokens` from `first` on; what was read before is not read again."""
        start = max(self._num_read, first if self._counts_prompt else num_prompt)
        for position in range(start, len(tokens)):
            place = self._place_by_token.setdefault(tokens[position], len(self._tokens))
            if place == len(self._tokens):
                self._tokens.append(tokens[position])
                self._counts.append(0)
            self._counts[place] += position >= num_prompt
        self._num_read = len(tokens)
        return np.array(self._tokens, np.int32), np.array(self._counts, np.float32)


def _arrays(pairs: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([token for token, _ in pairs], np.int32), np.array([amount for _, amount in pairs], np.float32)


def token_logprob(logits_V: torch.Tensor, token: int, num_alternatives: int) -> TokenLogprob:
    """Reads a token's logprob from the model's own distribution, before penalties and temperature."""
    log_total = logits_V.logsumexp(-1)
    values, tokens = logits_V.topk(min(num_alternatives, logits_V.numel()))
    return TokenLogprob(
        token_id=token,
        logprob=float(logits_V[token] - log_total),
        alternatives=tuple(zip(tokens.tolist(), (values - log_total).tolist(), strict=True)),
    )
