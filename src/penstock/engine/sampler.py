"""Chooses tokens from logits, and says how likely they were."""

# V vocabulary

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from penstock.engine.grammar import GrammarMatcher
from penstock.request import SamplingParams, TokenLogprob


class Sampler:
    """The sampling of one request: its random generator and the counts that penalties need."""

    def __init__(
        self, params: SamplingParams, *, eos_ids: Collection[int] = (), grammar: GrammarMatcher | None = None
    ) -> None:
        self.params = params
        self._grammar = grammar
        self._early_ends = [] if params.ignore_eos or not params.min_tokens else sorted(eos_ids)
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            seed = secrets.randbits(63) if params.seed is None else params.seed
            self._generator = torch.Generator().manual_seed(seed)

    def sample(self, logits_V: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> int:
        token = self._choose(self._allowed(self._penalized(logits_V, prompt, generated), len(generated)))
        if self._grammar is not None:
            self._grammar.accept(token)
        return token

    def logprob(self, logits_V: torch.Tensor, token: int) -> TokenLogprob | None:
        """None where it is not asked for."""
        return None if self.params.logprobs is None else token_logprob(logits_V, token, self.params.logprobs)

    def _penalized(self, logits_V: torch.Tensor, prompt: Sequence[int], generated: Sequence[int]) -> torch.Tensor:
        """Repetition counts prompt and answer; frequency and presence count the answer alone."""
        params = self.params
        if params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0:
            return logits_V
        logits_V = logits_V.clone()
        if params.repetition_penalty != 1:
            known = {*prompt, *generated}
            # Placeholders of images may lie outside the vocabulary.
            seen = torch.tensor(sorted(t for t in known if t < len(logits_V)), device=logits_V.device)
            values = logits_V[seen]
            penalty = params.repetition_penalty
            logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if generated and (params.frequency_penalty or params.presence_penalty):
            counts = Counter(generated)
            tokens = torch.tensor(list(counts), device=logits_V.device)
            amounts = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits_V.device)
            logits_V[tokens] -= params.frequency_penalty * amounts + params.presence_penalty
        return logits_V

    @property
    def is_complete(self) -> bool:
        """The grammar takes nothing more."""
        return self._grammar is not None and self._grammar.is_complete

    def _allowed(self, logits_V: torch.Tensor, num_generated: int) -> torch.Tensor:
        """Biased where the request asks for it; what may not come is at minus infinity."""
        bans_ends = self._early_ends and num_generated < self.params.min_tokens
        if not self.params.logit_bias and not bans_ends and self._grammar is None:
            return logits_V
        logits_V = logits_V.clone()
        for token, amount in self.params.logit_bias:
            logits_V[token] += amount
        if bans_ends:
            logits_V[self._early_ends] = float("-inf")
        if self._grammar is not None:
            self._grammar.mask(logits_V)
        return logits_V

    def _choose(self, logits_V: torch.Tensor) -> int:
        params = self.params
        if self._generator is None:
            return int(logits_V.argmax())
        probabilities, tokens = torch.softmax(logits_V / params.temperature, -1).sort(descending=True, stable=True)
        if params.top_k is not None:
            probabilities = probabilities[: params.top_k]
        if params.min_p > 0:
            probabilities = probabilities[probabilities >= params.min_p * probabilities[0]]
        if params.top_p < 1:
            # Kept: the tokens before which less than top_p has been gathered. The first always is.
            shares = probabilities / probabilities.sum()
            num_kept = int((shares.cumsum(-1) - shares < params.top_p).sum())
            probabilities = probabilities[: max(1, num_kept)]
        # Drawn on the host, so that a seed means the same on every device.
        index = int(torch.multinomial(probabilities.cpu(), 1, generator=self._generator))
        return int(tokens[index])


def token_logprob(logits_V: torch.Tensor, token: int, num_alternatives: int) -> TokenLogprob:
    """Reads a token's logprob from the model's own distribution, before penalties and temperature."""
    log_total = logits_V.logsumexp(-1)
    values, tokens = logits_V.topk(min(num_alternatives, logits_V.numel()))
    return TokenLogprob(
        token_id=token,
        logprob=float(logits_V[token] - log_total),
        alternatives=tuple(zip(tokens.tolist(), (values - log_total).tolist(), strict=True)),
    )
