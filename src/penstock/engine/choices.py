"""Chooses a token for every row of a step at once, on the device of the logits and without waiting for it."""

# L rows, V vocabulary, N tokens that penalties change, P rows whose last token is pending, R rows with logprobs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.draws import LIKELIEST, Draw, draw_tokens, likeliest, numbers_of
from penstock.engine.grammar import allowed_of
from penstock.engine.sampler import Sampler
from penstock.errors import InvalidSetting
from penstock.request import Sequence as SequenceState
from penstock.request import TokenLogprob

LOGPROB_ROWS = 16  # whose logits are copied at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAsk:
    """Whose token a row chooses."""

    sequence: SequenceState
    sampler: Sampler
    num_written: int  # tokens of its answer before this one, the pending one included
    pending_place: int | None  # of its last token among those that the last step chose; None: the host knows it


class Choices:
    """The tokens that a step chose. They stay on the device for the next step, and are copied to the host."""

    def __init__(self, logits_LV: torch.Tensor, asks: Sequence[RowAsk], last_tokens: torch.Tensor) -> None:
        self._errors: dict[int, Exception] = {}  # by row, of a grammar that cannot go on
        self._asks = asks
        if all(ask.sampler.is_plain for ask in asks):
            chosen_L = self.tokens_on_device = likeliest(logits_LV)
        else:
            chosen_L = self._chosen(logits_LV, last_tokens)
            self.tokens_on_device = chosen_L.clamp(min=0)  # a row without a choice still has a token in the next step
        self._tokens_L = _to_host(chosen_L)
        rated = [row for row, ask in enumerate(asks) if ask.sampler.params.logprobs is not None]
        self._place_by_rated = {row: place for place, row in enumerate(rated)}
        self._rated = [_to_host(part) for part in self._rate(logits_LV, rated)] if rated else []

    def of(self, row: int) -> tuple[int, TokenLogprob | None]:
        """Gives a row's token once the step is done; the logprob is None where it is not asked for."""
        if row in self._errors:
            raise self._errors[row]
        token, sampler = int(self._tokens_L[row]), self._asks[row].sampler
        if token < 0:
            raise InvalidSetting("No token may come next: every logit is minus infinity, or one is not a number.")
        sampler.accept(token)
        return token, self._logprob(row, token, sampler.params.logprobs)

    def _logprob(self, row: int, token: int, num_alternatives: int | None) -> TokenLogprob | None:
        if num_alternatives is None:
            return None
        place = self._place_by_rated[row]
        own, values, tokens = (part[place] for part in self._rated)
        pairs = zip(tokens[:num_alternatives].tolist(), values[:num_alternatives].tolist(), strict=True)
        return TokenLogprob(token_id=token, logprob=float(own), alternatives=tuple(pairs))

    def _chosen(self, logits_LV: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
        edits = _Edits(logits_LV.shape[1])
        draws: list[Draw] = []
        for row, ask in enumerate(self._asks):
            try:
                edits.note(row, ask)
                draws.append(ask.sampler.draw(ask.num_written))
            except Exception as error:  # ends its own request when the step lands
                self._errors[row] = error
                draws.append(LIKELIEST)
        numbers = numbers_of(draws)
        numbers_on_device, *parts = _on_device([numbers.reshape(-1), *edits.parts(self._asks)], logits_LV.device)
        if edits.is_any:
            logits_LV = logits_LV.clone()  # logprobs are the model's own
            edits.apply(logits_LV, parts, last_tokens)
        return draw_tokens(logits_LV, numbers_on_device.view(numbers.shape), draws)

    def _rate(self, logits_LV: torch.Tensor, rated: list[int]) -> list[torch.Tensor]:
        """Logprobs [R] of the chosen tokens, and of the likeliest with their ids, [R, most that are asked for]."""
        most = min(max(self._asks[row].sampler.params.logprobs or 0 for row in rated), logits_LV.shape[1])
        (rows_R,) = _on_device([np.array(rated, np.int32)], logits_LV.device)
        parts = []
        for some_R in rows_R.long().split(LOGPROB_ROWS):
            some_RV = logits_LV[some_R]
            totals_R1 = some_RV.logsumexp(-1, keepdim=True)
            own_R1 = some_RV.gather(1, self.tokens_on_device[some_R].unsqueeze(1)) - totals_R1
            values, tokens = some_RV.topk(most)
            parts.append((own_R1.squeeze(1), values - totals_R1, tokens))
        return [torch.cat(some) for some in zip(*parts, strict=True)]


class _Edits:
    """What requests change in their logits before the choice: penalties, biases, bans, grammars, in this order."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._added: list[tuple[int, np.ndarray, np.ndarray]] = []  # (row, tokens, amounts)
        self._seen: list[tuple[int, np.ndarray, np.ndarray]] = []  # (row, tokens, counts)
        self._pending: list[tuple[int, int]] = []  # (row, place among the last step's tokens)
        self._masks: list[tuple[int, np.ndarray]] = []

    def note(self, row: int, ask: RowAsk) -> None:
        sampler, sequence = ask.sampler, ask.sequence
        if sampler.grammar is not None:
            self._masks.append((row, sampler.grammar.mask_words().numpy().copy()))
        if len((added := sampler.additions(ask.num_written))[0]):
            self._added.append((row, *added))
        if sampler.history is not None:
            first, num_prompt = sequence.request.first_decoder_position, sequence.num_prompt_tokens
            tokens, counts = sampler.history.read(sequence.tokens, first=first, num_prompt=num_prompt)
            is_known = tokens < self._vocab_size  # placeholders of images may lie outside the vocabulary
            self._seen.append((row, tokens[is_known], counts[is_known]))
            if ask.pending_place is not None:
                self._pending.append((row, ask.pending_place))

    @property
    def is_any(self) -> bool:
        return bool(self._added or self._seen or self._masks)

    def parts(self, asks: Sequence[RowAsk]) -> list[np.ndarray]:
        """What `apply` needs on the device."""
        penalties = [
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            for params in (ask.sampler.params for ask in asks)
        ]
        scales = np.array(penalties if self._seen else [], np.float32).T.reshape(-1)
        pending = np.array(self._pending, np.int32).T.reshape(-1)
        words = [words for _, words in self._masks]
        return [*_joined(self._added), *_joined(self._seen), scales, pending, np.concatenate([*words, _NO_INTS])]

    def apply(self, logits_LV: torch.Tensor, parts: Sequence[torch.Tensor], last_tokens: torch.Tensor) -> None:
        added_rows, added_tokens, amounts, rows, tokens, counts, scales, pending, words = parts
        flat = logits_LV.view(-1)
        if self._seen:
            seen = _Seen(flat, self._vocab_size, rows, tokens, counts, scales.view(3, -1))
            seen.penalize(*(part.long() for part in pending.view(2, -1)), last_tokens)
        if self._added:
            flat.index_add_(0, added_rows.long() * self._vocab_size + added_tokens, amounts)
        for (row, _), words_of_row in zip(self._masks, words.view(max(1, len(self._masks)), -1), strict=False):
            logits_LV[row].masked_fill_(~allowed_of(words_of_row, self._vocab_size), -torch.inf)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Tokens that penalties change: each once in its row, with its count in the answer."""

    flat: torch.Tensor  # logits of all rows
    vocab_size: int
    rows_N: torch.Tensor
    tokens_N: torch.Tensor
    counts_N: torch.Tensor
    scales_3L: torch.Tensor  # repetition, frequency and presence of each row

    def penalize(self, rows_P: torch.Tensor, places_P: torch.Tensor, last_tokens: torch.Tensor) -> None:
        """A pending token counts once more, or for the first time where its row has not seen it."""
        num_rows = self.scales_3L.shape[1]
        rows_N, counts_N = self.rows_N.long(), self.counts_N
        if not len(rows_P):
            return self._apply(rows_N, self.tokens_N, counts_N, self.scales_3L[:, rows_N])
        pending_P = last_tokens[places_P]
        pending_L = torch.full((num_rows,), -1, device=self.flat.device).index_copy_(0, rows_P, pending_P)
        again_N = (self.tokens_N == pending_L[rows_N]).float()
        self._apply(rows_N, self.tokens_N, counts_N + again_N, self.scales_3L[:, rows_N])
        is_seen_P = torch.zeros_like(self.scales_3L[0]).index_add_(0, rows_N, again_N)[rows_P]
        scales_3P = self.scales_3L[:, rows_P]
        scales_3P[0] = torch.where(is_seen_P > 0, 1.0, scales_3P[0])
        return self._apply(rows_P, pending_P, 1 - is_seen_P, scales_3P)

    def _apply(self, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, scales: torch.Tensor) -> None:
        repetition, frequency, presence = scales
        places = rows * self.vocab_size + tokens
        values = self.flat[places]
        values = torch.where(values > 0, values / repetition, values * repetition)
        self.flat[places] = values - (frequency * counts + presence * (counts > 0))


_NO_INTS, _NO_FLOATS = np.empty(0, np.int32), np.empty(0, np.float32)


def _joined(found: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joins what rows have: (rows, tokens, values)."""
    rows = np.repeat(np.array([row for row, _, _ in found], np.int32), [len(tokens) for _, tokens, _ in found])
    tokens, values = [tokens for _, tokens, _ in found], [values for _, _, values in found]
    return rows, np.concatenate([*tokens, _NO_INTS]), np.concatenate([*values, _NO_FLOATS])


def _on_device(parts: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Puts flat arrays of int32 and float32 on the device in one copy; from pinned memory it is not waited for."""
    packed = torch.empty(sum(map(len, parts)), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate([part.view(np.int32) for part in parts], out=packed.numpy())
    split = packed.to(device, non_blocking=True).split([len(part) for part in parts])
    return [
        there.view(torch.float32) if part.dtype == np.float32 else there
        for part, there in zip(parts, split, strict=True)
    ]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies to pinned memory, where it may be read once the step is done."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
