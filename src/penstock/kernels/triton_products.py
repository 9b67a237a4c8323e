"""Products with very few rows on a GPU: each weight is read once, at the speed of memory, which cuBLAS leaves unused.

They also run in Triton's interpreter.
"""

# T tokens, I inputs, O outputs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.kernels.overlap import come_and_wait, come_at_once, come_late, overlap, wait_for_inputs

MAX_ROWS = 16
LEAST_COLUMNS = 512  # of a weight's row that one program reads at a time
FEW_OUTPUTS = 4096  # up to here, smaller tiles keep all multiprocessors busy


@triton.jit
def _one_row(
    x_ptr,
    weight_ptr,
    out_ptr,
    NUM_IN: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    come_at_once(OVERLAPS)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    columns = tl.arange(0, COLUMNS)
    places = weight_ptr + outs.to(tl.int64)[:, None] * NUM_IN + columns[None, :]
    weight = tl.load(places)  # no kernel writes it, so it need not be waited for
    wait_for_inputs(OVERLAPS)
    sums = tl.zeros([OUTS, COLUMNS], tl.float32)
    for first in range(0, NUM_IN - COLUMNS, COLUMNS):
        following = tl.load(places + first + COLUMNS)
        x = tl.load(x_ptr + first + columns)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        weight = following
    x = tl.load(x_ptr + NUM_IN - COLUMNS + columns)
    sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    product = tl.sum(sums, 1)
    if ADDS:
        product += tl.load(out_ptr + outs).to(tl.float32)
    tl.store(out_ptr + outs, product.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    out_stride,
    NUM_IN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    come_and_wait(OVERLAPS)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    product = tl.zeros([OUTS, ROWS], tl.float32)
    for first in range(0, NUM_IN, COLUMNS):
        weight = tl.load(weight_ptr + outs.to(tl.int64)[:, None] * NUM_IN + first + columns[None, :])
        x = tl.load(x_ptr + rows[:, None] * x_stride + first + columns[None, :], mask=is_row[:, None], other=0.0)
        product = tl.dot(weight, tl.trans(x), product)
    come_late(OVERLAPS)
    places = rows[None, :] * out_stride + outs[:, None]
    if ADDS:
        product += tl.load(out_ptr + places, mask=is_row[None, :], other=0.0).to(tl.float32)
    tl.store(out_ptr + places, product.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


_one_row_kernel: Any = _one_row  # a launch has no type that a checker knows
_few_rows_kernel: Any = _few_rows


def is_skinny(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether these kernels take the product: few rows in half precision, over sizes that leave no rest."""
    num_out, num_in = weight_OI.shape
    is_half = x_TI.dtype == weight_OI.dtype and x_TI.dtype in (torch.bfloat16, torch.float16)
    has_no_rest = num_in % LEAST_COLUMNS == 0 and num_out % 64 == 0
    is_packed = weight_OI.is_contiguous() and x_TI.stride(-1) == 1
    return 0 < len(x_TI) <= MAX_ROWS and is_half and has_no_rest and is_packed


def product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    out_TO = torch.empty(len(x_TI), len(weight_OI), dtype=x_TI.dtype, device=x_TI.device)
    _launch(x_TI, weight_OI, out_TO, adds=False)
    return out_TO


def add_product(out_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> None:
    _launch(x_TI, weight_OI, out_TO, adds=True)


def _launch(x_TI: torch.Tensor, weight_OI: torch.Tensor, out_TO: torch.Tensor, *, adds: bool) -> None:
    """Tile sizes are those that measured fastest on an H200, at the shapes of an 8B model."""
    num_out, num_in = weight_OI.shape
    if len(x_TI) == 1:
        columns = 2048 if num_in % 2048 == 0 and num_in <= 8192 else 1024 if num_in % 1024 == 0 else 512
        sizes = {"NUM_IN": num_in, "OUTS": 2, "COLUMNS": columns, "num_warps": 4}
        _one_row_kernel[(num_out // 2,)](x_TI, weight_OI, out_TO, ADDS=adds, **sizes, **overlap(1))
        return
    outs, columns, num_stages = (32, 256, 4) if num_out <= FEW_OUTPUTS else (64, 128, 5)
    _few_rows_kernel[(num_out // outs,)](
        x_TI,
        weight_OI,
        out_TO,
        len(x_TI),
        x_TI.stride(0),
        out_TO.stride(0),
        NUM_IN=num_in,
        ROWS=MAX_ROWS,
        OUTS=outs,
        COLUMNS=columns,
        ADDS=adds,
        **overlap(len(x_TI)),
        num_warps=4,
        num_stages=num_stages,
    )
