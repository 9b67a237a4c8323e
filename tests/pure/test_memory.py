import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import STATE_SHARE, EngineConfig, parse_bytes, written_budget
from penstock.errors import InvalidSetting
from penstock.plan.chunks import ChunkedPrefillConfig, num_chunks
from penstock.plan.memory import AttentionTiling, MemoryModel, ModelShape, over_budget, peak_memory_estimate
from penstock.plan.prompt_plan import plan_prompt

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    intermediate_size=128,
    vocab_size=1000,
    num_parameters=200_000,
    largest_matrix=64 * 256,
    dtype_bytes=4,
    max_context=100_000,
)
MEMORY = MemoryModel(
    shape=SHAPE, tiling=AttentionTiling(query_rows=64, key_rows=64), runtime_bytes=1_000_000, block_size=16
)
budgets = st.integers(3_000_000, 200_000_000)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 50_000))
def test_the_peak_grows_with_the_chunk_and_with_the_context(small, more, context):
    peak = lambda chunk, end: MEMORY.peak_bytes(chunk=chunk, context=end)  # noqa: E731
    assert peak(small, context + small) <= peak(small + more, context + small + more)
    assert peak(small, context + small) <= peak(small, context + small + more)


@given(st.integers(0, 20_000), budgets, st.integers(1, 4000))
def test_the_largest_chunk_fits_and_one_more_token_does_not(start, budget, upper):
    chunk = MEMORY.largest_chunk(start=start, budget_bytes=budget, upper=upper)
    if chunk:
        assert MEMORY.peak_bytes(chunk=chunk, context=start + chunk) <= budget
    if chunk < upper:
        assert MEMORY.peak_bytes(chunk=chunk + 1, context=start + chunk + 1) > budget


@given(budgets, st.integers(1, 512))
def test_a_full_pool_still_leaves_room_for_the_smallest_chunk(budget, chunk):
    capacity = MEMORY.kv_capacity(budget_bytes=budget, chunk=chunk)
    assert capacity % MEMORY.block_size == 0
    if capacity > chunk:
        assert MEMORY.peak_bytes(chunk=chunk, context=chunk, resident_tokens=capacity) <= budget


@given(st.integers(1, 30_000), budgets, st.sampled_from([None, 0, 1, 17, 256, 5000]))
def test_a_plan_that_fits_stays_within_the_budget(num_tokens, budget, chunk_size):
    plan = plan_prompt(MEMORY, num_tokens, EngineConfig(chunk_size=chunk_size), budget, 100_000)
    assert plan.num_chunks >= 1
    if plan.fits:
        assert plan.peak_bytes <= budget
        assert plan.chunk_size <= (chunk_size or num_tokens if chunk_size is not None else 1024)
    else:
        assert plan.peak_bytes > budget


def test_a_lowered_chunk_is_said_and_refused_under_strict():
    budget = MEMORY.peak_bytes(chunk=100, context=4000)
    plan = plan_prompt(MEMORY, 4000, EngineConfig(chunk_size=2000), budget, 100_000)
    assert plan.fits
    assert any("2000" in adjustment for adjustment in plan.adjustments)
    with pytest.raises(InvalidSetting, match="strict"):
        plan_prompt(MEMORY, 4000, EngineConfig(chunk_size=2000, strict=True), budget, 100_000)


def test_a_chunk_that_fits_is_left_alone():
    plan = plan_prompt(MEMORY, 4000, EngineConfig(chunk_size=300, strict=True), 10**9, 100_000)
    assert (plan.chunk_size, plan.num_chunks, plan.adjustments) == (300, 14, ())


def test_overlap_is_counted_in_the_number_of_chunks():
    plan = plan_prompt(MEMORY, 4000, EngineConfig(chunk_size=300, overlap=50), 10**9, 100_000)
    assert plan.num_chunks == num_chunks(4000, ChunkedPrefillConfig(chunk_size=300, overlap=50))


def test_past_the_context_a_plan_does_not_fit():
    assert not plan_prompt(MEMORY, 101, EngineConfig(), 10**9, 100).fits


def test_the_estimate_says_what_chunking_saves():
    estimate = peak_memory_estimate(SHAPE, 8192, 512)
    assert estimate.num_chunks == 16
    assert estimate.chunked_prefill_bytes < estimate.full_prefill_bytes / 8
    assert estimate.memory_savings_ratio == pytest.approx(
        1 - estimate.chunked_prefill_bytes / estimate.full_prefill_bytes
    )
    ratio = f"{estimate.memory_savings_ratio:.1%}"
    assert estimate.summary().endswith(f"({ratio} savings, 16 chunks)")
    assert estimate.summary().startswith(f"Full prefill: {estimate.full_prefill_bytes / 1e6:.1f} MB, Chunked: ")


def test_an_empty_prompt_costs_nothing():
    assert peak_memory_estimate(SHAPE, 0, 512).full_prefill_bytes == 0


def test_a_packed_matrix_is_bounded_where_the_device_packs_panels():
    bound = 1000
    bounded = dataclasses.replace(MEMORY, most_packed_bytes=bound)
    matrix = SHAPE.largest_matrix * SHAPE.dtype_bytes
    assert MEMORY.activation_bytes(8, 8) - bounded.activation_bytes(8, 8) == matrix - bound
    loose = dataclasses.replace(MEMORY, most_packed_bytes=2 * matrix)
    assert loose.activation_bytes(8, 8) == MEMORY.activation_bytes(8, 8)


@given(budget=st.integers(10**8, 10**12), excess=st.integers(-(10**8), 10**9))
def test_a_peak_above_the_budget_is_told_with_the_difference(budget, excess):
    told = over_budget(budget + excess, budget)
    assert (told is not None) == (excess > 0)
    if excess > 0:
        by = f"{excess / 1e6:,.1f} MB" if excess >= 1e5 else f"{excess / 1e3:,.1f} kB"
        assert f"is {by} above --memory, {budget / 1e6:,.1f} MB" in told
    assert over_budget(budget + excess, None) is None


@given(
    num_tokens=st.integers(1, 200_000),
    chunk=st.integers(1, 4096),
    copied=st.sampled_from([0, 512]),
    states=st.sampled_from([(0, 0, 0), (10**6, 1, 0), (10**6, 4, 3)]),
)
def test_a_budget_that_is_named_for_a_prompt_holds_it_and_is_not_generous(num_tokens, chunk, copied, states):
    state_bytes, num_running, num_checkpoints = states
    shape = dataclasses.replace(SHAPE, copied_bytes_per_token=copied, state_bytes=state_bytes)
    slots = {"num_running_states": num_running, "num_checkpoints": num_checkpoints}
    memory = dataclasses.replace(MEMORY, shape=shape, **slots)
    named = memory.budget_for(num_tokens, chunk=chunk)
    assert memory.kv_capacity(budget_bytes=named, chunk=chunk) >= num_tokens
    per_block = memory.block_size * (shape.kv_bytes_per_token + copied)
    if state_bytes:  # a larger budget has more of them
        num_slots = int(STATE_SHARE * (named - memory.runtime_bytes - shape.weight_bytes)) // state_bytes
        memory = dataclasses.replace(memory, num_running_states=max(num_running, num_slots), num_checkpoints=0)
        assert memory.kv_capacity(budget_bytes=named, chunk=chunk) >= num_tokens
    else:
        assert memory.kv_capacity(budget_bytes=named - 2 * per_block, chunk=chunk) < num_tokens


@given(num_bytes=st.integers(1, 10**13))
def test_a_budget_is_written_as_it_is_read_and_rounded_up(num_bytes):
    read = parse_bytes(written_budget(num_bytes))
    assert num_bytes <= read <= num_bytes * 1.01 + 1_000_000
