"""Moves slabs between pages and the cache folder beside the steps, on a CPU: straight from and to the pages."""

# S slots of tokens or states, B bytes of one

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable

import torch

from penstock.cache.disk import DiskTier
from penstock.cache.slabs import Pieces, SlabLayout
from penstock.cache.storage import KvStorage, StateStorage
from penstock.request import Move, Moved

NUM_READERS = 2  # one waits for the disk while the other sums up
CLOSE_WAIT_S = 5.0  # for what is being written when nobody waits for it any more

Jobs = queue.SimpleQueue[Move | None]  # None: there will be no more


class Mover:
    """Every move that begins ends as a Moved. A move holds its blocks, so that no step writes or reads them."""

    def __init__(
        self,
        disk: DiskTier,
        storage: KvStorage,
        states: StateStorage | None,
        pinned: Callable[[], Collection[str]] = tuple,
    ) -> None:
        assert storage.device.type == "cpu", "pages elsewhere are not reached from here"
        self.disk = disk
        self.pinned = pinned  # names of slabs that are about to be read
        self._rows_SB = rows(storage)
        self._states_SB = state_rows(states)
        self._jobs: dict[str, Jobs] = {"store": queue.SimpleQueue(), "load": queue.SimpleQueue()}
        self._landed: queue.SimpleQueue[Moved] = queue.SimpleQueue()
        self.num_under_way = 0
        self._threads = [
            threading.Thread(target=self._run, args=(self._jobs[kind],), name=f"penstock-{kind}", daemon=True)
            for kind in ("store", *["load"] * NUM_READERS)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self.num_under_way += 1
            self._jobs[move.kind].put(move)

    def landed(self, wait_s: float = 0.0) -> tuple[Moved, ...]:
        """Takes the moves that have ended since this was last asked; waits for one where there is none yet."""
        found: list[Moved] = []
        try:
            if wait_s and self.num_under_way:
                found.append(self._landed.get(timeout=wait_s))
            while True:
                found.append(self._landed.get_nowait())
        except queue.Empty:
            self.num_under_way -= len(found)
            return tuple(found)

    def close(self) -> None:
        for kind, jobs in self._jobs.items():
            for _ in range(NUM_READERS if kind == "load" else 1):
                jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSE_WAIT_S)

    def _run(self, jobs: Jobs) -> None:
        while (move := jobs.get()) is not None:
            began_at = time.perf_counter()
            try:
                is_done = self._move(move)
            except Exception:  # whatever it is, it is a miss, and nobody's request fails of it
                is_done = False
            elapsed_s = time.perf_counter() - began_at
            num_bytes = self.disk.layout.file_bytes(move.slab) if is_done else 0
            self._landed.put(Moved(move=move, is_done=is_done, num_bytes=num_bytes, elapsed_s=elapsed_s))

    def _move(self, move: Move) -> bool:
        if move.kind == "store":
            return self.disk.write(move.slab, self.sections(move), move.rank, self.pinned())
        return self.disk.read(move.slab, self.sections(move), move.rank)

    def sections(self, move: Move) -> list[Pieces]:
        """Finds where the sections of a slab lie in memory; blocks beside each other are one piece."""
        block_size = self.disk.layout.block_size
        runs: list[tuple[int, int]] = []
        for block in move.block_ids:
            start = block * block_size
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], start + block_size)
            else:
                runs.append((start, start + block_size))
        sections: list[Pieces] = [[_memory(of_SB, start, end) for start, end in runs] for of_SB in self._rows_SB]
        if move.state_slot is not None:
            slot = move.state_slot
            sections += [[_memory(of_SB, slot, slot + 1)] for of_SB in self._states_SB]
        return sections


def layout_of(storage: KvStorage, states: StateStorage | None, block_size: int) -> SlabLayout:
    """Says how slabs of these pages lie on disk: keys, then values, of each layer; then states."""
    return SlabLayout(
        block_size=block_size,
        row_bytes=tuple(of_SB.shape[1] for of_SB in rows(storage)),
        state_bytes=tuple(of_SB.shape[1] for of_SB in state_rows(states)),
    )


def rows(storage: KvStorage) -> list[torch.Tensor]:
    pairs = zip(storage.keys, storage.values, strict=True)
    return [_bytes_of(tensor) for pair in pairs for tensor in pair]


def state_rows(states: StateStorage | None) -> list[torch.Tensor]:
    if states is None:
        return []
    tensors = [tensor for state in states.layers.values() for tensor in (state.matrices_SHKV, state.tails_SWC)]
    return [_bytes_of(tensor) for tensor in tensors if tensor.numel()]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(len(tensor), -1).view(torch.uint8)


def _memory(of_SB: torch.Tensor, start: int, end: int) -> memoryview:
    return memoryview(of_SB[start:end].view(-1).numpy())
