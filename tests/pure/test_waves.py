from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.waves import Waves

WAVES = Waves(tile_tokens=128, num_heads=32, tiles_at_once=132)


@given(num_tokens=st.integers(1, 20_000))
def test_attention_takes_the_time_of_whole_waves(num_tokens):
    filled, one_wave = WAVES.tokens_filled(num_tokens), WAVES.tokens_filled(1)
    assert filled % one_wave == 0
    assert num_tokens <= filled < num_tokens + 128 + one_wave  # a tile and a wave are rounded up
    within = WAVES.tokens_within(num_tokens)
    assert num_tokens - 512 < within <= num_tokens
    assert within % 512 == 0
    assert [WAVES.tokens_filled(n) // one_wave for n in (1, 512, 513, 1024, 1025)] == [1, 1, 2, 2, 3]


@given(num_tokens=st.integers(1, 20_000), own_ratio=st.floats(1.0, 4.0))
def test_a_chunk_is_charged_for_the_faster_of_both_ways(num_tokens, own_ratio):
    waves = replace(WAVES, own_ratio=own_ratio)
    charged = waves.tokens_charged(num_tokens)
    assert num_tokens <= charged <= WAVES.tokens_filled(num_tokens)
    assert waves.are_filled_by(num_tokens) == (charged == WAVES.tokens_filled(num_tokens))
    assert waves.tokens_charged(num_tokens + 1) >= charged


def test_without_our_own_kernels_waves_read_every_chunk():
    assert WAVES.are_filled_by(1)
    assert not replace(WAVES, own_ratio=1.5).are_filled_by(300)
    assert replace(WAVES, own_ratio=1.5).are_filled_by(400)
