"""How much is held of the memory that a budget is about, and how it runs out."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from penstock.plan.machine import peak_resident_bytes, resident_bytes, return_freed_memory

if TYPE_CHECKING:
    from penstock.lanes.lane import Lane

# What torch and the libraries below it say when they are refused memory, as far as it has no type of its own.
REFUSALS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")


class HeldMemory:
    """Measures the memory of this process, or of the card beyond what its context takes, where a GPU computes."""

    def __init__(self, lane: Lane, device: torch.device, runtime_bytes: int) -> None:
        self._card = device if device.type == "cuda" else None
        self._lane = weakref.ref(lane)  # what counts memory must not hold it: a closed engine gives its weights back
        self._runtime_bytes = runtime_bytes

    @property
    def num_bytes(self) -> int:
        if self._card is None:
            return resident_bytes()
        return self._fixed_bytes + torch.cuda.memory_allocated(self._card)

    @property
    def peak_bytes(self) -> int:
        if self._card is None:
            return peak_resident_bytes()
        return self._fixed_bytes + torch.cuda.max_memory_allocated(self._card)

    @property
    def _fixed_bytes(self) -> int:
        """Counts what torch's tensors do not hold: the context, and what captures keep."""
        lane = self._lane()
        return self._runtime_bytes + (0 if lane is None else lane.recorded_bytes)

    def give_back(self) -> None:
        """What was freed, so that it can be taken again in other sizes."""
        return_freed_memory()
        if self._card is not None:
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in REFUSALS)
