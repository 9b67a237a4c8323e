import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trace.percentile import percentile


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_it_is_the_smallest_value_that_enough_of_them_do_not_exceed(values, share):
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    smaller = [value for value in values if value < found]
    assert not smaller or len(smaller) < share * len(values)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.99, 4), (0.25, 1), (1.0, 4)])
def test_a_few_of_four(share, expected):
    assert percentile([4, 1, 3, 2], share) == expected


def test_nothing_has_none():
    assert percentile([], 0.5) == 0.0
