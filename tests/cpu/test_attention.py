"""Attention over pages against plain attention over a whole sequence, for every way a sequence can lie in pages."""

import itertools

import pytest
import torch
from paged_attention import BLOCK, paged
from unlike_heads import attended_and_expected

from penstock.attention.backend import AttentionRule
from penstock.attention.cpu import QUERY_ROWS, CpuAttention, contiguous_runs, segments
from penstock.request import Span

RULES = {
    "causal": AttentionRule(scale=0.3),
    "window 5": AttentionRule(scale=0.3, window=5),
    "window 40": AttentionRule(scale=0.3, window=40),
    "window 700": AttentionRule(scale=0.3, window=700),
    "softcap": AttentionRule(scale=0.3, softcap=2.0),
    "softcap, window 33": AttentionRule(scale=0.3, softcap=2.0, window=33),
}


@pytest.mark.parametrize("has_flash", [True, False])
@pytest.mark.parametrize("layout", ["one run", "scattered", "short runs"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_paged_attention_equals_plain_attention(rule, layout, has_flash):
    chunks = [(0, 1), (0, 37), (99, 100), (64, 128), (70, 75), (300, 361)]
    attended, expected = paged(chunks, rule, layout, has_flash=has_flash)
    assert (attended - expected).abs().max() < 2e-5


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_chunks_of_several_query_tiles(rule):
    attended, expected = paged([(100, 100 + 2 * QUERY_ROWS + 77)], rule, "one run")
    assert (attended - expected).abs().max() < 2e-5


@pytest.mark.parametrize("has_flash", [True, False])
@pytest.mark.parametrize("layout", ["one run", "scattered", "short runs"])
@pytest.mark.parametrize("name", ["causal", "window 5", "window 40", "window 700"])
def test_images_see_themselves(name, layout, has_flash):
    """Of five chunks: two images, none, one that began earlier, one whose last row is left, and one of many tiles."""
    num_long = 2 * QUERY_ROWS if layout == "one run" else QUERY_ROWS // 4
    chunks = [(0, 60), (99, 100), (40, 70), (49, 50), (16, 20 + num_long)]
    spans = (
        (Span(start=3, end=20), Span(start=30, end=59)),
        (),
        (Span(start=33, end=50),),
        (Span(start=33, end=50),),
        (Span(start=18, end=19 + num_long),),
    )
    attended, expected = paged(chunks, RULES[name], layout, spans=spans, has_flash=has_flash)
    assert (attended - expected).abs().max() < 2e-5


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 8), (9, 3, 64), (8, 1, 80), (6, 6, 24), (4, 2, 256)])
def test_head_shapes(heads, kv_heads, size):
    attended, expected = paged([(0, 50), (33, 34), (20, 41)], RULES["causal"], "short runs", heads, kv_heads, size)
    assert (attended - expected).abs().max() < 2e-5


def test_bfloat16_stays_close():
    attended, expected = paged([(0, 200), (300, 301), (100, 230)], RULES["window 40"], "one run", dtype=torch.bfloat16)
    assert (attended - expected).abs().max() < 0.05


@pytest.mark.parametrize(
    ("start", "end", "window"), list(itertools.product((0, 1, 5, 30), (1, 2, 9, 33), (None, 1, 2, 4, 8, 16, 64)))
)
def test_segments_hold_every_visible_key_once_and_unmasked_ones_are_visible_to_all(start, end, window):
    end += start
    found = list(segments(start, end, window))
    covered = [key for segment in found for key in range(segment.start, segment.end)]
    assert covered == sorted(set(covered))
    for query in range(start, end):
        visible = set(range(0 if window is None else max(0, query - window + 1), query + 1))
        assert visible <= set(covered)
        for segment in found:
            if not segment.is_masked:
                assert set(range(segment.start, segment.end)) <= visible


def test_neighbouring_blocks_join_into_one_run():
    runs = contiguous_runs((4, 5, 6, 9, 10, 2), BLOCK, 6 * BLOCK - 3)
    assert [(run.start, run.end, run.slot) for run in runs] == [(0, 48, 64), (48, 80, 144), (80, 93, 32)]


@pytest.mark.parametrize(
    "rule", [AttentionRule(scale=0.3), AttentionRule(scale=0.3, window=5)], ids=["causal", "window"]
)
def test_a_sink_takes_its_share_and_gives_nothing(rule):
    sinks = torch.tensor([0.0, 3.0, -2.0, 1.0])
    found, expected = paged([(0, 37), (99, 100), (64, 90)], rule, "scattered", sinks=sinks)
    assert (found - expected).abs().max() < 2e-5
    without, _ = paged([(0, 37), (99, 100), (64, 90)], rule, "scattered")
    assert (found.abs() < without.abs()).all()


def test_layers_have_heads_of_their_own_or_attend_to_what_an_earlier_one_has_stored():
    found, expected = attended_and_expected(lambda storage, block, heads: CpuAttention(storage, block))
    for of_layer, expected_of_layer in zip(found, expected, strict=True):
        for one, other in zip(of_layer, expected_of_layer, strict=True):
            assert (one - other).abs().max() < 2e-5
