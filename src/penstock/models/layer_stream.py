"""Layers that do not stay in memory: each has its place in a ring of slots, and is read there before it is computed."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from penstock.models.experts import Experts
from penstock.models.layer_packs import LayerFile, PackFolder, read_buffer
from penstock.models.mxfp4 import Mxfp4Matrices
from penstock.models.streamed_experts import LINE, StreamedExperts, tensors_of
from penstock.models.weights import Destination, WeightSource, fill
from penstock.plan.expert_slots import ExpertSlots, slot_places
from penstock.plan.placement import NUM_READERS, NUM_SLOTS, PAGE, READ_BYTES, Placement

ROOM = 64 << 10  # of a slot, for gaps between tensors

Destinations = Iterable[tuple[str, Destination]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    """Bytes of a file, and where in its slot they go."""

    file: LayerFile
    offset: int
    num_bytes: int
    place: int

    def within(self, first: int, num_bytes: int) -> FileRun | None:
        """Gives the part of it that lies there in the slot; None where nothing does."""
        skipped = max(0, first - self.place)
        num_bytes = min(self.num_bytes, first + num_bytes - self.place) - skipped
        if num_bytes <= 0:
            return None
        return replace(self, offset=self.offset + skipped, num_bytes=num_bytes, place=self.place + skipped)


class LayerStream:
    """Matrices of streamed layers are views of slots. What is small, norms and biases, stays.

    Of few rows only the experts that they choose are read, into slots of their own, where those used lately stay. They
    lie beside the ring, and in the ring where layers are not read whole.

    A pass goes through the layers in their order. Nothing is read ahead for the next one, which may never come.
    """

    def __init__(self, placement: Placement, packs: PackFolder) -> None:
        self._order = placement.streamed
        self._placement = placement
        self._packs = packs
        self._slot_bytes = placement.slot_bytes + ROOM
        num_slots = min(NUM_SLOTS, len(self._order))
        self._memory = memoryview(mmap.mmap(-1, num_slots * self._slot_bytes + placement.cache_bytes))
        self._view = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots = [self._memory[at * self._slot_bytes :][: self._slot_bytes] for at in range(num_slots)]
        self._views = [self._view[at * self._slot_bytes :][: self._slot_bytes] for at in range(num_slots)]
        self._used: dict[int, int] = {}  # bytes of its slot, by layer
        self._rest: dict[int, int] = {}  # the same without experts, which lie behind it
        self._runs: dict[int, list[FileRun]] = {}
        self._experts: dict[int, StreamedExperts] = {}
        self._expert_runs: dict[tuple[int, int], list[FileRun]] = {}  # in a slot of an expert
        self._reads_chosen = False  # in this pass
        self._files: dict[Path, LayerFile] = {}
        self._readers = ThreadPoolExecutor(NUM_READERS, "penstock-layers")
        self._of_thread = threading.local()
        self._reads: dict[int, list[Future[int]]] = {}  # of layers that are being read, or were and are not used yet
        self._next = 0  # of the order
        self.num_read = 0  # bytes, of all passes
        self.waited_s = 0.0

    def __contains__(self, index: int) -> bool:
        return index in self._order

    def place(self, index: int, layer: Any) -> Any:
        """Puts the matrices of a layer into the ring, and gives the layer that has them there."""
        view, used = self._views[self._slot(index)], 0
        found = [one for one in (layer.mlp, layer.experts) if isinstance(one, Experts)]
        of_experts = {id(tensor) for one in found for tensor in tensors_of((one.gate_up, one.down))}
        all_streams = not self._placement.streams_experts_alone

        def take(tensor: torch.Tensor, *, is_expert: bool = False) -> torch.Tensor:
            nonlocal used
            if (id(tensor) in of_experts) != is_expert or not (is_expert or all_streams):
                return tensor
            if tensor.dim() < 2 and tensor.dtype != torch.uint8:
                return tensor
            first = -(-used // LINE) * LINE
            used = first + tensor.nbytes
            assert used <= self._slot_bytes, "the placement knows how large a layer is"
            return view[first:used].view(tensor.dtype).view(tensor.shape)

        placed = _with_tensors(layer, take)
        self._rest[index] = used = -(-used // PAGE) * PAGE
        placed = _with_tensors(placed, partial(take, is_expert=True))
        self._used[index] = -(-used // PAGE) * PAGE
        for name in ("mlp", "experts"):
            if isinstance(one := getattr(placed, name), Experts):
                matrices = tensors_of((one.gate_up, one.down))
                streamed = StreamedExperts(index, self._view, matrices, one.spec.num_experts, self._take)
                self._experts[index] = streamed
                placed = replace(placed, **{name: replace(one, streamed=streamed)})
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

        file = self._packs.layer(index, self._slots[slot][:num_bytes], make)
        return FileRun(file=file, offset=0, num_bytes=num_bytes, place=0)

    def _file(self, path: Path) -> LayerFile:
        if path not in self._files:
            self._files[path] = LayerFile(path)
        return self._files[path]

    def _slot(self, index: int) -> int:
        return self._order.index(index) % len(self._slots)

    def begin(self, num_rows: int) -> None:
        """Begins a pass of so many rows: the first layers are read from now on."""
        for reads in self._reads.values():  # of a pass that was broken off
            for read in reads:
                read.cancel()
            wait(reads)
        self._reads.clear()
        self._next = 0
        mixture = self._placement.mixture
        self._reads_chosen = mixture is not None and mixture.reads_chosen(num_rows, self._held.num_slots)
        if self._experts and not self._reads_chosen:
            self._held.drop_below(sum(place < len(self._slots) * self._slot_bytes for place in self._places))
            for experts in self._experts.values():
                experts.move_back()
        for _ in self._slots:
            self._read_next()

    @contextmanager
    def layer(self, index: int) -> Generator[None]:
        """Waits until a layer is there; its slot is free for another one afterwards."""
        if index not in self._order:
            yield
            return
        self._wait(self._reads[index])
        yield
        del self._reads[index]
        self._read_next()

    def _wait(self, reads: list[Future[int]]) -> None:
        began = time.perf_counter()
        wait(reads)
        self.num_read += sum(read.result() for read in reads)
        self.waited_s += time.perf_counter() - began

    def _read_next(self) -> None:
        if self._next == len(self._order):
            return
        index = self._order[self._next]
        self._next += 1
        runs, memory = self._runs[index], self._slots[self._slot(index)]
        for file in {run.file for run in runs}:
            file.require_unchanged()
        if self._reads_chosen:
            runs = [part for run in runs if (part := run.within(0, self._rest[index]))]
        self._reads[index] = [read for run in runs for read in self._begun(run, memory)]

    def _begun(self, run: FileRun, memory: memoryview) -> Iterator[Future[int]]:
        for done in range(0, run.num_bytes, READ_BYTES):
            yield self._readers.submit(self._read, run, done, min(READ_BYTES, run.num_bytes - done), memory)

    @cached_property
    def _places(self) -> list[int]:
        """Finds where slots of experts are: first those in the ring, behind what else the layers have there."""
        num_slots, size = len(self._slots), self._slot_bytes
        rests = [max(self._rest[index] for index in self._order[at::num_slots]) for at in range(num_slots)]
        areas = [(at * size + rest, (at + 1) * size) for at, rest in enumerate(rests)]
        largest = max(experts.slot_bytes for experts in self._experts.values())
        return slot_places([*areas, (num_slots * size, len(self._memory))], -(-largest // PAGE) * PAGE)

    @cached_property
    def _held(self) -> ExpertSlots:
        return ExpertSlots(len(self._places) if self._experts else 0)

    def _take(self, experts: StreamedExperts, chosen: list[int]) -> None:
        """Brings experts that rows have chosen, where a pass does not read all."""
        if not self._reads_chosen:
            return
        slots, missing = self._held.take(experts.index, chosen)
        places = {expert: self._places[slot] for expert, slot in slots.items()}
        runs = [(run, self._memory[places[one] :]) for one in missing for run in self._runs_of(experts, one)]
        reads: list[Future[int]] = []
        try:
            for file in {run.file for run, _ in runs}:
                file.require_unchanged()
            reads += (read for run, memory in runs for read in self._begun(run, memory))
            self._wait(reads)
        except BaseException:
            wait(reads)
            self._held.drop(experts.index, missing)
            raise
        for expert, place in places.items():
            experts.move(expert, place)

    def _runs_of(self, experts: StreamedExperts, expert: int) -> list[FileRun]:
        key = experts.index, expert
        if key not in self._expert_runs:
            slot = self._slot(experts.index) * self._slot_bytes
            self._expert_runs[key] = [
                replace(part, place=part.place - (first - slot) + inside)
                for first, num_bytes, inside in experts.parts(expert)
                for run in self._runs[experts.index]
                if (part := run.within(first - slot, num_bytes))
            ]
        return self._expert_runs[key]

    def _read(self, run: FileRun, done: int, num_bytes: int, memory: memoryview) -> int:
        """Reads a part of a run, in one of the threads that read; gives how much that was."""
        place, offset = run.place + done, run.offset + done
        target = memory[place : place + num_bytes]
        if run.file.is_direct and not (place % PAGE or offset % PAGE or num_bytes % PAGE):
            run.file.read_pages(offset, target)
        else:
            if not hasattr(self._of_thread, "buffer"):
                self._of_thread.buffer = read_buffer()
            run.file.read(offset, target, self._of_thread.buffer)
        return num_bytes


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
