"""Blocks of the KV cache as integers: who holds them, which are free, which may be evicted. No tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from penstock.request import HitReason

EVICTION_BATCH = 64  # freeing several at once lets neighbours join into one run


class BlockPool:
    """Hands out blocks in contiguous runs, counts their holders, and keeps unheld cached blocks until they are needed.

    A block is free, held (count >= 1), or cached (count 0, its content still reusable). Pinned ones are evicted last.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None] | None = None) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self.high_water = 0  # blocks ever touched: their memory stays resident
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._cached_pinned: OrderedDict[int, None] = OrderedDict()  # the same of pinned ones
        self._pinned_until: OrderedDict[int, float] = OrderedDict()  # held or cached; the first to end comes first
        self._keeps_content: set[int] = set()
        self._free_end_by_start: dict[int, int] = {0: num_blocks}
        self._free_start_by_end: dict[int, int] = {num_blocks: 0}
        self._num_free = num_blocks
        self._touched = bytearray(num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can get: free ones and cached ones."""
        return self._num_free + self.num_cached

    @property
    def num_held(self) -> int:
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._cached_pinned)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned_until)

    def holders(self, block: int) -> int:
        return self._holders.get(block, 0)

    def allocate(self, *, after: int | None, room: int = 1) -> int | None:
        """One block, directly behind `after` where possible; None when every block is held.

        `room`: blocks that the holder may need in all from here on. A new run begins where that many are free.
        """
        if self._num_free == 0 and not self._evict():
            return None
        block = after + 1 if after is not None and after + 1 in self._free_end_by_start else self._run_start(room)
        self._take_free(block)
        self._holders[block] = 1
        if not self._touched[block]:
            self._touched[block] = 1
            self.high_water += 1
        return block

    def retain(self, block: int) -> None:
        """One more holder; a cached block becomes held again."""
        self._cached.pop(block, None)
        self._cached_pinned.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def keep_content(self, block: int) -> None:
        """The block's content can be reused: when its last holder leaves it becomes cached, not free."""
        assert block in self._holders
        self._keeps_content.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each. The last of a prefix is given first, so that leaves are evicted first."""
        for block in reversed(list(blocks)):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._keeps_content:
                (self._cached_pinned if block in self._pinned_until else self._cached)[block] = None
            else:
                self._give_free(block)

    def why_kept(self, block: int) -> HitReason:
        """Tells why the content of a held or cached block is still there."""
        if block in self._holders:
            return "running"
        return "pinned" if block in self._pinned_until else "recent"

    def pin(self, blocks: Sequence[int], *, until: float, most: int) -> None:
        """Spares a prefix until then, as long as others find enough without it.

        At most that many blocks are pinned in all: the beginning of a prefix, and of the others those that came last.
        """
        for block in reversed(blocks[:most]):  # leaves first, as they are evicted
            assert block in self._keeps_content
            self._pinned_until.pop(block, None)
            self._pinned_until[block] = until
            if block in self._cached or block in self._cached_pinned:
                self._cached.pop(block, None)
                self._cached_pinned[block] = None
                self._cached_pinned.move_to_end(block)
        while len(self._pinned_until) > most:
            self._unpin(next(iter(self._pinned_until)))

    def expire(self, now: float) -> None:
        """Ends the pins whose time is over; their blocks count as used just now."""
        while self._pinned_until and next(iter(self._pinned_until.values())) <= now:
            self._unpin(next(iter(self._pinned_until)))

    def _unpin(self, block: int) -> None:
        del self._pinned_until[block]
        if block in self._cached_pinned:
            del self._cached_pinned[block]
            self._cached[block] = None

    def drop_cached(self) -> None:
        while self._evict():
            pass

    def take_untouched(self) -> list[tuple[int, int]]:
        """Lists the runs (first, end) of free blocks that were touched; whoever takes them gives their memory back."""
        runs = [(start, end) for start, end in self._free_end_by_start.items() if any(self._touched[start:end])]
        for start, end in runs:
            self._touched[start:end] = bytes(end - start)
        self.high_water = sum(self._touched)
        return runs

    def check(self, held: Iterable[int]) -> None:
        """Every block is owned exactly as often as it is counted, and none is lost. `held` lists each holding."""
        counts = Counter(held)
        assert counts == Counter(self._holders), "a block is held more or less often than it is counted"
        free = [block for start, end in self._free_end_by_start.items() for block in range(start, end)]
        cached = [*self._cached, *self._cached_pinned]
        owned = [*free, *self._holders, *cached]
        assert sorted(owned) == list(range(self.num_blocks)), "a block is lost or owned twice"
        assert len(free) == self._num_free
        assert self._keeps_content <= set(self._holders) | set(cached)
        assert set(self._cached_pinned) <= set(self._pinned_until) <= self._keeps_content, "a pin is lost"
        assert not set(self._cached) & set(self._pinned_until), "a pinned block is not spared"

    def _evict(self) -> bool:
        num_evicted = 0
        cached = self._cached or self._cached_pinned
        while cached and num_evicted < EVICTION_BATCH:
            block, _ = cached.popitem(last=False)
            self._pinned_until.pop(block, None)
            self._keeps_content.discard(block)
            if self.on_evict is not None:
                self.on_evict(block)
            self._give_free(block)
            num_evicted += 1
        return num_evicted > 0

    def _run_start(self, room: int) -> int:
        """So that `room` blocks fill the end of the smallest free run that has them: the longest stays whole.

        Where none has, the start of the longest, or its middle when a neighbour may still want to grow into it.
        """
        fitting = [run for run in self._free_end_by_start.items() if run[1] - run[0] >= room]
        if fitting and room > 1:
            return min(fitting, key=lambda run: (run[1] - run[0], run[0]))[1] - room
        start, end = max(self._free_end_by_start.items(), key=lambda run: (run[1] - run[0], -run[0]))
        return start + (end - start) // 2 if start - 1 in self._holders else start

    def _take_free(self, block: int) -> None:
        if block in self._free_end_by_start:
            start, end = block, self._free_end_by_start.pop(block)
        else:
            start, end = next((s, e) for s, e in self._free_end_by_start.items() if s <= block < e)
            del self._free_end_by_start[start]
        del self._free_start_by_end[end]
        for left, right in ((start, block), (block + 1, end)):
            if left < right:
                self._free_end_by_start[left] = right
                self._free_start_by_end[right] = left
        self._num_free -= 1

    def _give_free(self, block: int) -> None:
        start = self._free_start_by_end.pop(block, block)
        end = self._free_end_by_start.pop(block + 1, block + 1)
        if start != block:
            del self._free_end_by_start[start]
        if end != block + 1:
            del self._free_start_by_end[end]
        self._free_end_by_start[start] = end
        self._free_start_by_end[end] = start
        self._num_free += 1
