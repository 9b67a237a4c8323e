"""Layers that do not stay in memory: each has its place in a ring of slots, and is read there before it is computed."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.models.layer_packs import LayerFile, PackFolder, read_buffer
from penstock.models.mxfp4 import Mxfp4Matrices
from penstock.models.weights import Destination, WeightSource, fill
from penstock.plan.placement import NUM_READERS, NUM_SLOTS, PAGE, READ_BYTES, Placement

LINE = 64  # bytes; kernels read whole lines
ROOM = 64 << 10  # of a slot, for gaps between tensors

Destinations = Iterable[tuple[str, Destination]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    """Bytes of a file, and where in its slot they go."""

    file: LayerFile
    offset: int
    num_bytes: int
    place: int


class LayerStream:
    """Matrices of streamed layers are views of slots. What is small, norms and biases, stays.

    A pass goes through the layers in their order. Nothing is read ahead for the next one, which may never come.
    """

    def __init__(self, placement: Placement, packs: PackFolder) -> None:
        self._order = placement.streamed
        self._packs = packs
        self._slot_bytes = placement.slot_bytes + ROOM
        self._slots = [mmap.mmap(-1, self._slot_bytes) for _ in range(min(NUM_SLOTS, len(self._order)))]
        self._views = [torch.frombuffer(slot, dtype=torch.uint8) for slot in self._slots]
        self._used: dict[int, int] = {}  # bytes of its slot, by layer
        self._runs: dict[int, list[FileRun]] = {}
        self._files: dict[Path, LayerFile] = {}
        self._readers = ThreadPoolExecutor(NUM_READERS, "penstock-layers")
        self._of_thread = threading.local()
        self._reads: dict[int, list[Future[None]]] = {}  # of layers that are being read, or were and are not used yet
        self._next = 0  # of the order
        self.num_read = 0  # bytes, of all passes
        self.waited_s = 0.0

    def __contains__(self, index: int) -> bool:
        return index in self._order

    def place(self, index: int, layer: Any) -> Any:
        """Puts the matrices of a layer into the ring, and gives the layer that has them there."""
        view, used = self._views[self._slot(index)], 0

        def take(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal used
            if tensor.dim() < 2 and tensor.dtype != torch.uint8:
                return tensor
            first = -(-used // LINE) * LINE
            used = first + tensor.nbytes
            assert used <= self._slot_bytes, "the placement knows how large a layer is"
            return view[first:used].view(tensor.dtype).view(tensor.shape)

        placed = _with_tensors(layer, take)
        self._used[index] = -(-used // PAGE) * PAGE
        return placed

    def load(self, index: int, destinations: Destinations, source: WeightSource) -> None:
        """Fills what stays of a layer, and finds where the rest is read from: its files as they are, or a pack."""
        view = self._views[self._slot(index)]
        streamed: list[tuple[str, Destination]] = []
        for name, destination in destinations:
            if _lies_in(view, destination):
                streamed.append((name, destination))
            else:
                fill(source, destination, name)
        runs: list[FileRun] = []
        for name, destination in streamed:
            if not isinstance(destination, torch.Tensor) or (stored := source.stored_runs(name, destination)) is None:
                runs = [self._packed(index, streamed, source)]
                break
            place = destination.data_ptr() - view.data_ptr()
            for path, offset, num_bytes in stored:
                runs.append(FileRun(file=self._file(path), offset=offset, num_bytes=num_bytes, place=place))
                place += num_bytes
        self._runs[index] = runs

    def _packed(self, index: int, streamed: Destinations, source: WeightSource) -> FileRun:
        slot, num_bytes = self._slot(index), self._used[index]

        def make() -> None:
            self._views[slot].zero_()
            for name, destination in streamed:
                fill(source, destination, name)

        file = self._packs.layer(index, memoryview(self._slots[slot])[:num_bytes], make)
        return FileRun(file=file, offset=0, num_bytes=num_bytes, place=0)

    def _file(self, path: Path) -> LayerFile:
        if path not in self._files:
            self._files[path] = LayerFile(path)
        return self._files[path]

    def _slot(self, index: int) -> int:
        return self._order.index(index) % len(self._slots)

    def begin(self) -> None:
        """Begins a pass: the first layers are read from now on."""
        for reads in self._reads.values():  # of a pass that was broken off
            for read in reads:
                read.cancel()
            wait(reads)
        self._reads.clear()
        self._next = 0
        for _ in self._slots:
            self._read_next()

    @contextmanager
    def layer(self, index: int) -> Generator[None]:
        """Waits until a layer is there; its slot is free for another one afterwards."""
        if index not in self._order:
            yield
            return
        began = time.perf_counter()
        for read in self._reads[index]:
            read.result()
        self.waited_s += time.perf_counter() - began
        self.num_read += sum(run.num_bytes for run in self._runs[index])
        yield
        del self._reads[index]
        self._read_next()

    def _read_next(self) -> None:
        if self._next == len(self._order):
            return
        index = self._order[self._next]
        self._next += 1
        runs, memory = self._runs[index], memoryview(self._slots[self._slot(index)])
        for file in {run.file for run in runs}:
            file.require_unchanged()
        self._reads[index] = [
            self._readers.submit(self._read, run, done, min(READ_BYTES, run.num_bytes - done), memory)
            for run in runs
            for done in range(0, run.num_bytes, READ_BYTES)
        ]

    def _read(self, run: FileRun, done: int, num_bytes: int, memory: memoryview) -> None:
        """Reads a part of a run, in one of the threads that read."""
        place, offset = run.place + done, run.offset + done
        target = memory[place : place + num_bytes]
        if run.file.is_direct and not (place % PAGE or offset % PAGE or num_bytes % PAGE):
            run.file.read_pages(offset, target)
        else:
            if not hasattr(self._of_thread, "buffer"):
                self._of_thread.buffer = read_buffer()
            run.file.read(offset, target, self._of_thread.buffer)


def _lies_in(view: torch.Tensor, destination: Destination) -> bool:
    assert not isinstance(destination, Mxfp4Matrices), "nothing streams to a card"
    tensor = destination if isinstance(destination, torch.Tensor) else destination.matrix.parts[0].bytes
    return view.data_ptr() <= tensor.data_ptr() < view.data_ptr() + view.nbytes


def _with_tensors(part: Any, take: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Puts what `take` gives in place of the tensors of a dataclass, however deep they lie."""
    if isinstance(part, torch.Tensor):
        return take(part)
    if isinstance(part, dict):
        values: dict[str, Any] = part
    elif isinstance(part, tuple):
        taken_parts = tuple(_with_tensors(one, take) for one in part)
        return taken_parts if any(one is not old for one, old in zip(taken_parts, part, strict=True)) else part
    elif is_dataclass(part) and not isinstance(part, type):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
    else:
        return part
    taken = {name: _with_tensors(value, take) for name, value in values.items()}
    changes = {name: value for name, value in taken.items() if value is not values[name]}
    if not changes:
        return part
    return {**part, **changes} if isinstance(part, dict) else replace(part, **changes)
