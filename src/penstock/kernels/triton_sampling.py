"""Draws one token of each row on a GPU, as engine/draws.py does for the CPU. It also runs in Triton's interpreter.

Each token's key is its logit over the temperature plus noise that depends on row and token alone; the largest wins. A
winner among all tokens that may come is the winner among them; one that may not come rules out itself and all below it,
and the race is run again. So nothing is sorted: most rows are read twice, flat or peaked.
"""

# L rows, V vocabulary, S parts of a row, F numbers of a row: see NUMBERS in engine/draws.py

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LN_SMALL = tl.constexpr(0.015625)  # below, 1 - x has lost the bits that the logarithm needs
SHARE = tl.constexpr(2.3283064365386963e-10)  # 2 ** -32
NO_TOKEN = tl.constexpr(2147483647)
PART_VALUES, ROW_VALUES = 2048, 8192  # of one tile: where a row is shared by programs, and where it is not


@triton.jit
def _mixed(x) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(tokens, key_low, key_high) -> tl.tensor:
    bits = _mixed(_mixed(tokens.to(tl.uint32) + key_low) ^ key_high)
    below = (bits.to(tl.float32) + 0.5) * SHARE
    above = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * SHARE
    series = below * (1.0 + below * (0.5 + below * (0.3333333333 + below * 0.25)))
    return -tl.log(tl.where(below < LN_SMALL, series, -tl.log(above)))


@triton.jit
def _race(row_ptr, first, end, floor, low, coldness, key_low, key_high, VALUES: tl.constexpr) -> tuple:
    """Finds the largest logit, the largest key of logits from `floor` and above `low`, and the first token with it."""
    top = tl.full([VALUES], float("-inf"), tl.float32)
    best = tl.full([VALUES], float("-inf"), tl.float32)
    at = tl.full([VALUES], NO_TOKEN, tl.int32)
    for start in range(first, end, VALUES):
        tokens = start + tl.arange(0, VALUES)
        logits = tl.load(row_ptr + tokens, mask=tokens < end, other=float("-inf"))
        top = tl.maximum(top, logits)
        key = logits
        if coldness > 0:
            key = logits * coldness + _noise(tokens, key_low, key_high)
        key = tl.where((logits >= floor) & (logits > low), key, float("-inf"))
        key = tl.where(logits != logits, float("inf"), key)
        is_better = key > best
        best = tl.where(is_better, key, best)
        at = tl.where(is_better, tokens, at)
    largest = tl.max(best, 0)
    return tl.max(top, 0), largest, tl.min(tl.where(best == largest, at, NO_TOKEN), 0)


@triton.jit
def _race_of_parts(
    logits_ptr, numbers_ptr, floors_ptr, found_ptr, places_ptr, row_stride, size, part_size, VALUES: tl.constexpr
) -> None:
    row, part = tl.program_id(0), tl.program_id(1)
    num_rows, num_parts = tl.num_programs(0), tl.num_programs(1)
    key_low = tl.load(numbers_ptr + row).to(tl.uint32, bitcast=True)
    key_high = tl.load(numbers_ptr + num_rows + row).to(tl.uint32, bitcast=True)
    coldness = tl.load(numbers_ptr + 2 * num_rows + row).to(tl.float32, bitcast=True)
    first = part * part_size
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    end = tl.minimum(first + part_size, size)
    floor = tl.load(floors_ptr + row)
    top, best, at = _race(row_ptr, first, end, floor, float("-inf"), coldness, key_low, key_high, VALUES)
    place = row * num_parts + part
    tl.store(found_ptr + place, top)
    tl.store(found_ptr + num_rows * num_parts + place, best)
    tl.store(places_ptr + place, at)


@triton.jit
def _settle(
    logits_ptr,
    numbers_ptr,
    floors_ptr,
    found_ptr,
    places_ptr,
    out_ptr,
    row_stride,
    size,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Takes the winner of the parts if it may come, else races again among what lies above it."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    key_low = tl.load(numbers_ptr + row).to(tl.uint32, bitcast=True)
    key_high = tl.load(numbers_ptr + num_rows + row).to(tl.uint32, bitcast=True)
    coldness = tl.load(numbers_ptr + 2 * num_rows + row).to(tl.float32, bitcast=True)
    reach = tl.load(numbers_ptr + 3 * num_rows + row).to(tl.float32, bitcast=True)
    top_p = tl.load(numbers_ptr + 4 * num_rows + row).to(tl.float32, bitcast=True)
    parts = row * PARTS + tl.arange(0, PARTS)
    top = tl.max(tl.load(found_ptr + parts), 0)
    bests = tl.load(found_ptr + num_rows * PARTS + parts)
    at = tl.min(tl.where(bests == tl.max(bests, 0), tl.load(places_ptr + parts), NO_TOKEN), 0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    value = tl.load(row_ptr + at, mask=at < NO_TOKEN, other=float("nan"))
    floor = tl.maximum(tl.load(floors_ptr + row), top + reach)
    is_open = (coldness > 0) & (value < top) & ((top_p < 1.0) | (value < floor))
    while is_open:
        total = tl.zeros([VALUES], tl.float32)
        before = tl.zeros([VALUES], tl.float32)
        for start in range(0, size, VALUES):
            tokens = start + tl.arange(0, VALUES)
            logits = tl.load(row_ptr + tokens, mask=tokens < size, other=float("-inf"))
            weights = tl.where(logits >= floor, tl.exp((logits - top) * coldness), 0.0)
            total += weights
            before += tl.where(logits > value, weights, 0.0)
        gathered = tl.sum(before, 0)
        is_in = (value >= floor) & ((top_p >= 1.0) | (gathered < top_p * tl.sum(total, 0)))
        is_open = is_in == 0
        if is_open:
            found = _race(row_ptr, 0, size, floor, value, coldness, key_low, key_high, VALUES)
            at = found[2]
            value = tl.load(row_ptr + at, mask=at < NO_TOKEN, other=float("nan"))
            is_open = value < top
    is_none = (at == NO_TOKEN) | ((value != value) & (coldness > 0))
    tl.store(out_ptr + row, tl.where(is_none, -1, at).to(tl.int64))


_parts_kernel: Any = _race_of_parts  # a launch has no type that a checker knows
_settle_kernel: Any = _settle


def num_parts(num_rows: int) -> int:
    """Few values, so that few kernels are compiled: programs for the whole card from few rows as from many."""
    return 64 if num_rows <= 16 else 16 if num_rows <= 64 else 4


def draw(logits_LV: torch.Tensor, numbers_FL: torch.Tensor, floors_L: torch.Tensor) -> torch.Tensor:
    """Draws from float32 rows, of which logits from the row's floor may come; -1 where none may."""
    num_rows, size = logits_LV.shape
    parts = num_parts(num_rows)
    part_size = triton.cdiv(triton.cdiv(size, parts), PART_VALUES) * PART_VALUES
    found = torch.empty(2, num_rows, parts, device=logits_LV.device)
    places = torch.empty(num_rows, parts, dtype=torch.int32, device=logits_LV.device)
    out_L = torch.empty(num_rows, dtype=torch.long, device=logits_LV.device)
    given = (logits_LV, numbers_FL, floors_L, found, places)
    stride = logits_LV.stride(0)
    _parts_kernel[(num_rows, parts)](*given, stride, size, part_size, VALUES=PART_VALUES, num_warps=4)
    _settle_kernel[(num_rows,)](*given, out_L, stride, size, PARTS=parts, VALUES=ROW_VALUES, num_warps=16)
    return out_L
