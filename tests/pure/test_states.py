"""Slots of recurrent state: running sequences always find one, checkpoints give way in the order of their use."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.cache.states import StatePool

PREFIXES = [bytes([index]) for index in range(6)]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = StatePool(num_running=3, num_checkpoints=2)
        self.running, self.pinned, self.promised = [], [], []

    @precondition(lambda self: len(self.running) < 3)
    @rule()
    def run(self):
        self.running.append(self.pool.acquire())

    @precondition(lambda self: self.running)
    @rule()
    def end(self):
        self.pool.release(self.running.pop())

    @rule()
    def promise(self):
        slot = self.pool.acquire_checkpoint()
        assert slot is not None or len(self.pinned) + len(self.promised) >= 2
        self.promised += [] if slot is None else [slot]

    @precondition(lambda self: self.promised)
    @rule(prefix=st.sampled_from(PREFIXES), is_saved=st.booleans())
    def save(self, prefix, is_saved):
        if is_saved:
            self.pool.keep(prefix, self.promised.pop())
            assert prefix in self.pool
        else:
            self.pool.forgo(self.promised.pop())

    @rule(prefix=st.sampled_from(PREFIXES))
    def pin(self, prefix):
        if prefix in self.pool:
            self.pinned.append(self.pool.pin(prefix))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self):
        self.pool.unpin(self.pinned.pop())

    @rule(prefix=st.sampled_from(PREFIXES), until=st.integers(1, 3))
    def spare(self, prefix, until):
        if prefix in self.pool:
            self.pool.spare(prefix, until=until)

    @rule(now=st.integers(1, 3))
    def expire(self, now):
        self.pool.expire(now)

    @rule(prefix=st.sampled_from(PREFIXES))
    def drop(self, prefix):
        self.pool.drop(prefix)

    @invariant()
    def every_slot_is_held_once(self):
        self.pool.check(self.running, self.pinned)
        assert self.pool.is_idle == (not self.running and not self.pinned and not self.promised)
        assert self.pool.high_water <= self.pool.num_slots


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def saved(pool, *prefixes):
    for prefix in prefixes:
        pool.keep(prefix, pool.acquire_checkpoint())


def test_the_least_recently_used_checkpoint_leaves_first():
    pool = StatePool(num_running=1, num_checkpoints=2)
    saved(pool, b"a", b"b")
    pool.unpin(pool.pin(b"a"))
    saved(pool, b"c")
    assert (b"a" in pool, b"b" in pool, b"c" in pool) == (True, False, True)


def test_a_pinned_checkpoint_stays_and_where_all_are_there_is_no_room_for_another():
    pool = StatePool(num_running=1, num_checkpoints=1)
    saved(pool, b"a")
    slot = pool.pin(b"a")
    pool.drop(b"a")
    pool.clear()
    assert b"a" in pool
    assert pool.acquire_checkpoint() is None
    pool.unpin(slot)
    pool.clear()
    assert b"a" not in pool
    assert pool.is_idle


def test_the_first_of_two_equal_checkpoints_stays():
    pool = StatePool(num_running=0, num_checkpoints=2)
    saved(pool, b"a")
    first = pool.pin(b"a")
    pool.unpin(first)
    saved(pool, b"a")
    assert pool.pin(b"a") == first
    pool.check([], [first])


def test_a_lost_slot_is_noticed():
    pool = StatePool(num_running=1, num_checkpoints=0)
    pool.acquire()
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check([], [])


def test_a_spared_checkpoint_leaves_after_the_others_until_its_time_is_over():
    pool = StatePool(num_running=1, num_checkpoints=4)
    saved(pool, b"a", b"b", b"c", b"d")
    pool.spare(b"a", until=60.0)
    saved(pool, b"e")
    assert (b"a" in pool, b"b" in pool) == (True, False)
    pool.expire(60.0)
    saved(pool, b"f")
    assert (b"a" in pool, b"c" in pool) == (False, True)


def test_half_of_the_checkpoints_are_never_spared():
    pool = StatePool(num_running=1, num_checkpoints=4)
    saved(pool, b"a", b"b", b"c", b"d")
    for prefix in (b"a", b"b", b"c", b"d"):
        pool.spare(prefix, until=60.0)
    saved(pool, b"e", b"f")
    assert [prefix in pool for prefix in (b"a", b"b", b"c", b"d")] == [False, False, True, True]
