"""Kernels of a mixture of experts on a GPU; `cuda_experts.py` launches them. They also run in Triton's interpreter.

Rows are sorted by expert where they lie; a tile is some rows of one expert. Every sum has a fixed order, whatever else
the step holds.
"""

# T tokens, R rows (a token once for each of its experts), E experts, A experts of a token, M hidden size, F inner size

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from penstock.kernels.overlap import come_and_wait, come_late
from penstock.kernels.triton_layers import LOG2_E, activated

CLAMPED = tl.constexpr(3)  # the activation after those of plain layers
TILE_INTS = tl.constexpr(4)  # of a tile: expert, first row, end; in the place of the first is how many tiles there are
# Four-bit codes out of a register with two words, as pairs of bfloat16 numbers.
PAIRS: Any = tl.constexpr("""{
    .reg .b32 a, b, c;
    and.b32 $0, $4, 0x81C081C0;
    shl.b32 a, $4, 3;
    and.b32 $1, a, 0x81C081C0;
    shl.b32 b, $4, 6;
    and.b32 $2, b, 0x81C081C0;
    shl.b32 a, $4, 1;
    shr.u32 b, $4, 5;
    shr.u32 c, $4, 4;
    and.b32 a, a, 0x80008000;
    and.b32 b, b, 0x01000100;
    and.b32 c, c, 0x00C000C0;
    or.b32 a, a, b;
    or.b32 $3, a, c;
}""")
GROUP = tl.constexpr(8)  # tiles whose programs follow each other, so that weights that they share are read once


@triton.jit(do_not_specialize=["num_tokens"])
def route(
    logits_ptr,
    num_real_ptr,
    experts_ptr,
    weights_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    PADDED_ACTIVE: tl.constexpr,
    NORMALIZES: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Experts of each token, the likeliest first, of equals the first; and their weights, in float32.

    `num_real_ptr`: tokens past that number are padding and get no expert, which is the number of experts.
    """
    come_and_wait(OVERLAPS)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    experts = tl.arange(0, PADDED_EXPERTS)[None, :]
    slots = tl.arange(0, PADDED_ACTIVE)[None, :]
    is_place = (tokens < num_tokens) & (experts < NUM_EXPERTS)
    logits = tl.load(logits_ptr + tokens.to(tl.int64) * NUM_EXPERTS + experts, mask=is_place, other=0.0)
    # What is no number, in rows of padding, is chosen last but still lies among the experts.
    logits = tl.where(logits == logits, logits.to(tl.float32), -3e38)
    left = tl.where(experts < NUM_EXPERTS, logits, float("-inf"))
    chosen = tl.full([TOKENS, PADDED_ACTIVE], float("-inf"), tl.float32)
    places = tl.zeros([TOKENS, PADDED_ACTIVE], tl.int32)
    for slot in tl.static_range(NUM_ACTIVE):
        best = tl.max(left, 1)[:, None]
        place = tl.argmax(left, 1, tie_break_left=True)[:, None]
        chosen = tl.where(slots == slot, best, chosen)
        places = tl.where(slots == slot, place, places)
        left = tl.where(experts == place, float("-inf"), left)
    largest = tl.max(chosen, 1)[:, None]
    weights = tl.exp2((chosen - largest) * LOG2_E)
    if NORMALIZES:
        total = tl.sum(weights, 1)[:, None]
    else:
        shares = tl.exp2((logits - largest) * LOG2_E)
        total = tl.sum(tl.where(experts < NUM_EXPERTS, shares, 0.0), 1)[:, None]
    come_late(OVERLAPS)
    rows = tokens.to(tl.int64) * NUM_ACTIVE + slots
    is_slot = (tokens < num_tokens) & (slots < NUM_ACTIVE)
    if num_real_ptr is not None:
        places = tl.where(tokens < tl.load(num_real_ptr), places, NUM_EXPERTS)
    tl.store(experts_ptr + rows, places, mask=is_slot)
    tl.store(weights_ptr + rows, weights / total, mask=is_slot)


@triton.jit(do_not_specialize=["num_rows"])
def sort(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program places the rows and tiles of one expert behind those of all before it, which it counts itself."""
    come_and_wait(OVERLAPS)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_rows, CHUNK):
        rows = first + tl.arange(0, CHUNK)
        counts += tl.histogram(tl.load(experts_ptr + rows, mask=rows < num_rows, other=NUM_EXPERTS), BINS)
    counts = tl.where(bins < NUM_EXPERTS, counts, 0)
    num_tiles = (counts + ROWS - 1) // ROWS
    count = tl.sum(tl.where(bins == expert, counts, 0))
    start = tl.sum(tl.where(bins < expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, num_tiles, 0))
    come_late(OVERLAPS)
    if expert == 0:
        tl.store(tiles_ptr, tl.sum(num_tiles))
    for first in range(start, start + count, ROWS):
        tile += 1
        tl.store(tiles_ptr + tile * TILE_INTS, expert)
        tl.store(tiles_ptr + tile * TILE_INTS + 1, first)
        tl.store(tiles_ptr + tile * TILE_INTS + 2, start + count)
    if count > 0:
        for first in range(0, num_rows, CHUNK):
            rows = first + tl.arange(0, CHUNK)
            is_own = tl.load(experts_ptr + rows, mask=rows < num_rows, other=NUM_EXPERTS) == expert
            places = tl.cumsum(is_own.to(tl.int32), 0)
            tl.store(order_ptr + start + places - 1, rows, mask=is_own)
            start += tl.sum(is_own.to(tl.int32))


@triton.jit
def _inner(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr) -> tl.tensor:
    """act(gate) * up, or (up + 1) * gate * sigmoid(alpha * gate) with both clamped."""
    if KIND == CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        inner = (up + 1.0) * gate / (1.0 + tl.exp2(-gate * ALPHA * LOG2_E))
    else:
        inner = activated(gate, KIND) * up
    return inner


@triton.jit
def _tile_of(tiles_ptr, num_tiles, NUM_BLOCKS: tl.constexpr, ROWS: tl.constexpr) -> tuple:
    """Finds (block of outputs, expert, sorted rows, which are there): all tiles of a group for one block first."""
    place = tl.program_id(0)
    first_tile = place // (GROUP * NUM_BLOCKS) * GROUP
    size = tl.minimum(num_tiles - first_tile, GROUP)
    within = place % (GROUP * NUM_BLOCKS)
    tile_ptr = tiles_ptr + (1 + first_tile + within % size) * TILE_INTS
    rows = tl.load(tile_ptr + 1) + tl.arange(0, ROWS)
    return within // size, tl.load(tile_ptr).to(tl.int64), rows, rows < tl.load(tile_ptr + 2)


@triton.jit
def _row_alone(experts_ptr, NUM_BLOCKS: tl.constexpr, ROWS: tl.constexpr) -> tuple:
    """Finds the same where every row is a tile of its own."""
    row = tl.program_id(0) // NUM_BLOCKS
    rows = tl.arange(0, ROWS)
    return tl.program_id(0) % NUM_BLOCKS, tl.load(experts_ptr + row).to(tl.int64), row + rows, rows < 1


@triton.jit
def _columns_of(places, first, columns, is_row, NUM_IN: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """The next columns of those rows; zeros past the end, and for rows that are not there."""
    is_place = is_row[:, None]
    if NUM_IN % COLUMNS != 0:
        is_place = is_place & (first + columns < NUM_IN)[None, :]
    return tl.load(places + first, mask=is_place, other=0.0)


@triton.jit
def _codes_of(words, dtype: tl.constexpr, PACKED: tl.constexpr) -> tuple:
    """Gives each quarter of the codes as numbers too small by 2 ** 126: sign, two bits of exponent, one of mantissa."""
    if PACKED:  # two words in a register, and two numbers
        return tl.inline_asm_elementwise(
            PAIRS,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    bits = words.to(tl.uint16, bitcast=True)
    last = ((bits << 1) & 0x8000) | ((bits >> 5) & 0x0100) | ((bits >> 4) & 0x00C0)  # what the others leave free
    return (
        _number(bits & 0x81C0, dtype),
        _number((bits << 3) & 0x81C0, dtype),
        _number((bits << 6) & 0x81C0, dtype),
        _number(last, dtype),
    )


@triton.jit
def _number(bits, dtype: tl.constexpr) -> tl.tensor:
    if dtype == tl.float32:
        bits = bits.to(tl.uint32) << 16
    return bits.to(dtype, bitcast=True)


@triton.jit
def _expanded(words, factors, dtype: tl.constexpr, PACKED: tl.constexpr) -> tl.tensor:
    """Gives weights, the quarters side by side."""
    first, second, third, last = _codes_of(words, dtype, PACKED)
    first *= _factors_of(factors, 0, dtype)[:, None]
    second *= _factors_of(factors, 1, dtype)[:, None]
    third *= _factors_of(factors, 2, dtype)[:, None]
    last *= _factors_of(factors, 3, dtype)[:, None]
    pairs = tl.join(tl.join(first, third), tl.join(second, last))
    return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (words.shape[0], 4 * words.shape[1]))


@triton.jit
def _factors_of(factors, PART: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Gives powers of two: a byte is an exponent as floats have it."""
    exponent = (factors >> (8 * PART)) & 255
    if dtype == tl.float32:
        power = exponent << 23
    else:
        power = (exponent << 7).to(tl.uint16)
    return power.to(dtype, bitcast=True)


@triton.jit
def multiply_tiles(
    in_ptr,
    weight_ptr,
    factors_ptr,
    bias_ptr,
    shares_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    NUM_ACTIVE: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Rows of a tile times the weights of its expert.

    With UP, tokens are gathered and multiplied with gate and up, and what the activation gives lies in the order of the
    sorted rows; rows of gate are STEP apart, and a row of up follows its gate's by UP. Without, sorted rows are
    multiplied with down and their shares, and lie in the order of the tokens again.

    Without tiles, the order is that of the tokens, and in its place are the experts.
    With factors, weights are codes in words: those of a quarter of COLUMNS inputs each, which share a factor, and the
    outputs of as many inputs side by side.
    """
    come_and_wait(OVERLAPS)
    NUM_BLOCKS: tl.constexpr = (NUM_OUT + OUTS - 1) // OUTS
    if tiles_ptr is None:
        block, expert, sorted_rows, is_row = _row_alone(order_ptr, NUM_BLOCKS, ROWS)
        token_rows = sorted_rows
    else:
        num_tiles = tl.load(tiles_ptr)
        if tl.program_id(0) >= num_tiles * NUM_BLOCKS:
            return
        block, expert, sorted_rows, is_row = _tile_of(tiles_ptr, num_tiles, NUM_BLOCKS, ROWS)
        token_rows = tl.load(order_ptr + sorted_rows, mask=is_row, other=0)
    in_rows = token_rows // NUM_ACTIVE if UP > 0 else sorted_rows
    outs = block * OUTS + tl.arange(0, OUTS)
    is_out = outs < NUM_OUT
    first_row = expert * (NUM_OUT * (2 if UP > 0 else 1))
    in_places = in_ptr + in_rows.to(tl.int64)[:, None] * NUM_IN
    product = tl.zeros([OUTS, ROWS], tl.float32)
    up = tl.zeros([OUTS, ROWS], tl.float32)
    if factors_ptr is None:
        columns = tl.arange(0, COLUMNS)
        in_places += columns[None, :]
        weight_places = weight_ptr + first_row * NUM_IN + (outs * STEP)[:, None] * NUM_IN + columns[None, :]
        for first in range(0, NUM_IN, COLUMNS):
            x = tl.trans(_columns_of(in_places, first, columns, is_row, NUM_IN, COLUMNS))
            weight = _columns_of(weight_places, first, columns, is_out, NUM_IN, COLUMNS)
            product = tl.dot(weight, x, product, input_precision="ieee")
            if UP > 0:
                up_weight = _columns_of(weight_places + UP * NUM_IN, first, columns, is_out, NUM_IN, COLUMNS)
                up = tl.dot(up_weight, x, up, input_precision="ieee")
    else:
        dtype: tl.constexpr = in_ptr.dtype.element_ty
        SIZE: tl.constexpr = NUM_OUT * (2 if UP > 0 else 1)
        NUM_GROUPS: tl.constexpr = (NUM_IN + COLUMNS - 1) // COLUMNS
        QUARTER: tl.constexpr = COLUMNS // 4
        columns = tl.arange(0, COLUMNS)
        in_places += columns[None, :]
        factor_places = factors_ptr + first_row * NUM_GROUPS + outs
        word_places = weight_ptr + (first_row * NUM_GROUPS + outs)[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
        for group in range(NUM_GROUPS):
            factors = tl.load(factor_places + group * SIZE, mask=is_out, other=0)
            words = tl.load(word_places + group * (SIZE * QUARTER), mask=is_out[:, None], other=0)
            if UP > 0:
                up_factors = tl.load(factor_places + (group * SIZE + UP), mask=is_out, other=0)
                up_words = tl.load(word_places + (group * SIZE + UP) * QUARTER, mask=is_out[:, None], other=0)
            x = tl.trans(_columns_of(in_places, group * COLUMNS, columns, is_row, NUM_IN, COLUMNS))
            product = tl.dot(_expanded(words, factors, dtype, PACKED), x, product, input_precision="ieee")
            if UP > 0:
                up = tl.dot(_expanded(up_words, up_factors, dtype, PACKED), x, up, input_precision="ieee")
    if bias_ptr is not None:
        bias_places = bias_ptr + first_row + outs * STEP
        product += tl.load(bias_places, mask=is_out, other=0.0).to(tl.float32)[:, None]
        if UP > 0:
            up += tl.load(bias_places + UP, mask=is_out, other=0.0).to(tl.float32)[:, None]
    out_rows = sorted_rows if UP > 0 else token_rows
    if UP > 0:
        product = _inner(product, up, KIND, LIMIT, ALPHA)
    else:
        product *= tl.load(shares_ptr + out_rows, mask=is_row, other=0.0)[None, :]
    come_late(OVERLAPS)
    places = out_ptr + out_rows.to(tl.int64)[None, :] * NUM_OUT + outs[:, None]
    tl.store(places, product.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_out[:, None])


@triton.jit
def sum_parts(
    parts_ptr,
    shared_ptr,
    shared_gate_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    VALUES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Sums a token's parts: those of its experts one after the other, then its share of a shared expert, if any."""
    come_and_wait(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_place = dims < WIDTH
    total = tl.zeros([VALUES], tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts_ptr + (token * NUM_PARTS + part) * WIDTH + dims, mask=is_place, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        share = 1.0 / (1.0 + tl.exp2(-tl.load(shared_gate_ptr + token).to(tl.float32) * LOG2_E))
        total += share * tl.load(shared_ptr + token * WIDTH + dims, mask=is_place, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(out_ptr + token * WIDTH + dims, mask=is_place, other=0.0).to(tl.float32)
    come_late(OVERLAPS)
    tl.store(out_ptr + token * WIDTH + dims, total.to(out_ptr.dtype.element_ty), mask=is_place)


@triton.jit
def gate_up_alone(
    x_ptr,
    weight_ptr,
    bias_ptr,
    experts_ptr,
    out_ptr,
    NUM_ACTIVE: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """A row on its own, at the speed of memory: some outputs of its expert."""
    come_and_wait(OVERLAPS)
    row = tl.program_id(1)
    expert = tl.load(experts_ptr + row).to(tl.int64)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_out = outs < NUM_OUT
    columns = tl.arange(0, COLUMNS)
    gate_places = weight_ptr + expert * (2 * NUM_OUT * NUM_IN) + (outs * STEP)[:, None] * NUM_IN + columns[None, :]
    gates = tl.zeros([OUTS, COLUMNS], tl.float32)
    ups = tl.zeros([OUTS, COLUMNS], tl.float32)
    for first in range(0, NUM_IN, COLUMNS):
        gate_weight = _columns_of(gate_places, first, columns, is_out, NUM_IN, COLUMNS)
        up_weight = _columns_of(gate_places + UP * NUM_IN, first, columns, is_out, NUM_IN, COLUMNS)
        x = tl.load(x_ptr + row // NUM_ACTIVE * NUM_IN + first + columns, mask=first + columns < NUM_IN, other=0.0)
        gates += gate_weight.to(tl.float32) * x.to(tl.float32)[None, :]
        ups += up_weight.to(tl.float32) * x.to(tl.float32)[None, :]
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * NUM_OUT) + outs * STEP
        gate += tl.load(biases, mask=is_out, other=0.0).to(tl.float32)
        up += tl.load(biases + UP, mask=is_out, other=0.0).to(tl.float32)
    inner = _inner(gate, up, KIND, LIMIT, ALPHA)
    tl.store(out_ptr + row * NUM_OUT + outs, inner.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def down_alone(
    inner_ptr,
    weight_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    out_ptr,
    NUM_ACTIVE: tl.constexpr,
    PADDED_ACTIVE: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    ADDS: tl.constexpr,
    OUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some outputs of one token: those of all its experts together, weighted and summed."""
    come_and_wait(OVERLAPS)
    token = tl.program_id(1)
    slots = tl.arange(0, PADDED_ACTIVE)
    rows = token * NUM_ACTIVE + slots
    is_slot = slots < NUM_ACTIVE
    expert = tl.load(experts_ptr + rows, mask=is_slot, other=0).to(tl.int64)
    share = tl.load(weights_ptr + rows, mask=is_slot, other=0.0)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_out = outs < NUM_OUT
    columns = tl.arange(0, COLUMNS)[None, None, :]
    is_pair = is_slot[:, None, None] & is_out[None, :, None]
    weight_places = weight_ptr + expert[:, None, None] * (NUM_OUT * NUM_IN) + outs[None, :, None] * NUM_IN + columns
    inner_places = inner_ptr + rows[:, None, None] * NUM_IN + columns
    sums = tl.zeros([PADDED_ACTIVE, OUTS, COLUMNS], tl.float32)
    for first in range(0, NUM_IN, COLUMNS):
        is_column = first + columns < NUM_IN
        weight = tl.load(weight_places + first, mask=is_pair & is_column, other=0.0)
        inner = tl.load(inner_places + first, mask=is_slot[:, None, None] & is_column, other=0.0)
        sums += weight.to(tl.float32) * inner.to(tl.float32)
    of_experts = tl.sum(sums, 2)
    if bias_ptr is not None:
        biases = bias_ptr + expert[:, None] * NUM_OUT + outs[None, :]
        of_experts += tl.load(biases, mask=is_slot[:, None] & is_out[None, :], other=0.0).to(tl.float32)
    product = tl.sum(of_experts * share[:, None], 0)
    if ADDS:
        product += tl.load(out_ptr + token * NUM_OUT + outs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * NUM_OUT + outs, product.to(out_ptr.dtype.element_ty), mask=is_out)
