"""Kernels of recurrent layers on a GPU; `cuda_recurrence.py` launches them. They also run in Triton's interpreter.

Which rows advance which slots is read on the device (`ChunkTables`): single tokens one by one, longer chunks in pieces.
A launch depends on sizes alone, so that steps can be captured; rows that no table names are neither read nor written.
"""

# T tokens, P tokens of a piece, C channels, W width of the convolution, H value heads, K key size, V value size

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.overlap import come_and_wait, come_late

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _sigmoid(x) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x) -> tl.tensor:
    """log(1 + exp(x)), with all digits where exp(x) is small."""
    small = tl.exp(tl.minimum(x, 20.0))
    sum_ = 1.0 + small
    log = tl.where(sum_ == 1.0, small, tl.log(sum_) * (small / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def _column(channel, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUES: tl.constexpr) -> tl.tensor:
    """Finds a channel among inputs that are grouped by key head."""
    group: tl.constexpr = 2 * KEY + 2 * VALUES
    of_keys: tl.constexpr = KEY_HEADS * KEY
    value = channel - 2 * of_keys
    key_column = channel % of_keys // KEY * group + channel // of_keys * KEY + channel % KEY
    return tl.where(value < 0, key_column, value // VALUES * group + 2 * KEY + value % VALUES)


@triton.jit
def convolve(
    x_ptr, weight_ptr, bias_ptr, tails_ptr, out_ptr, items_ptr, chunks_ptr, count_ptr, x_stride,
    NUM_CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PADDED_TAIL: tl.constexpr, KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUES: tl.constexpr, ACTIVATES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Convolves each channel by itself over (row, slot) of single tokens, or pieces of chunks; tails advance.

    Inputs grouped by key head, where KEY is not 0, lie as q, k, then VALUES of v and of z.
    """
    come_and_wait(OVERLAPS)
    first_channel = tl.program_id(1) * CHANNELS
    channels = first_channel + tl.arange(0, CHANNELS)
    is_channel = channels < NUM_CHANNELS
    columns = channels
    if KEY > 0:
        if KEY % CHANNELS == 0 and VALUES % CHANNELS == 0:  # they lie together, and are loaded so
            columns = _column(first_channel, KEY_HEADS, KEY, VALUES) + tl.arange(0, CHANNELS)
        else:
            columns = _column(channels, KEY_HEADS, KEY, VALUES)
    for item in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        if TOKENS == 1:
            first = tl.load(items_ptr + 4 * item)
            end, chunk_first, chunk_end = first + 1, first, first + 1
            slot = tl.load(items_ptr + 4 * item + 1).to(tl.int64)
        else:
            first, end = tl.load(items_ptr + 4 * item), tl.load(items_ptr + 4 * item + 1)
            chunk_ptr = chunks_ptr + 4 * tl.load(items_ptr + 4 * item + 2)
            chunk_first, chunk_end = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
            slot = tl.load(chunk_ptr + 2).to(tl.int64)
        tail_ptr = tails_ptr + slot * ((WIDTH - 1) * NUM_CHANNELS)
        rows = first + tl.arange(0, TOKENS)[:, None]
        is_place = (rows < end) & is_channel[None, :]
        sums = tl.zeros([TOKENS, CHANNELS], tl.float32)
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            source = rows + (tap + 1 - WIDTH)
            weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
            places = x_ptr + source.to(tl.int64) * x_stride + columns[None, :]
            x = tl.load(places, mask=is_place & (source >= chunk_first), other=0.0)
            if tap < WIDTH - 1:
                places = tail_ptr + (source - chunk_first + WIDTH - 1) * NUM_CHANNELS + channels[None, :]
                x += tl.load(places, mask=is_place & (source < chunk_first), other=0.0)
            sums += x.to(tl.float32) * weight[None, :]
        if first == chunk_first:
            tail = tl.arange(0, PADDED_TAIL)[:, None]
            kept_rows = chunk_end - (WIDTH - 1) + tail
            is_kept = (tail < WIDTH - 1) & is_channel[None, :]
            kept_places = x_ptr + kept_rows.to(tl.int64) * x_stride + columns[None, :]
            kept = tl.load(kept_places, mask=is_kept & (kept_rows >= chunk_first), other=0.0)
            old_places = tail_ptr + (kept_rows - chunk_first + WIDTH - 1) * NUM_CHANNELS + channels[None, :]
            kept += tl.load(old_places, mask=is_kept & (kept_rows < chunk_first), other=0.0)
            tl.debug_barrier()  # all have read the tail
            tl.store(tail_ptr + tail * NUM_CHANNELS + channels[None, :], kept, mask=is_kept)
        if ACTIVATES:
            sums *= _sigmoid(sums)
        places = out_ptr + rows.to(tl.int64) * NUM_CHANNELS + channels[None, :]
        tl.store(places, sums.to(out_ptr.dtype.element_ty), mask=is_place)
    come_late(OVERLAPS)


@triton.jit
def _gates(
    gates_ptr, a_log_ptr, bias_ptr, rows, is_row, head, stride,
    GATE_GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
) -> tuple:  # fmt: skip
    """Gives (share of what is written, logarithm of the decay).

    Under the delta rule, where GATE_GROUP heads have their betas before their alphas, the share is sigmoid(beta);
    elsewhere, with 0, it is the time step within its limits.
    """
    places = gates_ptr + rows.to(tl.int64) * stride
    at = head
    if GATE_GROUP > 0:
        at = head // GATE_GROUP * (2 * GATE_GROUP) + GATE_GROUP + head % GATE_GROUP
    time = _softplus(tl.load(places + at, mask=is_row, other=0.0).to(tl.float32) + tl.load(bias_ptr + head))
    if GATE_GROUP > 0:
        share = _sigmoid(tl.load(places + (at - GATE_GROUP), mask=is_row, other=0.0).to(tl.float32))
    else:
        time = tl.minimum(tl.maximum(time, LOW), HIGH)
        share = time
    decay = -tl.exp(tl.load(a_log_ptr + head)) * time
    return tl.where(is_row, share, 0.0), tl.where(is_row, decay, 0.0)


@triton.jit
def _heads(
    mixed_ptr, rows, is_row, at, NUM_CHANNELS: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr
) -> tl.tensor:
    """[rows, size], as they were stored, from channel `at`."""
    dims = tl.arange(0, PADDED_SIZE)[None, :]
    places = mixed_ptr + rows.to(tl.int64)[:, None] * NUM_CHANNELS + at + dims
    return tl.load(places, mask=is_row[:, None] & (dims < SIZE), other=0.0)


@triton.jit
def _lengths(x) -> tl.tensor:
    """What makes each row of x as long as 1."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + L2_EPS)


@triton.jit
def _parts(wide, KIND: tl.constexpr) -> tuple:
    """Splits float32 numbers into two parts of a narrower kind, which keep all but the last bits together."""
    high = wide.to(KIND)
    return high, (wide - high.to(tl.float32)).to(KIND)


@triton.jit
def _add_product(sums, x, wide, KIND: tl.constexpr) -> tl.tensor:
    """Adds x, as it was stored, times float32 numbers: products of a narrow kind run faster than any of float32."""
    if tl.float32 == KIND:
        sums = tl.dot(x, wide, sums, input_precision="ieee")
    else:
        high, low = _parts(wide, KIND)
        sums = tl.dot(x, low, sums)
        sums = tl.dot(x, high, sums)
    return sums


@triton.jit
def _product(a, b, KIND: tl.constexpr) -> tl.tensor:
    """Multiplies float32 numbers, in parts too."""
    if tl.float32 == KIND:
        product = tl.dot(a, b, input_precision="ieee")
    else:
        a_high, a_low = _parts(a, KIND)
        b_high, b_low = _parts(b, KIND)
        product = tl.dot(a_low, b_high)
        product = tl.dot(a_high, b_low, product)
        product = tl.dot(a_high, b_high, product)
    return product


@triton.jit
def _keep(ptr, places, is_place, part_stride, wide, KIND: tl.constexpr) -> None:
    """Stores a matrix as `_add_kept` multiplies it."""
    if tl.float32 == KIND:
        tl.store(ptr + places, wide, mask=is_place)
    else:
        high, low = _parts(wide, KIND)
        tl.store(ptr + places, high, mask=is_place)
        tl.store(ptr + part_stride + places, low, mask=is_place)


@triton.jit
def _add_kept(sums, ptr, places, is_place, part_stride, wide, KIND: tl.constexpr) -> tl.tensor:
    high = tl.load(ptr + places, mask=is_place, other=0.0)
    if tl.float32 == KIND:
        sums = tl.dot(high, wide, sums, input_precision="ieee")
    else:
        low = tl.load(ptr + part_stride + places, mask=is_place, other=0.0)
        wide_high, wide_low = _parts(wide, KIND)
        sums = tl.dot(low, wide_high, sums)
        sums = tl.dot(high, wide_low, sums)
        sums = tl.dot(high, wide_high, sums)
    return sums


@triton.jit
def advance_singles(
    mixed_ptr, gates_ptr, a_log_ptr, bias_ptr, skip_ptr, states_ptr, read_ptr, singles_ptr, count_ptr, gates_stride,
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, PADDED_KEY: tl.constexpr, VALUE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, GATE_GROUP: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, VALUES: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of one head's matrix, for single tokens: it decays, is written to and then read, in place."""
    come_and_wait(OVERLAPS)
    head = tl.program_id(1)
    keys, values = tl.arange(0, PADDED_KEY), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_value = values < VALUE
    is_place = (keys < KEY)[:, None] & is_value[None, :]
    for item in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        row = tl.load(singles_ptr + 4 * item).to(tl.int64)
        slot = tl.load(singles_ptr + 4 * item + 1).to(tl.int64)
        places = states_ptr + (slot * HEADS + head) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
        matrix = tl.load(places, mask=is_place, other=0.0)
        mixed = mixed_ptr + row * NUM_CHANNELS
        q = tl.load(mixed + Q_AT + head // GROUP * KEY + keys, mask=keys < KEY, other=0.0).to(tl.float32)
        k = tl.load(mixed + K_AT + head // GROUP * KEY + keys, mask=keys < KEY, other=0.0).to(tl.float32)
        v = tl.load(mixed + V_AT + head * VALUE + values, mask=is_value, other=0.0).to(tl.float32)
        share, decay = _gates(gates_ptr, a_log_ptr, bias_ptr, row, row >= 0, head, gates_stride, GATE_GROUP, LOW, HIGH)
        matrix *= tl.exp(decay)
        written = v
        if GATE_GROUP > 0:
            q *= tl.rsqrt(tl.sum(q * q) + L2_EPS) * scale
            k *= tl.rsqrt(tl.sum(k * k) + L2_EPS)
            written -= tl.sum(matrix * k[:, None], 0)
        matrix += k[:, None] * (written * share)[None, :]
        read = tl.sum(matrix * q[:, None], 0)
        if skip_ptr is not None:
            read += tl.load(skip_ptr + head) * v
        tl.store(places, matrix, mask=is_place)
        tl.store(read_ptr + (row * HEADS + head) * VALUE + values, read, mask=is_value)
    come_late(OVERLAPS)


@triton.jit
def _inverse(below, PIECE: tl.constexpr, LEVELS: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """Inverts a triangular matrix with ones on its diagonal and `below` under it: blocks, then pairs of them.

    Squaring would need fewer products, but sums of large numbers of both signs where keys repeat.
    """
    i, j = tl.arange(0, PIECE)[:, None], tl.arange(0, PIECE)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, below, 0.0)
    for level in tl.static_range(1, LEVELS):
        is_between = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        between = tl.where(is_between, below, 0.0)
        inverse -= _product(_product(inverse, between, KIND), inverse, KIND)
    return inverse


@triton.jit
def solve_pieces(
    mixed_ptr, gates_ptr, a_log_ptr, bias_ptr, seen_ptr, solved_ptr, factors_ptr, pieces_ptr, count_ptr, gates_stride,
    part_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, PADDED_KEY: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, GATE_GROUP: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    PIECE: tl.constexpr, LEVELS: tl.constexpr,
) -> None:  # fmt: skip
    """What a piece needs that does not depend on the state, one head: how much its tokens see of what each writes.

    Under the delta rule also the inverse of the triangular system that says what they write. The factors of a token
    are those of what it reads of the state, of what the state holds along its key, of what is left in the end of what
    it writes, and of what is left of the state after the piece.
    """
    KIND: tl.constexpr = mixed_ptr.dtype.element_ty
    head = tl.program_id(1)
    places_of_piece = tl.arange(0, PIECE)
    i, j = places_of_piece[:, None], places_of_piece[None, :]
    key_at = head // GROUP * KEY
    for item in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        rows = tl.load(pieces_ptr + 4 * item) + places_of_piece
        is_row = rows < tl.load(pieces_ptr + 4 * item + 1)
        wide_rows = rows.to(tl.int64) * HEADS + head
        squares = wide_rows[:, None] * PIECE + j
        share, decay = _gates(gates_ptr, a_log_ptr, bias_ptr, rows, is_row, head, gates_stride, GATE_GROUP, LOW, HIGH)
        total = tl.cumsum(decay, 0)
        last = tl.sum(decay, 0)
        later = tl.where(i >= j, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
        k = _heads(mixed_ptr, rows, is_row, K_AT + key_at, NUM_CHANNELS, KEY, PADDED_KEY)
        q = _heads(mixed_ptr, rows, is_row, Q_AT + key_at, NUM_CHANNELS, KEY, PADDED_KEY)
        of_q, of_k, written_share = tl.full([PIECE], 1.0, tl.float32), tl.full([PIECE], 1.0, tl.float32), share
        if GATE_GROUP > 0:
            of_q, of_k, written_share = _lengths(q) * scale, _lengths(k), tl.full([PIECE], 1.0, tl.float32)
        seen = tl.dot(q, tl.trans(k), input_precision="ieee") * later
        seen *= of_q[:, None] * (of_k * written_share)[None, :]
        _keep(seen_ptr, squares, is_row[:, None], part_stride, seen, KIND)
        since, until = tl.exp(total), tl.exp(tl.minimum(last - total, 0.0))
        tl.store(factors_ptr + wide_rows * 4, of_q * since, mask=is_row)
        tl.store(factors_ptr + wide_rows * 4 + 1, of_k * since, mask=is_row)
        tl.store(factors_ptr + wide_rows * 4 + 2, of_k * until * written_share, mask=is_row)
        tl.store(factors_ptr + wide_rows * 4 + 3, tl.exp(last) + tl.zeros([PIECE], tl.float32), mask=is_row)
        if GATE_GROUP > 0:
            system = tl.dot(k, tl.trans(k), input_precision="ieee") * later
            system *= (share * of_k)[:, None] * of_k[None, :]
            inverse = _inverse(tl.where(i > j, system, 0.0), PIECE, LEVELS, KIND) * share[None, :]
            _keep(solved_ptr, squares, is_row[:, None], part_stride, inverse, KIND)


@triton.jit
def advance_chunks(
    mixed_ptr, skip_ptr, states_ptr, seen_ptr, solved_ptr, factors_ptr, read_ptr, chunks_ptr, count_ptr,
    part_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, PADDED_KEY: tl.constexpr, VALUE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, IS_DELTA: tl.constexpr,
    VALUES: tl.constexpr, PIECE: tl.constexpr,
) -> None:  # fmt: skip
    """Takes some columns of one head's matrix through a chunk, piece by piece."""
    KIND: tl.constexpr = mixed_ptr.dtype.element_ty
    head = tl.program_id(1)
    keys, values = tl.arange(0, PADDED_KEY), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_value = (values < VALUE)[None, :]
    is_state = (keys < KEY)[:, None] & is_value
    places_of_piece = tl.arange(0, PIECE)
    key_at = head // GROUP * KEY
    for item in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        chunk_first, chunk_end = tl.load(chunks_ptr + 4 * item), tl.load(chunks_ptr + 4 * item + 1)
        slot = tl.load(chunks_ptr + 4 * item + 2).to(tl.int64)
        state_places = states_ptr + (slot * HEADS + head) * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
        matrix = tl.load(state_places, mask=is_state, other=0.0)
        for first in range(chunk_first, chunk_end, PIECE):
            rows = first + places_of_piece
            is_row = rows < chunk_end
            is_place = is_row[:, None] & is_value
            wide_rows = rows.to(tl.int64) * HEADS + head
            squares = wide_rows[:, None] * PIECE + places_of_piece[None, :]
            k = _heads(mixed_ptr, rows, is_row, K_AT + key_at, NUM_CHANNELS, KEY, PADDED_KEY)
            q = _heads(mixed_ptr, rows, is_row, Q_AT + key_at, NUM_CHANNELS, KEY, PADDED_KEY)
            v_places = mixed_ptr + rows.to(tl.int64)[:, None] * NUM_CHANNELS + V_AT + head * VALUE + values[None, :]
            v = tl.load(v_places, mask=is_place, other=0.0).to(tl.float32)
            written, nothing = v, tl.zeros([PIECE, VALUES], tl.float32)
            if IS_DELTA:
                of_k = tl.load(factors_ptr + wide_rows * 4 + 1, mask=is_row, other=0.0)
                new = v - _add_product(nothing, k, matrix, KIND) * of_k[:, None]
                written = _add_kept(nothing, solved_ptr, squares, is_row[:, None], part_stride, new, KIND)
            of_q = tl.load(factors_ptr + wide_rows * 4, mask=is_row, other=0.0)
            read = _add_product(nothing, q, matrix, KIND) * of_q[:, None]
            read = _add_kept(read, seen_ptr, squares, is_row[:, None], part_stride, written, KIND)
            if skip_ptr is not None:
                read += tl.load(skip_ptr + head) * v
            tl.store(read_ptr + wide_rows[:, None] * VALUE + values[None, :], read, mask=is_place)
            left = tl.load(factors_ptr + wide_rows * 4 + 2, mask=is_row, other=0.0)
            matrix *= tl.max(tl.load(factors_ptr + wide_rows * 4 + 3, mask=is_row, other=0.0), 0)  # they are equal
            matrix = _add_product(matrix, tl.trans(k), written * left[:, None], KIND)
        tl.store(state_places, matrix, mask=is_state)


@triton.jit(do_not_specialize=["num_rows"])
def gate(
    read_ptr, z_ptr, weight_ptr, out_ptr, num_rows, z_stride, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, Z_GROUPS: tl.constexpr,
    Z_STEP: tl.constexpr, SHARES_WEIGHT: tl.constexpr, NORMS_FIRST: tl.constexpr, ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Norms each group of what was read, before or after it is gated by silu(z); without weights it is only gated.

    Z_GROUPS groups of z lie together, and those after them Z_STEP further.
    """
    come_and_wait(OVERLAPS)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    dims = tl.arange(0, PADDED_WIDTH)[None, :]
    is_place = (rows < num_rows) & (dims < WIDTH)
    group = rows % GROUPS
    read = tl.load(read_ptr + rows * WIDTH + dims, mask=is_place, other=0.0)
    z_places = z_ptr + rows // GROUPS * z_stride + group // Z_GROUPS * Z_STEP + group % Z_GROUPS * WIDTH + dims
    z = tl.load(z_places, mask=is_place, other=0.0).to(tl.float32)
    z *= _sigmoid(z)
    if not NORMS_FIRST:
        read *= z
    if weight_ptr is not None:
        weight_places = weight_ptr + dims
        if not SHARES_WEIGHT:
            weight_places = weight_ptr + group * WIDTH + dims
        weight = tl.load(weight_places, mask=is_place, other=0.0)
        read *= (1.0 / tl.sqrt_rn(tl.sum(read * read, 1) / WIDTH + eps))[:, None] * weight
    if NORMS_FIRST:
        read *= z
    come_late(OVERLAPS)
    tl.store(out_ptr + rows * WIDTH + dims, read.to(out_ptr.dtype.element_ty), mask=is_place)
