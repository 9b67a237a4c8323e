"""The tensors behind blocks and state slots: keys and values, one row per token, and recurrent state."""

# S slots (blocks x block size, or of states), K key-value heads, D head size

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch


class KvStorage:
    """Keeps keys and values as [S, K, D] per layer. Slots of adjacent blocks are adjacent rows: runs are plain views.

    Layers may have heads of their own number and size; then both are given layer by layer.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int | Sequence[int],
        head_size: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        values_are_keys: bool = False,
    ) -> None:
        """`values_are_keys`: both are stored alike, and kept once."""
        self.device = device
        heads, sizes = ([of] * num_layers if isinstance(of, int) else of for of in (num_kv_heads, head_size))
        shapes = [(num_slots, *of_layer) for of_layer in zip(heads, sizes, strict=True)]
        assert len(shapes) == num_layers, f"sizes of {len(shapes)} layers for {num_layers}"
        allocate = _lazy_pages if device.type == "cpu" else torch.empty
        self.keys = [allocate(shape, dtype=dtype, device=device) for shape in shapes]
        self.values = self.keys
        if not values_are_keys:
            self.values = [allocate(shape, dtype=dtype, device=device) for shape in shapes]

    def heads(self, layer: int) -> tuple[int, int]:
        """Tells (key-value heads, head size) of a layer."""
        _, num_kv_heads, head_size = self.keys[layer].shape
        return num_kv_heads, head_size


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
        indices, self.dtype = tuple(layers), dtype
        matrices_LSHKV = allocate((len(indices), num_slots, *matrix_shape), dtype=torch.float32, device=device)
        tails_LSWC = allocate((len(indices), num_slots, *tail_shape), dtype=dtype, device=device)
        self._all = (matrices_LSHKV, tails_LSWC)
        parts = zip(indices, matrices_LSHKV, tails_LSWC, strict=True)
        self.layers = {layer: LayerState(matrices_SHKV=one, tails_SWC=other) for layer, one, other in parts}

    def copy(self, source: int | None, target: int) -> None:
        """The state of one slot to another, of all layers at once; from None, zeros."""
        for of_layers in self._all:
            if source is None:
                of_layers[:, target].zero_()
            else:
                of_layers[:, target].copy_(of_layers[:, source])


def _lazy_pages(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that becomes resident only where it is written. Huge pages would make far more of it resident."""
    if not (num_elements := prod(shape)):  # of what has no state but a tail
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, max(1, num_elements * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages has nothing to switch off
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=num_elements).view(shape)
