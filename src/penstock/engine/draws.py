"""Draws tokens from logits: a race whose noise is a hash of seed, place in the answer and token.

A token's key is its logit over the temperature plus Gumbel noise; the largest key among the tokens that may come wins,
which draws each with its probability. The noise is made of integers that every device has alike, so a seed means the
same everywhere and beside anyone, but for the rounding of logits. kernels/triton_sampling.py is the same for a GPU.

Equal logits stay or go together. top_k keeps logits from the k-th largest on; of these min_p keeps those within its
reach of the largest; of these top_p keeps those before which less than that share has been gathered.
"""

# L rows, V vocabulary, F numbers of a row

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

from penstock.request import SamplingParams

NUMBERS = 6  # of a row: low and high half of its key, coldness, reach, top_p, top_k
WORD = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one token is drawn."""

    key: int  # 64 bits
    coldness: float  # 1 / temperature; 0: the likeliest is taken
    reach: float  # what a logit may lie below the largest, as a number below 0
    top_p: float
    top_k: int  # 0: no limit

    @classmethod
    def of(cls, params: SamplingParams, seed: int, place: int) -> Draw:
        """`place`: tokens of the answer before this one."""
        if params.temperature == 0 or params.top_k == 1:
            return LIKELIEST
        return cls(
            key=_mixed_64(_mixed_64(seed) + place),
            coldness=1 / params.temperature,
            reach=params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf,
            top_p=params.top_p,
            top_k=params.top_k or 0,
        )


LIKELIEST = Draw(key=0, coldness=0.0, reach=-math.inf, top_p=1.0, top_k=0)


def numbers_of(draws: Sequence[Draw]) -> np.ndarray:
    """What the device is told of its rows, [F, L]; floats as their bits."""
    halves = np.array([[draw.key & WORD for draw in draws], [draw.key >> 32 for draw in draws]], np.uint32)
    floats = np.array([[draw.coldness, draw.reach, draw.top_p] for draw in draws], np.float32).T
    counts = np.array([[draw.top_k for draw in draws]], np.int32)
    return np.concatenate([halves.view(np.int32), np.ascontiguousarray(floats).view(np.int32), counts])


def draw_tokens(logits_LV: torch.Tensor, numbers_FL: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draws one token of each row, on the device of the logits; -1 where none may come or the logits are broken."""
    most_kept = min(max(draw.top_k for draw in draws), logits_LV.shape[1])
    if all(draw.coldness == 0 for draw in draws):
        return likeliest(logits_LV)
    if logits_LV.device.type == "cuda" and _has_triton():
        from penstock.kernels import triton_sampling

        return triton_sampling.draw(logits_LV, numbers_FL, floors(logits_LV, numbers_FL[5], most_kept))
    rows = zip(logits_LV.cpu(), draws, strict=True)
    return torch.tensor([_drawn(row_V, draw) for row_V, draw in rows], device=logits_LV.device)


def floors(logits_LV: torch.Tensor, top_ks_L: torch.Tensor, most_kept: int) -> torch.Tensor:
    """Finds the least logit that top_k keeps in each row, minus infinity where it has no limit."""
    if not most_kept:
        return torch.full((len(logits_LV),), -math.inf, device=logits_LV.device)
    largest_LK = logits_LV.topk(most_kept).values
    places_L1 = (top_ks_L.long() - 1).clamp(0, most_kept - 1).unsqueeze(1)
    return torch.where(top_ks_L > 0, largest_LK.gather(1, places_L1).squeeze(1), -math.inf)


def likeliest(logits_LV: torch.Tensor) -> torch.Tensor:
    if not len(logits_LV):
        return torch.empty(0, dtype=torch.long)
    if logits_LV.device.type == "cpu" and logits_LV.dtype == torch.float32:
        # Vectorized, which torch's own is not, and no thread is woken for it.
        return torch.from_numpy(logits_LV.numpy().argmax(-1))
    return logits_LV.argmax(-1)


def _drawn(logits_V: torch.Tensor, draw: Draw) -> int:
    if draw.coldness == 0:
        return int(logits_V.argmax())
    coldness, reach, top_p = np.array([draw.coldness, draw.reach, draw.top_p], np.float32).tolist()
    top = logits_V.max()
    if top.isnan() or top == -math.inf:
        return -1
    floor = top + reach
    if 0 < draw.top_k < len(logits_V):
        floor = torch.maximum(floor, logits_V.topk(draw.top_k).values[-1])
    may_come_V = (logits_V >= floor) & (logits_V > -math.inf)
    keys_V = (logits_V * coldness + noise(draw.key, len(logits_V))).masked_fill_(~may_come_V, -math.inf)
    token = int(keys_V.argmax())
    if top_p == 1 or logits_V[token] == top:
        return token
    weights_V = ((logits_V - top) * coldness).exp_().masked_fill_(~may_come_V, 0)
    limit = top_p * weights_V.sum()
    while logits_V[token] < top and (weights_V * (logits_V > logits_V[token])).sum() >= limit:
        # What is not kept rules out all that is not larger, so the race is run again among the rest.
        keys_V.masked_fill_(logits_V <= logits_V[token], -math.inf)
        token = int(keys_V.argmax())
    return token


def noise(key: int, size: int) -> torch.Tensor:
    """Makes Gumbel noise of the first `size` tokens for one draw."""
    bits_V = _mixed(_mixed(np.arange(size, dtype=np.uint32) + np.uint32(key & WORD)) ^ np.uint32(key >> 32))
    below_V = torch.from_numpy((bits_V.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32))
    above_V = torch.from_numpy(((~bits_V).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32))
    # Near zero 1 - x has lost the bits that the logarithm needs, and winners lie there.
    series_V = below_V * (1 + below_V * (0.5 + below_V * (1 / 3 + below_V * 0.25)))
    return torch.where(below_V < 1 / 64, series_V, -above_V.log()).log_().neg_()


def _mixed(x: np.ndarray) -> np.ndarray:
    """Spreads every bit over all 32."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _mixed_64(x: int) -> int:
    """Spreads every bit over all 64, as splitmix64 does."""
    x = (x + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ((1 << 64) - 1)
    return x ^ (x >> 31)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
