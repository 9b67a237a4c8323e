"""The Triton kernels of attention over pages. They also run in Triton's interpreter, on a CPU.

One kernel attends for every kind of chunk. Its tile is a few queries of one chunk with all heads that share a
key-value head as rows, so that a key is read once for the group; a decode is such a tile of one query. The keys of
a tile may be split over programs, whose partial results a second kernel merges.
"""

# T tokens of the step, H heads, K key-value heads, D head size, S slots; rows and keys of a tile are its two sides

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.overlap import come_and_wait, come_late

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold_keys(  # noqa: ANN202
    attended,
    total,
    top,
    q,
    positions,
    keys_ptr,
    values_ptr,
    table_ptr,
    slot_stride,
    first,
    last,
    end,
    scale,
    softcap,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Takes the keys [first, last) into the running softmax; unmasked ones are seen by every row."""
    steps = tl.arange(0, KEYS)
    dims = tl.arange(0, PADDED_SIZE)
    for start in range(first, last, KEYS):
        keys = start + steps
        is_there = (keys < end)[:, None] if IS_MASKED else (keys >= 0)[:, None]
        is_there = is_there & (dims < SIZE)[None, :]
        if PAGE % KEYS == 0:
            slots = tl.load(table_ptr + start // PAGE).to(tl.int64) * PAGE + start % PAGE + steps  # ty: ignore
        elif IS_MASKED:
            slots = tl.load(table_ptr + keys // PAGE, mask=keys < end, other=0).to(tl.int64) * PAGE + keys % PAGE
        else:
            slots = tl.load(table_ptr + keys // PAGE).to(tl.int64) * PAGE + keys % PAGE
        places = slots[:, None] * slot_stride + dims[None, :]
        if IS_MASKED or SIZE != PADDED_SIZE:
            # Slots past the end were never written and may hold anything, NaN included.
            k = tl.load(keys_ptr + places, mask=is_there, other=0.0)
        else:
            k = tl.load(keys_ptr + places)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1); scale holds scale / softcap here.
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale * LOG2_E)) + 1.0))
            factor = LOG2_E
        else:
            factor = scale * LOG2_E
        if IS_MASKED:
            is_seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet keeps an infinite top; it must not be subtracted from itself.
        level = tl.where(new_top == float("-inf"), 0.0, new_top) if IS_MASKED else new_top
        weights = tl.exp2(scores * factor - level[:, None])
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(weights, 1)
        if IS_MASKED or SIZE != PADDED_SIZE:
            v = tl.load(values_ptr + places, mask=is_there, other=0.0)
        else:
            v = tl.load(values_ptr + places)
        attended = tl.dot(weights.to(v.dtype), v, attended * shrink[:, None], input_precision="ieee")
        top = new_top
    return attended, total, top


# Numbers that change from step to step do not make new kernels.
@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def attend_tiles(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    sinks_ptr,
    tiles_ptr,
    query_starts_ptr,
    context_lens_ptr,
    table_ptr,
    table_stride,
    token_stride,
    slot_stride,
    num_splits,
    scale,
    softcap,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Program (tile, key-value head, split). A tile is (chunk, its first query); chunk -1 is padding."""
    come_and_wait(OVERLAPS)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk, first_query = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if chunk < 0:
        return
    query_start = tl.load(query_starts_ptr + chunk)
    num_queries = tl.load(query_starts_ptr + chunk + 1) - query_start
    context = tl.load(context_lens_ptr + chunk)
    table_ptr += chunk.to(tl.int64) * table_stride
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_SIZE)
    queries = first_query + rows // GROUP
    is_row = (queries < num_queries) & (rows < ROWS // GROUP * GROUP)
    positions = context - num_queries + queries
    heads = kv_head * GROUP + rows % GROUP
    places = (query_start + queries).to(tl.int64)[:, None] * token_stride + heads[:, None] * SIZE + dims[None, :]
    is_place = is_row[:, None] & (dims < SIZE)[None, :]
    q = tl.load(q_ptr + places, mask=is_place, other=0.0)

    first_position = context - num_queries + first_query
    end = context - num_queries + tl.minimum(first_query + ROWS // GROUP, num_queries)
    begin = 0
    seen_by_all = 0  # keys from here on are in every row's window
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS
        seen_by_all = (tl.maximum(end - WINDOW, 0) + KEYS - 1) // KEYS * KEYS
    past_all = (first_position + 1) // KEYS * KEYS  # keys before here come before every row
    if IS_SPLIT:
        per_split = ((end - begin + num_splits - 1) // num_splits + KEYS - 1) // KEYS * KEYS
        begin += split * per_split
        end = tl.minimum(end, begin + per_split)
    edge = tl.minimum(tl.maximum(seen_by_all, begin), tl.maximum(end, begin))
    middle = tl.maximum(edge, tl.minimum(past_all, end))

    keys_ptr += kv_head * SIZE
    values_ptr += kv_head * SIZE
    attended = tl.zeros([ROWS, PADDED_SIZE], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    # The window's edge and the rows' own square are masked; what lies between is seen by all.
    firsts, lasts = (begin, edge, middle), (edge, middle, end)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        attended, total, top = _fold_keys(
            attended, total, top, q, positions, keys_ptr, values_ptr, table_ptr, slot_stride, firsts[part], lasts[part],
            end, scale, softcap, PAGE, KEYS, SIZE, PADDED_SIZE, WINDOW, HAS_SOFTCAP, part != 1,
        )  # fmt: skip
    if HAS_SINKS and not IS_SPLIT:
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0) * LOG2_E
        total += tl.exp2(sinks - tl.where(top == float("-inf"), sinks, top))
    come_late(OVERLAPS)
    divisor = tl.where(total == 0.0, 1.0, total)  # a split may hold no key that a row sees; its top is infinite then
    attended = attended / divisor[:, None]
    if IS_SPLIT:
        part = ((tile * num_splits + split) * tl.num_programs(1) + kv_head).to(tl.int64) * ROWS + rows
        tl.store(partial_ptr + part[:, None] * SIZE + dims[None, :], attended, mask=is_place)
        tl.store(partial_lse_ptr + part, top + tl.log2(divisor), mask=is_row)
    else:
        tl.store(out_ptr + places, attended.to(out_ptr.dtype.element_ty), mask=is_place)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    partial_ptr,
    partial_lse_ptr,
    sinks_ptr,
    out_ptr,
    tiles_ptr,
    query_starts_ptr,
    token_stride,
    num_splits,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Program (tile, row, key-value head): attention over the union of the splits, weighted by their sums."""
    come_and_wait(OVERLAPS)
    tile, row, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk, first_query = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if chunk < 0:
        return
    query_start = tl.load(query_starts_ptr + chunk)
    query = first_query + row // GROUP
    if query >= tl.load(query_starts_ptr + chunk + 1) - query_start:
        return
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_SIZE)
    parts = ((tile * num_splits + splits) * tl.num_programs(2) + kv_head).to(tl.int64) * ROWS + row
    lse = tl.load(partial_lse_ptr + parts, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    shares = tl.exp2(lse - top)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks_ptr + kv_head * GROUP + row % GROUP) * LOG2_E - top)
    is_place = (splits < num_splits)[:, None] & (dims < SIZE)[None, :]
    attended = tl.load(partial_ptr + parts[:, None] * SIZE + dims[None, :], mask=is_place, other=0.0)
    merged = tl.sum(attended * shares[:, None], 0) / total
    come_late(OVERLAPS)
    place = (query_start + query).to(tl.int64) * token_stride + (kv_head * GROUP + row % GROUP) * SIZE + dims
    tl.store(out_ptr + place, merged.to(out_ptr.dtype.element_ty), mask=dims < SIZE)


@triton.jit
def _rotate_heads(
    from_ptr,
    to_ptr,
    cos,
    sin,
    weight_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Heads [NUM_HEADS, SIZE] of one token; dimensions past the rotated ones are copied, and never normed."""
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    if HALF > 0:
        halves = tl.arange(0, PADDED_HALF)[None, :]
        is_place = (heads < NUM_HEADS) & (halves < HALF)
        places = heads * SIZE + halves
        first = tl.load(from_ptr + places, mask=is_place, other=0.0).to(tl.float32)
        second = tl.load(from_ptr + places + HALF, mask=is_place, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = 1.0 / tl.sqrt_rn((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE + eps)
            first *= scale[:, None] * tl.load(weight_ptr + halves, mask=halves < HALF, other=0.0)
            second *= scale[:, None] * tl.load(weight_ptr + HALF + halves, mask=halves < HALF, other=0.0)
        kind = to_ptr.dtype.element_ty
        tl.store(to_ptr + places, (first * cos - second * sin).to(kind), mask=is_place)
        tl.store(to_ptr + places + HALF, (second * cos + first * sin).to(kind), mask=is_place)
    if 2 * HALF < SIZE:
        dims = tl.arange(0, PADDED_SIZE)[None, :]
        is_place = (heads < NUM_HEADS) & (dims >= 2 * HALF) & (dims < SIZE)
        copied = tl.load(from_ptr + heads * SIZE + dims, mask=is_place, other=0.0)
        tl.store(to_ptr + heads * SIZE + dims, copied, mask=is_place)


@triton.jit
def rotate_and_store(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    slots_ptr,
    rotated_ptr,
    keys_ptr,
    values_ptr,
    q_stride,
    k_stride,
    v_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program per token: queries, normed and rotated, go to their own tensor, keys and values to its slot."""
    come_and_wait(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    halves = tl.arange(0, PADDED_HALF)[None, :]
    cos = tl.load(cos_ptr + token * HALF + halves, mask=halves < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + halves, mask=halves < HALF, other=0.0).to(tl.float32)
    to_rotated, to_keys = rotated_ptr + token * NUM_HEADS * SIZE, keys_ptr + slot * slot_stride
    _rotate_heads(
        q_ptr + token * q_stride, to_rotated, cos, sin, q_weight_ptr, eps,
        NUM_HEADS, PADDED_HEADS, SIZE, PADDED_SIZE, HALF, PADDED_HALF, HAS_NORMS,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + token * k_stride, to_keys, cos, sin, k_weight_ptr, eps,
        NUM_KV_HEADS, PADDED_KV_HEADS, SIZE, PADDED_SIZE, HALF, PADDED_HALF, HAS_NORMS,
    )  # fmt: skip
    heads, dims = tl.arange(0, PADDED_KV_HEADS)[:, None], tl.arange(0, PADDED_SIZE)[None, :]
    is_place = (heads < NUM_KV_HEADS) & (dims < SIZE)
    v = tl.load(v_ptr + token * v_stride + heads * SIZE + dims, mask=is_place, other=0.0)
    come_late(OVERLAPS)
    tl.store(values_ptr + slot * slot_stride + heads * SIZE + dims, v, mask=is_place)
