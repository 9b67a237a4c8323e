"""Slots hold the experts that were used last, and a step that touches most experts reads whole layers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.expert_slots import ExpertSlots, Mixture, slot_places

LAYERS, EXPERTS = st.integers(0, 3), st.sets(st.integers(0, 7), min_size=1, max_size=3)


@given(st.integers(3, 12), st.lists(st.tuples(LAYERS, EXPERTS), max_size=60))
def test_what_is_held_are_the_experts_that_were_used_last(num_slots, steps):
    slots, used, lies_in = ExpertSlots(num_slots), [], {}
    for layer, experts in steps:
        expected = {expert for expert in experts if (layer, expert) not in used[-num_slots:]}
        found, missing = slots.take(layer, experts)
        assert set(missing) == expected
        assert set(found) == experts
        assert len(set(found.values())) == len(experts), "a slot each"
        assert all(0 <= slot < num_slots for slot in found.values())
        for expert in sorted(experts - expected) + sorted(expected):
            if (layer, expert) in used:
                used.remove((layer, expert))
            used.append((layer, expert))
            if expert not in expected:
                assert lies_in[found[expert]] == (layer, expert), "nothing else was read into its slot"
            lies_in[found[expert]] = (layer, expert)


def test_no_expert_of_a_step_pushes_out_another_one():
    slots = ExpertSlots(2)
    slots.take(0, [4, 5])
    assert slots.take(0, [5, 6])[1] == [6]
    assert slots.take(0, [5, 6])[1] == []
    with pytest.raises(AssertionError, match="reads whole layers"):
        slots.take(0, [1, 2, 3])


def test_what_could_not_be_read_is_read_again():
    slots = ExpertSlots(3)
    slots.take(1, [0])
    _, missing = slots.take(1, [0, 2])
    slots.drop(1, missing)
    assert slots.take(1, [0, 2])[1] == [2]
    assert slots.take(1, [0, 1, 2])[1] == [1], "its slot was not lost"


@given(st.integers(1, 8), st.integers(0, 8))
def test_slots_that_a_layer_was_read_over_are_forgotten_and_no_others(num_slots, end):
    slots = ExpertSlots(num_slots)
    before, _ = slots.take(0, range(num_slots))
    slots.drop_below(end)
    after, missing = slots.take(0, range(num_slots))
    assert set(missing) == {expert for expert, slot in before.items() if slot < end}
    assert sorted(after.values()) == list(range(num_slots))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.integers(1, 9))
def test_slots_lie_within_their_areas_and_side_by_side(edges, size):
    edges = sorted(edges)
    areas = list(pairwise(edges))[::2]
    places = slot_places(areas, size)
    assert all(any(first <= place and place + size <= end for first, end in areas) for place in places)
    assert all(later - earlier >= size for earlier, later in pairwise(places))
    assert len(places) == sum((end - first) // size for first, end in areas)


@pytest.mark.parametrize(("num_experts", "num_active", "most"), [(128, 8, 10), (8, 2, 2), (32, 4, 5), (256, 8, 21)])
def test_rows_read_their_experts_as_long_as_those_are_half_of_all(num_experts, num_active, most):
    mixture = Mixture(num_experts=num_experts, num_active=num_active, expert_bytes=(1,))
    assert [mixture.reads_chosen(rows, 10**6) for rows in (1, most, most + 1, 8192)] == [True, True, False, False]
    assert not mixture.reads_chosen(most, most * num_active - 1), "more than there are slots for"
