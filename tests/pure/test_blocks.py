from itertools import pairwise

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache, chain_hash, root_hash


class PoolMachine(RuleBasedStateMachine):
    """Owners come, grow, share and leave in any order; the pool always knows who holds what."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(24)
        self.cache = PrefixCache(self.pool)
        self.owners: list[list[int]] = []
        self.num_hashes = 0

    @rule()
    def come(self):
        self.owners.append([])

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), num_blocks=st.integers(1, 6), room=st.integers(1, 30))
    def grow(self, data, num_blocks, room):
        owner = data.draw(st.sampled_from(self.owners))
        for _ in range(num_blocks):
            available = self.pool.num_available
            block = self.pool.allocate(after=owner[-1] if owner else None, room=room)
            assert (block is None) == (available == 0)
            if block is not None:
                owner.append(block)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def remember(self, data):
        owner = data.draw(st.sampled_from([o for o in self.owners if o]))
        self.num_hashes += 1
        self.cache.put(chain_hash(b"", [self.num_hashes]), data.draw(st.sampled_from(owner)))

    @precondition(lambda self: self.owners and self.num_hashes)
    @rule(data=st.data())
    def share(self, data):
        number = data.draw(st.integers(1, self.num_hashes))
        block = self.cache.take(chain_hash(b"", [number]))
        if block is not None:
            data.draw(st.sampled_from(self.owners)).append(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data):
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(owner)

    @rule()
    def clear(self):
        self.cache.clear()
        assert self.pool.num_cached == 0

    @invariant()
    def every_block_is_owned_as_often_as_it_is_counted(self):
        self.pool.check(block for owner in self.owners for block in owner)


TestPool = PoolMachine.TestCase


def test_a_sequence_that_grows_alone_lies_in_one_run():
    pool = BlockPool(100)
    blocks = []
    for _ in range(100):
        blocks.append(pool.allocate(after=blocks[-1] if blocks else None))
    assert blocks == list(range(100))
    assert pool.allocate(after=99) is None


def test_many_that_say_how_much_they_need_leave_a_long_run_for_the_next():
    pool = BlockPool(1000)
    many = [[pool.allocate(after=None, room=10)] for _ in range(32)]
    long = [pool.allocate(after=None, room=600)]
    for number in range(1, 600):  # the long one is read while the others grow
        long.append(pool.allocate(after=long[-1], room=600 - number))
        for blocks in many if number % 60 == 0 else ():
            blocks.append(pool.allocate(after=blocks[-1], room=10 - len(blocks)))
    for blocks in (long, *many):
        assert all(later == block + 1 for block, later in pairwise(blocks))
    assert [len(blocks) for blocks in many] == [10] * 32


def test_two_that_grow_together_do_not_fragment_each_other():
    pool = BlockPool(100)
    one, two = [pool.allocate(after=None)], [pool.allocate(after=None)]
    for _ in range(30):
        one.append(pool.allocate(after=one[-1]))
        two.append(pool.allocate(after=two[-1]))
    assert all(b - a == 1 for run in (one, two) for a, b in pairwise(run))


def test_leaves_are_evicted_before_the_roots_of_a_prefix():
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    blocks = [pool.allocate(after=None) for _ in range(4)]
    hashes = [root_hash("model", "default")]
    for block in blocks:
        hashes.append(chain_hash(hashes[-1], [block]))
        cache.put(hashes[-1], block)
    evicted = []
    forget = pool.on_evict
    pool.on_evict = lambda block: (evicted.append(block), forget(block))
    pool.release(blocks)
    pool.drop_cached()
    assert evicted == blocks[::-1]


def test_evicted_blocks_join_into_runs_again():
    pool = BlockPool(32)
    cache = PrefixCache(pool)
    blocks = [pool.allocate(after=None) for _ in range(32)]
    for block in blocks:
        cache.put(chain_hash(b"x", [block]), block)
    pool.release(blocks)
    again = []
    for _ in range(32):
        again.append(pool.allocate(after=again[-1] if again else None))
    assert again == list(range(32))


def test_equal_tokens_of_another_model_rotary_or_scope_hash_differently():
    roots = {root_hash("a", "default"), root_hash("b", "default"), root_hash("a", "long")}
    roots |= {root_hash("a", "default", "one"), root_hash("a", "default", "other"), root_hash("a", "long", "one")}
    assert len({chain_hash(root, [1, 2, 3]) for root in roots}) == 6
