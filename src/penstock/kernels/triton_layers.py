"""Norms and gated activations on a GPU, each in one pass over memory. They also run in Triton's interpreter."""

# T tokens, F intermediate size

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.kernels.overlap import come_and_wait, come_late, overlap

LOG2_E = tl.constexpr(1.4426950408889634)
KINDS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
ROW_VALUES = 2048  # of one program: several short rows, or one long one
ACTIVATION_VALUES = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_heads,
    token_stride,
    eps,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Row r is head r % num_heads of token r // num_heads; heads of a token are adjacent."""
    come_and_wait(OVERLAPS)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    dims = tl.arange(0, PADDED_SIZE)[None, :]
    is_place = (rows < num_rows) & (dims < SIZE)
    places = rows // num_heads * token_stride + rows % num_heads * SIZE + dims
    x = tl.load(x_ptr + places, mask=is_place, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=dims < SIZE, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / SIZE + eps)
    normed = x * scale[:, None] * weight
    come_late(OVERLAPS)
    tl.store(out_ptr + rows * SIZE + dims, normed.to(out_ptr.dtype.element_ty), mask=is_place)


@triton.jit
def activated(gate, KIND: tl.constexpr) -> tl.tensor:
    """Applies the activation that KINDS names."""
    if KIND == 0:
        active = gate / (1.0 + tl.exp2(-gate * LOG2_E))
    elif KIND == 1:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate - gate / (tl.exp2(2.0 * inner * LOG2_E) + 1.0)
    return active


@triton.jit
def _gated(gate_up_ptr, out_ptr, width, KIND: tl.constexpr, VALUES: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    come_and_wait(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_place = dims < width
    gate = tl.load(gate_up_ptr + token * 2 * width + dims, mask=is_place, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * width + width + dims, mask=is_place, other=0.0).to(tl.float32)
    active = activated(gate, KIND)
    come_late(OVERLAPS)
    tl.store(out_ptr + token * width + dims, (active * up).to(out_ptr.dtype.element_ty), mask=is_place)


_norm_kernel: Any = _rms_norm  # a launch has no type that a checker knows
_gated_kernel: Any = _gated


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises [T, size], or the heads of [T, heads, size]; rows of tokens may lie apart."""
    size = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(size)
    num_rows, rows = len(x) * num_heads, max(1, ROW_VALUES // padded)
    if num_rows:
        grid = (triton.cdiv(num_rows, rows),)
        places = {"SIZE": size, "PADDED_SIZE": padded, "ROWS": rows}
        _norm_kernel[grid](x, weight, out, num_rows, num_heads, x.stride(0), eps, **places, **overlap(len(x)))
    return out


def gated_activation(gate_up_TF: torch.Tensor, kind: str) -> torch.Tensor:
    width = gate_up_TF.shape[1] // 2
    out = torch.empty(len(gate_up_TF), width, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    if len(out):
        grid = (len(out), triton.cdiv(width, ACTIVATION_VALUES))
        _gated_kernel[grid](gate_up_TF, out, width, KIND=KINDS[kind], VALUES=ACTIVATION_VALUES, **overlap(len(out)))
    return out
