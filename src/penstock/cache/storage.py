"""The tensors behind blocks and state slots: keys and values, one row per token, and recurrent state."""

# S slots (blocks x block size, or of states), K key-value heads, D head size

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch


class KvStorage:
    """Keys and values as [S, K, D] per layer. Slots of adjacent blocks are adjacent rows, so runs are plain views."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        shape = (num_slots, num_kv_heads, head_size)
        allocate = _lazy_pages if device.type == "cpu" else torch.empty
        self.keys = [allocate(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [allocate(shape, dtype=dtype, device=device) for _ in range(num_layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """Recurrent state of one layer by slot: a matrix per head, and the last inputs of the convolution before it."""

    matrices_SHKV: torch.Tensor
    tails_SWC: torch.Tensor


class StateStorage:
    """The tensors behind the slots of recurrent state, for the layers that have it."""

    def __init__(
        self,
        *,
        layers: Iterable[int],
        num_slots: int,
        matrix_shape: tuple[int, ...],
        tail_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        allocate = _lazy_pages if device.type == "cpu" else torch.empty
        self.layers = {
            layer: LayerState(
                matrices_SHKV=allocate((num_slots, *matrix_shape), dtype=torch.float32, device=device),
                tails_SWC=allocate((num_slots, *tail_shape), dtype=dtype, device=device),
            )
            for layer in layers
        }

    def copy(self, source: int | None, target: int) -> None:
        """The state of one slot to another; from None, zeros."""
        for state in self.layers.values():
            for values in (state.matrices_SHKV, state.tails_SWC):
                if source is None:
                    values[target].zero_()
                else:
                    values[target].copy_(values[source])


def _lazy_pages(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that becomes resident only where it is written. Huge pages would make far more of it resident."""
    if not (num_elements := prod(shape)):  # of what has no state but a tail
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, max(1, num_elements * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages has nothing to switch off
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=num_elements).view(shape)
