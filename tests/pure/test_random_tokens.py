from hypothesis import given
from hypothesis import strategies as st

from penstock.prompt.random_tokens import random_tokens


@given(st.integers(0, 200), st.integers(), st.integers(2, 50), st.integers(0, 1))
def test_tokens_lie_between_the_bounds_and_follow_from_the_seed(length, seed, end, first):
    tokens = random_tokens(length, seed, end=end, first=first)
    assert len(tokens) == length
    assert all(first <= token < end for token in tokens)
    assert tokens == random_tokens(length, seed, end=end, first=first)


@given(st.integers(0, 9))
def test_a_token_that_must_not_come_does_not(never):
    assert never not in random_tokens(300, 1, end=10, never=never)


def test_other_seeds_give_other_tokens():
    assert random_tokens(50, "one", end=1000) != random_tokens(50, "two", end=1000)
