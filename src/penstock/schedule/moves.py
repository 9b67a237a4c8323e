"""What goes to the cache folder and comes back while steps compute: orders, moves under way, what their ends change."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.cache.states import StatePool
from penstock.cache.tiers import Tiers, keep_rank
from penstock.request import Move, Moved, Sequence, Slab
from penstock.schedule.budget import StepCost, StepLoad

MOST_STORED_BYTES = 64 << 20  # that are on their way to the disk beside steps
FREE_SHARE = 8  # of the blocks that others could have: nothing more is stored where less than that part is left
LEFT_SHARE = 64  # of the blocks: a load leaves that part to the next tokens of others
STATE_TOKENS = 4096  # recurrent states that are stored lie this far apart, but for those where prompts part or end
LONGEST_WAIT_S, LATE = 10.0, 10.0  # a load that takes so many times its predicted time, and this long, is given up
FIRST_OBSERVATIONS = 3  # steps before which nothing is known of what reading takes


@dataclass(slots=True)
class DiskUse:
    """Counts what was moved, and what that saved."""

    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0  # what reading the loaded tokens is predicted to take, less the loads
    stored_tokens: int = 0
    stored_bytes: int = 0
    num_misses: int = 0  # slabs that the folder lists and that could not be proven, or were gone


@dataclass(slots=True, kw_only=True)
class Moves:
    """Holds the blocks and state slots of slabs under way; sequences hold none of them.

    What was loaded is put into the prefix cache, where whoever waited for it finds it as any other hit.
    """

    tiers: Tiers
    pool: BlockPool
    prefix: PrefixCache
    states: StatePool | None
    hash_before: Callable[[Sequence, int], bytes]  # the chain's hash before that block of a sequence
    cost: StepCost  # of steps as they are observed
    num_observed: int = 0
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    use: DiskUse = field(default_factory=DiskUse)
    _orders: deque[tuple[Slab, tuple[bytes, ...]]] = field(default_factory=deque)
    _planned: list[Move] = field(default_factory=list)  # that the next plan begins
    _stores: dict[bytes, Move] = field(default_factory=dict)
    _loads: dict[bytes, tuple[Move, tuple[bytes, ...]]] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        return self.tiers.layout.block_size

    @property
    def blocks_per_slab(self) -> int:
        return self.tiers.layout.blocks_per_slab

    @property
    def are_under_way(self) -> bool:
        return bool(self._stores or self._loads)

    @property
    def are_ordered(self) -> bool:
        return bool(self._orders or self._planned)

    def held_blocks(self) -> Iterator[int]:
        for move in self._under_way():
            yield from move.block_ids

    def pinned_states(self) -> list[int]:
        return [move.state_slot for move in self._stores.values() if move.state_slot is not None]

    def check(self) -> None:
        self.tiers.check([move.slab for move, _ in self._loads.values()], [move.slab for move in self._stores.values()])

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        self.cost.observe(load, elapsed_s)
        self.num_observed += 1

    def read_s(self, start: int, end: int) -> float | None:
        """Predicts what reading these tokens of a prompt takes; None: nothing was read yet to tell from."""
        if self.num_observed < FIRST_OBSERVATIONS:
            return None
        return self.cost.predict(StepLoad().with_chunk(start, end - start))

    def slab(self, sequence: Sequence, first: int, end: int, *, has_state: bool = False) -> Slab:
        """Names the slab of blocks [first, end) of a sequence."""
        start, stop = first * self.block_size, end * self.block_size
        return Slab(
            key=self.hash_before(sequence, end),
            previous=self.hash_before(sequence, first),
            first=start,
            tokens=tuple(sequence.tokens[start:stop]),
            has_state=has_state,
        )

    # --- to the disk ---

    def order_stores(self, sequence: Sequence, first: int, end: int) -> None:
        """Orders the slabs of a sequence that are whole now and were not with its first `first` blocks."""
        size = self.blocks_per_slab
        for index in range(first // size, end // size):
            self._order(sequence, self.slab(sequence, index * size, (index + 1) * size))

    def last_fork(self, sequence: Sequence) -> tuple[int, ...]:
        """Tells where a state is saved last before a prompt's end, so that the same prompt again finds it."""
        last = (sequence.num_prompt_tokens - 1) // self.block_size * self.block_size
        return (last,) if sequence.prompt_is_complete and last else ()

    def order_state(self, sequence: Sequence, end: int) -> None:
        """Orders the state that was just saved, where others will go on from it or the last one is far away."""
        is_fork = end in sequence.forks or end in self.last_fork(sequence)
        if is_fork or end - sequence.stored_state >= STATE_TOKENS:
            self._order_state(sequence, end)

    def order_last_state(self, sequence: Sequence) -> None:
        """Orders the last state that was saved of a request that ends: a conversation goes on from it."""
        if self.states is not None and (end := sequence.last_checkpoint) > sequence.stored_state:
            self._order_state(sequence, end)

    def _order_state(self, sequence: Sequence, end: int) -> None:
        sequence.stored_state, last = end, end // self.block_size
        first = (last - 1) // self.blocks_per_slab * self.blocks_per_slab
        self._order(sequence, self.slab(sequence, first, last, has_state=True))

    def _order(self, sequence: Sequence, slab: Slab) -> None:
        if self.tiers.lacks(slab) and self._is_worth_storing(slab):
            first, end = slab.first // self.block_size, slab.end // self.block_size
            self._orders.append((slab, tuple(self.hash_before(sequence, index + 1) for index in range(first, end))))

    def _is_worth_storing(self, slab: Slab) -> bool:
        """Whether the whole prefix is read again in more time than it is loaded in."""
        read_s = self.read_s(0, slab.end)
        num_bytes = self.tiers.layout.file_bytes(slab) * slab.end / len(slab.tokens)
        return read_s is None or num_bytes / self.tiers.bytes_per_s < read_s

    def plan_stores(self, *, is_idle: bool) -> None:
        """Begins what was ordered with the next plan; what has left its blocks by now had to make room for others."""
        while self._orders and (is_idle or self._has_room()):
            slab, hashes = self._orders.popleft()
            if self.tiers.lacks(slab) and (move := self._store(slab, hashes)) is not None:
                self._planned.append(move)

    def take_planned(self) -> tuple[Move, ...]:
        planned, self._planned = self._planned, []
        return tuple(planned)

    def _has_room(self) -> bool:
        num_bytes = sum(self.tiers.layout.file_bytes(move.slab) for move in self._stores.values())
        return num_bytes < MOST_STORED_BYTES and self.pool.num_available * FREE_SHARE > self.pool.num_blocks

    def _store(self, slab: Slab, hashes: tuple[bytes, ...]) -> Move | None:
        if slab.has_state and (self.states is None or slab.key not in self.states):
            return None
        blocks: list[int] = []
        for block_hash in hashes:
            if (block := self.prefix.take(block_hash)) is None:
                self.pool.release(blocks)
                return None
            blocks.append(block)
        self.tiers.begin_store(slab)
        state_slot = self.states.pin(slab.key) if slab.has_state and self.states is not None else None
        move = Move(kind="store", slab=slab, block_ids=tuple(blocks), state_slot=state_slot, rank=self._rank(slab))
        self._stores[slab.name_key] = move
        return move

    def _rank(self, slab: Slab) -> float:
        return keep_rank(
            self.wall_clock(),
            saved_s=self.read_s(slab.first, slab.end) or 0.0,
            num_bytes=self.tiers.layout.file_bytes(slab),
            depth=slab.first // self.tiers.layout.slab_tokens,
        )

    # --- from the disk ---

    def awaits(self, sequence: Sequence) -> bool:
        """Whether slabs are read for it. One that a load keeps waiting for too long goes on without it."""
        if not sequence.awaited:
            return False
        if self.clock() < sequence.awaited_until and any(key in self._loads for key in sequence.awaited):
            return True
        sequence.awaited = frozenset()
        return False

    def findable(self, sequence: Sequence, first: int) -> Iterator[Slab]:
        """Finds the slabs on disk, or on their way from it, that go on behind the sequence's first blocks."""
        size = self.blocks_per_slab
        # At least one known token is computed.
        for index in range(first // size, (sequence.num_known - 1) // self.block_size // size):
            slab = self.slab(sequence, index * size, (index + 1) * size)
            if not self._can_be_had(slab):
                return
            yield slab

    def _can_be_had(self, slab: Slab) -> bool:
        return self.tiers.finds(slab) or slab.name_key in self._loads

    def seek(self, sequence: Sequence, room: int) -> None:
        """Loads what lies on disk behind the sequence's blocks, where that takes less time than reading it.

        `room`: blocks that it may still need in all.
        """
        first = len(sequence.block_ids)
        start = first * self.block_size
        is_on_border = sequence.num_computed == sequence.num_scheduled == start
        if is_on_border and start >= sequence.sought.stop:
            self._load(sequence, start, list(self.findable(sequence, first)), room)

    def seek_state(self, sequence: Sequence, num_usable: int, room: int) -> None:
        """Does so for a model with recurrent state: as far as a state lies there, past the blocks that can be used."""
        if not sequence.sought and (slabs := self._up_to_state(sequence, num_usable)):
            self._load(sequence, num_usable * self.block_size, slabs, room, is_all_needed=True)

    def _up_to_state(self, sequence: Sequence, num_usable: int) -> list[Slab]:
        """Finds the slabs from the first to the last one with a state, past so many blocks."""
        size = self.blocks_per_slab
        chain = list(self.findable(sequence, 0))
        most = min((sequence.num_known - 1) // self.block_size, len(chain) * size + size)
        for end in range(most, num_usable, -1):
            slab = self.slab(sequence, (end - 1) // size * size, end, has_state=True)
            if self._can_be_had(slab):
                return [*chain[: (end - 1) // size], slab]
        return []

    def end_on_disk(self, sequence: Sequence, first: int) -> int:
        """Tells how many tokens could go on from what lies on disk behind the first blocks."""
        found = self.findable(sequence, first) if self.states is None else self._up_to_state(sequence, first)
        return max((slab.end for slab in found), default=0)

    def _load(
        self, sequence: Sequence, start: int, slabs: list[Slab], room: int, *, is_all_needed: bool = False
    ) -> None:
        """Begins to load slabs of one prefix, as many as there are blocks for, and has the sequence wait for them."""
        if not slabs:
            return
        new = [slab for slab in slabs if slab.name_key not in self._loads and not self._is_known(sequence, slab)]
        end = slabs[-1].end
        if new and not self.tiers.worth_loading(new, self.read_s(start, end)):
            sequence.sought = range(start, end)
            return
        num_free = self.pool.num_available - self.pool.num_blocks // LEFT_SHARE - 1
        num_fitting = max(0, num_free) // self.blocks_per_slab
        if is_all_needed and num_fitting < len(new):
            return
        for slab in new[num_fitting:]:
            end = min(end, slab.first)
        new = new[:num_fitting]
        if new and not self._begin_loads(sequence, new, room):
            return
        keys = frozenset(slab.name_key for slab in slabs if slab.end <= end)
        if end > start and any(key in self._loads for key in keys):
            sequence.sought, sequence.awaited = range(start, end), keys
            sequence.awaited_until = self.clock() + max(LONGEST_WAIT_S, LATE * self.tiers.load_s(slabs))

    def _is_known(self, sequence: Sequence, slab: Slab) -> bool:
        """Whether its blocks are in memory; a state is another matter."""
        blocks = range(slab.first // self.block_size, slab.end // self.block_size)
        return not slab.has_state and all(self.hash_before(sequence, block + 1) in self.prefix for block in blocks)

    def _begin_loads(self, sequence: Sequence, slabs: list[Slab], room: int) -> bool:
        """False where the state of the last has no place."""
        state_slot = None
        if slabs[-1].has_state:
            state_slot = self.states.acquire_checkpoint() if self.states is not None else None
            if state_slot is None:
                return False
        after = sequence.block_ids[-1] if sequence.block_ids else None
        for slab in slabs:
            blocks: list[int] = []
            for _ in range(len(slab.tokens) // self.block_size):
                after = self.pool.allocate(after=after, room=max(1, room))
                assert after is not None, "there were blocks for it"
                blocks.append(after)
                room -= 1
            move = Move(
                kind="load",
                slab=slab,
                block_ids=tuple(blocks),
                state_slot=state_slot if slab.has_state else None,
                rank=self._rank(slab),
            )
            first, end = slab.first // self.block_size, slab.end // self.block_size
            hashes = tuple(self.hash_before(sequence, index + 1) for index in range(first, end))
            self._loads[slab.name_key] = (move, hashes)
            self._planned.append(move)
        self.tiers.pin(slabs)
        return True

    # --- what has ended ---

    def land(self, moved: Iterable[Moved]) -> None:
        for one in moved:
            if one.move.kind == "store":
                self._end_store(one)
            else:
                self._end_load(one)
            self.pool.release(one.move.block_ids)

    def give_up(self) -> None:
        """Forgets all orders, and what is still under way when nobody waits for it any more."""
        self._orders.clear()
        self._planned.clear()
        self.land([Moved(move=move, is_done=False) for move in list(self._under_way())])

    def _end_store(self, one: Moved) -> None:
        move = self._stores.pop(one.move.slab.name_key)
        self.tiers.end_store(move.slab, is_stored=one.is_done)
        if move.state_slot is not None and self.states is not None:
            self.states.unpin(move.state_slot)
        self.use.stored_tokens += len(move.slab.tokens) if one.is_done else 0
        self.use.stored_bytes += one.num_bytes

    def _end_load(self, one: Moved) -> None:
        move, hashes = self._loads.pop(one.move.slab.name_key)
        slab = move.slab
        self.tiers.end_load(slab, is_loaded=one.is_done, elapsed_s=one.elapsed_s)
        if one.is_done:
            for block_hash, block in zip(hashes, move.block_ids, strict=True):
                self.prefix.put(block_hash, block)
            self._count_load(one)
        self.use.num_misses += not one.is_done
        if move.state_slot is not None and self.states is not None:
            if one.is_done:
                self.states.keep(slab.key, move.state_slot)
            else:
                self.states.forgo(move.state_slot)

    def _count_load(self, one: Moved) -> None:
        slab = one.move.slab
        self.use.loaded_tokens += len(slab.tokens)
        self.use.loaded_bytes += one.num_bytes
        self.use.load_s += one.elapsed_s
        self.use.saved_s += max(0.0, (self.read_s(slab.first, slab.end) or 0.0) - one.elapsed_s)

    def _under_way(self) -> Iterator[Move]:
        yield from self._stores.values()
        for move, _ in self._loads.values():
            yield move
