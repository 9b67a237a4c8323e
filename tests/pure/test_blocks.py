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
        self.num_hashes = self.now = 0

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

    @precondition(lambda self: self.num_hashes)
    @rule(data=st.data(), for_s=st.integers(1, 5), most=st.integers(0, 10))
    def pin(self, data, for_s, most):
        numbers = data.draw(st.lists(st.integers(1, self.num_hashes), unique=True))
        known = [one for number in numbers if (one := chain_hash(b"", [number])) in self.cache]
        self.cache.pin(known, until=self.now + for_s, most=most)
        assert self.pool.num_pinned <= most

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds):
        self.now += seconds
        self.pool.expire(self.now)

    @rule()
    def wait_for_all_pins(self):
        self.wait(5)
        assert self.pool.num_pinned == 0

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


def pool_with(*prefixes):
    """A pool that is full of computed prefixes, and the blocks of each; nobody holds them."""
    pool = BlockPool(sum(prefixes))
    cache, found = PrefixCache(pool), []
    for number, num_blocks in enumerate(prefixes):
        found.append([pool.allocate(after=None) for _ in range(num_blocks)])
        for index, block in enumerate(found[-1]):
            cache.put(chain_hash(b"", [number, index]), block)
    for blocks in found:
        pool.release(blocks)
    return pool, *found


def taken(pool, num_blocks):
    """What is evicted when somebody takes so many."""
    evicted = []
    pool.on_evict = evicted.append
    for _ in range(num_blocks):
        assert pool.allocate(after=None) is not None
    return evicted


def test_pinned_blocks_are_evicted_after_all_others_and_their_leaves_first():
    pool, pinned, other = pool_with(4, 6)
    pool.pin(pinned, until=60.0, most=10)
    assert [pool.why_kept(block) for block in (pinned[0], other[0])] == ["pinned", "recent"]
    assert taken(pool, 6) == other[::-1]
    pool.expire(59.0)
    assert taken(pool, 4) == pinned[::-1], "nobody starves beside a pin"


def test_a_pin_ends_with_its_time_and_its_blocks_count_as_used_then():
    pool, pinned, other = pool_with(4, 6)
    pool.pin(pinned, until=60.0, most=10)
    pool.expire(60.0)
    assert (pool.num_pinned, pool.why_kept(pinned[0])) == (0, "recent")
    assert taken(pool, 1) == [*other[::-1], *pinned[::-1]]


def test_a_side_request_that_shares_a_pinned_prefix_leaves_it_pinned():
    pool, pinned, other = pool_with(4, 6)
    pool.pin(pinned, until=60.0, most=10)
    for block in pinned[:2]:
        pool.retain(block)
    assert pool.why_kept(pinned[0]) == "running"
    pool.release(pinned[:2])
    assert pool.why_kept(pinned[0]) == "pinned"
    assert taken(pool, 6) == other[::-1]


def test_the_budget_of_pins_keeps_the_newest_and_the_beginning_of_a_prefix():
    pool, first, second, third = pool_with(3, 3, 10)
    pool.pin(first, until=60.0, most=4)
    pool.pin(second, until=61.0, most=4)
    assert [pool.why_kept(block) for block in (*first, *second)] == ["pinned", *["recent"] * 2, *["pinned"] * 3]
    pool.pin(third, until=62.0, most=4)
    assert [pool.why_kept(block) for block in (*first, *second)] == ["recent"] * 6
    assert [pool.why_kept(block) for block in third] == ["pinned"] * 4 + ["recent"] * 6


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


def test_the_memory_of_free_blocks_is_taken_once_and_that_of_cached_ones_is_not():
    pool = BlockPool(8)
    first, second, third = (pool.allocate(after=after) for after in (None, 0, 1))
    pool.keep_content(first)
    pool.release([first, second])
    assert pool.high_water == 3
    (run,) = pool.take_untouched()
    assert (run[0] <= second < run[1], run[0] <= third < run[1], run[0] <= first < run[1]) == (True, False, False)
    assert (pool.high_water, pool.take_untouched()) == (2, [])
    assert pool.allocate(after=first) == second
    assert pool.high_water == 3, "it is touched again"
