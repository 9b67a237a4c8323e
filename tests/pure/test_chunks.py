from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import PrefillPriority
from penstock.errors import InvalidSetting
from penstock.plan.chunks import (
    ChunkedPrefillConfig,
    Span,
    Stops,
    chunk_end,
    create_prefill_chunks,
    merge_spans,
    num_chunks,
)

spans = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 60)).map(lambda s: Span(start=s[0], end=s[0] + s[1])), max_size=6
)


def test_an_empty_prompt_has_no_chunks():
    assert create_prefill_chunks([], ChunkedPrefillConfig()) == []
    assert num_chunks(0, ChunkedPrefillConfig()) == 0


def test_overlap_adds_no_redundant_tail_chunk():
    config = ChunkedPrefillConfig(chunk_size=512, overlap=64)
    assert [(c.start_pos, c.end_pos) for c in create_prefill_chunks(range(512), config)] == [(0, 512)]
    assert [(c.start_pos, c.end_pos) for c in create_prefill_chunks(range(513), config)] == [(0, 512), (448, 513)]


def test_chunk_size_zero_reads_the_prompt_whole():
    (chunk,) = create_prefill_chunks(range(3000), ChunkedPrefillConfig(chunk_size=0))
    assert (chunk.start_pos, chunk.end_pos, chunk.is_last) == (0, 3000, True)


@given(st.integers(0, 300), st.integers(1, 64), st.integers(0, 63))
def test_chunks_cover_the_prompt_once_in_order(num_tokens, chunk_size, overlap):
    config = ChunkedPrefillConfig(chunk_size=chunk_size, overlap=min(overlap, chunk_size - 1))
    chunks = create_prefill_chunks(range(num_tokens), config)
    covered = 0
    for index, chunk in enumerate(chunks):
        assert chunk.chunk_index == index
        assert chunk.tokens == tuple(range(chunk.start_pos, chunk.end_pos))
        assert len(chunk.tokens) <= chunk_size
        assert chunk.start_pos == max(0, covered - config.overlap)
        assert chunk.end_pos > covered
        assert chunk.is_last == (index == len(chunks) - 1)
        covered = chunk.end_pos
    assert covered == num_tokens
    assert len(chunks) == num_chunks(num_tokens, config)


@given(st.integers(0, 199), st.integers(1, 100), spans, st.integers(1, 32))
def test_a_chunk_never_ends_inside_an_atomic_span(start, budget, given_spans, boundary):
    merged = merge_spans(given_spans)
    end = chunk_end(start, budget, Stops(end=260, boundary=boundary, atomic=merged))
    assert start < end.position <= 260
    assert not any(span.start < end.position < span.end for span in merged)
    if end.reason == "whole-span":
        assert any(span.start <= start < span.end and span.end == end.position for span in merged)
    else:
        assert end.position - start <= budget


@given(spans)
def test_merged_spans_are_disjoint_and_cover_the_same_tokens(given_spans):
    merged = merge_spans(given_spans)
    assert all(a.end <= b.start for a, b in pairwise(merged))
    covered = {p for s in given_spans for p in range(s.start, s.end)}
    assert covered == {p for s in merged for p in range(s.start, s.end)}


def test_transitively_overlapping_spans_become_one():
    merged = merge_spans([Span(start=0, end=5), Span(start=8, end=12), Span(start=4, end=9), Span(start=12, end=13)])
    assert merged == (Span(start=0, end=12), Span(start=12, end=13))


def test_a_boundary_is_preferred_but_never_stops_progress():
    assert chunk_end(0, 100, Stops(end=500, boundary=64)).position == 64
    assert chunk_end(64, 30, Stops(end=500, boundary=64)).position == 94
    assert chunk_end(480, 100, Stops(end=500, boundary=64)).reason == "end"
    assert chunk_end(0, 100, Stops(end=90, boundary=64)).position == 90
    assert chunk_end(0, 100, Stops(end=90, is_open=True, boundary=64)).position == 64
    assert chunk_end(64, 100, Stops(end=90, is_open=True, boundary=64)).position == 90


@pytest.mark.parametrize("values", [{"chunk_size": -1}, {"overlap": -1}, {"chunk_size": 8, "overlap": 8}])
def test_impossible_chunkings_are_refused(values):
    with pytest.raises(InvalidSetting):
        ChunkedPrefillConfig(**values)


def test_the_config_is_changed_by_copies():
    config = ChunkedPrefillConfig().with_overlap(32).with_priority(PrefillPriority.DECODE_PRIORITY)
    assert (config.chunk_size, config.overlap, config.priority) == (512, 32, PrefillPriority.DECODE_PRIORITY)
