"""The gated delta rule on a GPU by the kernels of flash-linear-attention, where that is installed."""

# N tokens of the step, C chunks, H heads, K key size, V value size, S slots

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from penstock.attention.backend import ForwardInputs

if TYPE_CHECKING:
    from penstock.models.recurrence import RecurrentTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaKernels:
    read: Callable[..., Any]  # chunks of any length
    write: Callable[..., Any]  # one token of each sequence


@cache
def installed() -> DeltaKernels | None:
    try:
        from fla.ops.gated_delta_rule import (  # ty: ignore[import-not-found]
            chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule,
        )
    except ImportError:
        return None
    return DeltaKernels(read=chunk_gated_delta_rule, write=fused_recurrent_gated_delta_rule)


def kernels_for(tokens: RecurrentTokens, dtype: torch.dtype) -> DeltaKernels | None:
    """None where torch has to do the work. In float32 it always does: the kernels round their products."""
    is_theirs = tokens.beta_NH is not None and tokens.v_NHV.is_cuda and dtype == torch.bfloat16
    return installed() if is_theirs else None


def recur_in_one_call(
    kernels: DeltaKernels,
    tokens: RecurrentTokens,
    inputs: ForwardInputs,
    matrices_SHKV: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[N, H, V]: what the tokens of all chunks read; the matrices of their slots advance."""
    device = tokens.v_NHV.device
    is_single = all(last - first == 1 for first, last in pairwise(inputs.query_starts))
    slots_C = torch.tensor(inputs.state_slots[: len(inputs.query_starts) - 1], device=device)
    assert tokens.beta_NH is not None
    out_1NHV, matrices_CHKV = (kernels.write if is_single else kernels.read)(
        q=tokens.q_NHK[None].to(dtype),
        k=tokens.k_NHK[None].to(dtype),
        v=tokens.v_NHV[None].to(dtype),
        g=tokens.decay_NH[None],
        beta=tokens.beta_NH[None],
        scale=1.0,  # queries are scaled already
        initial_state=matrices_SHKV[slots_C],
        output_final_state=True,
        cu_seqlens=torch.tensor(inputs.query_starts, device=device),
    )
    matrices_SHKV[slots_C] = matrices_CHKV
    return out_1NHV[0].float()
