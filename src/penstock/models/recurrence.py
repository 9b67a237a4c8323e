"""Recurrence: a matrix per head that is carried from token to token, and the short convolution before it.

A chunk of any length advances the state. Within a chunk, tiles of tokens are computed at once; under the delta rule,
what a token writes depends on what those before it wrote, so a tile is a triangular system.
"""

# T tokens of the step, N tokens of a chunk or tile, B decodes, H heads, K key size, V value size, C channels, S slots,
# W width of the convolution

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from penstock.attention.backend import ForwardInputs

TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentTokens:
    """What a recurrence needs of some tokens, in float32: a token reads by q, and writes v along k.

    The matrix decays before a token writes; `decay` is a logarithm. With `beta` the token writes only that share of
    what the matrix does not hold already: the delta rule. Without, it writes v as it is.
    """

    q_NHK: torch.Tensor
    k_NHK: torch.Tensor
    v_NHV: torch.Tensor
    decay_NH: torch.Tensor
    beta_NH: torch.Tensor | None = None

    def rows(self, rows: slice | torch.Tensor) -> RecurrentTokens:
        return RecurrentTokens(
            q_NHK=self.q_NHK[rows],
            k_NHK=self.k_NHK[rows],
            v_NHV=self.v_NHV[rows],
            decay_NH=self.decay_NH[rows],
            beta_NH=None if self.beta_NH is None else self.beta_NH[rows],
        )


def convolve(
    x_TC: torch.Tensor,
    conv_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    inputs: ForwardInputs,
    tails_SWC: torch.Tensor,
    *,
    activates: bool = True,
) -> torch.Tensor:
    """Causal, each channel by itself, then silu if it activates.

    A tail holds the inputs before a chunk, and then before the next.
    """
    if inputs.chunk_tables is not None:
        return on_gpu().convolve(x_TC, conv_CW, bias_C, inputs.chunk_tables, tails_SWC, activates=activates)
    out_TC = torch.empty_like(x_TC)
    for rows, slot in inputs.longer_chunks():
        padded = torch.cat([tails_SWC[slot], x_TC[rows]])
        num_tokens = rows.stop - rows.start
        tails_SWC[slot] = padded[num_tokens:]
        torch.mul(padded[:num_tokens], conv_CW[:, 0], out=out_TC[rows])
        for step in range(1, conv_CW.shape[1]):
            out_TC[rows].addcmul_(padded[step : step + num_tokens], conv_CW[:, step])
    if (singles := inputs.single_tokens()) is not None:
        rows_B, slots_B = singles
        padded_BWC = torch.cat([tails_SWC[slots_B], x_TC[rows_B, None]], dim=1)
        tails_SWC[slots_B] = padded_BWC[:, 1:]
        out_TC[rows_B] = (padded_BWC * conv_CW.t()).sum(1)
    if bias_C is not None:
        out_TC += bias_C
    return F.silu(out_TC, inplace=True) if activates else out_TC


def recur(tokens: RecurrentTokens, inputs: ForwardInputs, matrices_SHKV: torch.Tensor) -> torch.Tensor:
    """[T, H, V]: what the tokens of a step read; the matrices of its chunks advance in place."""
    out_THV = torch.empty_like(tokens.v_NHV)
    for rows, slot in inputs.longer_chunks():
        out_THV[rows] = advance(tokens.rows(rows), matrices_SHKV[slot])
    if (singles := inputs.single_tokens()) is not None:
        rows_B, slots_B = singles
        out_THV[rows_B] = advance_singles(tokens.rows(rows_B), matrices_SHKV, slots_B)
    return out_THV


def advance(tokens: RecurrentTokens, matrix_HKV: torch.Tensor) -> torch.Tensor:
    """[N, H, V]: what the tokens of one chunk read, in order; the matrix is advanced in place."""
    out_NHV = torch.empty_like(tokens.v_NHV)
    for first in range(0, len(out_NHV), TILE):
        rows = slice(first, first + TILE)
        out_NHV[rows] = _advance_tile(tokens.rows(rows), matrix_HKV)
    return out_NHV


def _advance_tile(tokens: RecurrentTokens, matrix_HKV: torch.Tensor) -> torch.Tensor:
    # Products of heads that lie apart are slower than the copies.
    q_HNK, k_HNK, v_HNV = (x.transpose(0, 1).contiguous() for x in (tokens.q_NHK, tokens.k_NHK, tokens.v_NHV))
    k_HKN = k_HNK.transpose(1, 2)
    total_HN = tokens.decay_NH.t().cumsum(1)
    since_start_HN1 = total_HN.exp()[..., None]
    # How much of what token j wrote is left at token i; nothing of what comes later.
    later_HNN = (total_HN[:, :, None] - total_HN[:, None, :]).tril_().exp_().tril_()
    written_HNV = v_HNV
    if tokens.beta_NH is not None:
        beta_HN1 = tokens.beta_NH.t()[..., None]
        wanted_HNV = torch.baddbmm(v_HNV, k_HNK * since_start_HN1, matrix_HKV, alpha=-1).mul_(beta_HN1)
        system_HNN = (k_HNK @ k_HKN).mul_(later_HNN).mul_(beta_HN1)
        written_HNV = torch.linalg.solve_triangular(system_HNN, wanted_HNV, upper=False, unitriangular=True)
    seen_HNN = (q_HNK @ k_HKN).mul_(later_HNN)
    read_HNV = (q_HNK * since_start_HN1 @ matrix_HKV).baddbmm_(seen_HNN, written_HNV)
    until_end_HN1 = (total_HN[:, -1:] - total_HN).exp()[..., None]
    matrix_HKV.mul_(since_start_HN1[:, -1:])
    matrix_HKV.baddbmm_((k_HNK * until_end_HN1).transpose(1, 2), written_HNV)
    return read_HNV.transpose(0, 1)


def advance_singles(tokens: RecurrentTokens, matrices_SHKV: torch.Tensor, slots_B: torch.Tensor) -> torch.Tensor:
    """[B, H, V]: one token for each of many sequences."""
    matrices_BHKV = matrices_SHKV[slots_B].mul_(tokens.decay_NH.exp()[..., None, None])
    k_BHK1, q_BHK1 = tokens.k_NHK[..., None], tokens.q_NHK[..., None]
    written_BHV = tokens.v_NHV
    if tokens.beta_NH is not None:
        held_BHV = (matrices_BHKV * k_BHK1).sum(-2)
        written_BHV = (written_BHV - held_BHV) * tokens.beta_NH[..., None]
    matrices_BHKV.addcmul_(k_BHK1, written_BHV[..., None, :])
    matrices_SHKV[slots_B] = matrices_BHKV
    return (matrices_BHKV * q_BHK1).sum(-2)


@cache
def on_gpu() -> Any:
    """Imported when the first step has tables: Triton is not installed everywhere."""
    from penstock.models import cuda_recurrence

    return cuda_recurrence
