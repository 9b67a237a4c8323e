"""Slots for recurrent state as integers: one for each running sequence, and checkpoints beside them. No tensors."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable


class StatePool:
    """Running sequences always find a slot; checkpoints share the rest, the least recently used leave first.

    A checkpoint is known by the hash of the prefix after which the state was saved. A pinned one is not evicted.
    """

    def __init__(self, *, num_running: int, num_checkpoints: int) -> None:
        self.num_slots = num_running + num_checkpoints
        self.num_checkpoints = num_checkpoints
        self.high_water = 0  # slots ever touched: their memory stays resident
        self._free = list(range(self.num_slots))
        self._held: set[int] = set()
        self._slot_by_hash: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._num_pins: Counter[int] = Counter()
        self._spared_until: OrderedDict[bytes, float] = OrderedDict()  # the first to end comes first
        self._num_promised = 0  # slots handed out for checkpoints that are not saved yet

    def acquire(self) -> int:
        """Takes a slot for a running sequence."""
        assert self._free or self._evict(), "more sequences run than there are slots for"
        return self._take()

    def acquire_checkpoint(self) -> int | None:
        """Takes a slot for a state that is about to be saved; None when every checkpoint is pinned."""
        if len(self._slot_by_hash) + self._num_promised >= self.num_checkpoints and not self._evict():
            return None
        self._num_promised += 1
        return self._take()

    def release(self, slot: int) -> None:
        self._held.remove(slot)
        heapq.heappush(self._free, slot)

    def forgo(self, slot: int) -> None:
        """A slot from `acquire_checkpoint` that nothing will be saved in."""
        self._num_promised -= 1
        self.release(slot)

    def keep(self, prefix: bytes, slot: int) -> None:
        """The state after `prefix` now lies in `slot`. The first of two equal ones stays."""
        self._num_promised -= 1
        if prefix in self._slot_by_hash:
            self._slot_by_hash.move_to_end(prefix)
            self.release(slot)
        else:
            self._slot_by_hash[prefix] = slot

    def __contains__(self, prefix: bytes) -> bool:
        return prefix in self._slot_by_hash

    def pin(self, prefix: bytes) -> int:
        """The slot of a checkpoint that somebody will start from; it stays until `unpin`."""
        slot = self._slot_by_hash[prefix]
        self._slot_by_hash.move_to_end(prefix)
        self._num_pins[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        self._num_pins[slot] -= 1
        if not self._num_pins[slot]:
            del self._num_pins[slot]

    def spare(self, prefix: bytes, *, until: float) -> None:
        """Evicts others first until then, as long as half of the checkpoints are left to them."""
        self._spared_until.pop(prefix, None)
        self._spared_until[prefix] = until
        while len(self._spared_until) > self.num_checkpoints // 2:
            self._spared_until.popitem(last=False)

    def expire(self, now: float) -> None:
        while self._spared_until and next(iter(self._spared_until.values())) <= now:
            self._spared_until.popitem(last=False)

    def drop(self, prefix: bytes) -> None:
        """Forgets a checkpoint, unless somebody is about to start from it."""
        slot = self._slot_by_hash.get(prefix)
        if slot is not None and slot not in self._num_pins:
            del self._slot_by_hash[prefix]
            self._spared_until.pop(prefix, None)
            self.release(slot)

    def clear(self) -> None:
        while self._evict():
            pass

    @property
    def is_idle(self) -> bool:
        """Nothing is held but by checkpoints, and nobody starts from one."""
        return len(self._held) == len(self._slot_by_hash) and not self._num_promised and not +self._num_pins

    def check(self, held: Iterable[int], pinned: Iterable[int]) -> None:
        """Every slot is held once: by a running sequence, or by a checkpoint. `pinned` lists each pin."""
        owned = [*held, *self._slot_by_hash.values()]
        assert len(owned) + self._num_promised == len(self._held), "a slot is lost or held twice"
        assert set(owned) <= self._held, "a slot is used that is free"
        assert Counter(pinned) == self._num_pins, "a checkpoint is pinned more or less often than it is counted"
        assert sorted([*self._free, *self._held]) == list(range(self.num_slots)), "a slot is lost"
        assert self._spared_until.keys() <= self._slot_by_hash.keys(), "a checkpoint is spared that is gone"

    def _take(self) -> int:
        slot = heapq.heappop(self._free)
        self._held.add(slot)
        self.high_water = max(self.high_water, slot + 1)
        return slot

    def _evict(self) -> bool:
        prefixes = [prefix for prefix, slot in self._slot_by_hash.items() if slot not in self._num_pins]
        if not prefixes:
            return False
        self.drop(next((prefix for prefix in prefixes if prefix not in self._spared_until), prefixes[0]))
        return True
