"""The index of what outlives the pool: which slabs lie on disk or are on their way, and which are in use. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.cache.slabs import Slab, SlabLayout

# A slab that saves this many seconds for each MiB is kept as if it had been used a second later, and so on.
LONGEST_BONUS_S = 30 * 86_400.0
BONUS_S = 3_600.0
DEPTH_S = 1e-5  # by which each slab of a prefix counts as used before the one ahead of it
FIRST_BYTES_PER_S = 0.5e9  # of a disk that nothing was read from yet
LOAD_S = 5e-4  # what a load takes besides its bytes
SPEED_BELIEVED = 0.2
LONG_ENOUGH_BYTES = 4096


def keep_rank(used_at: float, *, saved_s: float, num_bytes: int, depth: int) -> float:
    """Orders what is kept: the least goes first. By last use, later by what it saves against its bytes.

    `depth`: slabs before it in its prefix, which are of no less use than it is; what comes later goes first.
    """
    bonus_s = min(LONGEST_BONUS_S, BONUS_S * saved_s / max(num_bytes / 2**20, 1e-6))
    return used_at + bonus_s - DEPTH_S * depth


@dataclass(slots=True)
class Tiers:
    """Says what can be found, what is worth storing and loading; counts pins. Files are another's business."""

    layout: SlabLayout
    name_of: Callable[[Slab], str]
    bytes_per_s: float = FIRST_BYTES_PER_S  # as measured while loading
    _on_disk: set[str] = field(default_factory=set)
    _on_the_way: set[str] = field(default_factory=set)
    _num_pins: Counter[str] = field(default_factory=Counter)
    pinned: frozenset[str] = frozenset()  # made anew with each change, so that a writing thread may read it

    def __len__(self) -> int:
        return len(self._on_disk)

    def lie_on_disk(self, names: Iterable[str]) -> None:
        """Takes what a look at the folder found, in place of what was known."""
        self._on_disk = set(names)

    def finds(self, slab: Slab) -> bool:
        return self.name_of(slab) in self._on_disk

    def lacks(self, slab: Slab) -> bool:
        """Tells whether a slab is neither stored nor about to be."""
        name = self.name_of(slab)
        return name not in self._on_disk and name not in self._on_the_way

    def begin_store(self, slab: Slab) -> None:
        assert self.lacks(slab), "a slab is stored twice"
        self._on_the_way.add(self.name_of(slab))

    def end_store(self, slab: Slab, *, is_stored: bool) -> None:
        name = self.name_of(slab)
        self._on_the_way.remove(name)
        if is_stored:
            self._on_disk.add(name)

    def pin(self, slabs: Iterable[Slab]) -> None:
        """What a plan will load is not collected before."""
        for slab in slabs:
            self._num_pins[self.name_of(slab)] += 1
        self.pinned = frozenset(self._num_pins)

    def end_load(self, slab: Slab, *, is_loaded: bool, elapsed_s: float = 0.0) -> None:
        name = self.name_of(slab)
        self._num_pins[name] -= 1
        assert self._num_pins[name] >= 0, "a slab is unpinned more often than it was pinned"
        if not self._num_pins[name]:
            del self._num_pins[name]
        self.pinned = frozenset(self._num_pins)
        if not is_loaded:
            self._on_disk.discard(name)
        elif elapsed_s > 0 and (num_bytes := self.layout.file_bytes(slab)) >= LONG_ENOUGH_BYTES:
            self.bytes_per_s += SPEED_BELIEVED * (num_bytes / elapsed_s - self.bytes_per_s)

    def load_s(self, slabs: Sequence[Slab]) -> float:
        return LOAD_S + sum(self.layout.file_bytes(slab) for slab in slabs) / self.bytes_per_s

    def worth_loading(self, slabs: Sequence[Slab], read_s: float | None) -> bool:
        """Whether loading is predicted to take less time than reading; None: nothing was read yet to tell from."""
        return bool(slabs) and (read_s is None or self.load_s(slabs) < read_s)

    def check(self, pinned: Iterable[Slab], storing: Iterable[Slab]) -> None:
        """Every pin and every store on its way has its owner."""
        assert Counter(self.name_of(slab) for slab in pinned) == self._num_pins, "a pin is lost or nobody's"
        names = [self.name_of(slab) for slab in storing]
        assert sorted(names) == sorted(self._on_the_way), "a store is lost or nobody's"
