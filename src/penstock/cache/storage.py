"""The tensors behind the blocks: keys and values of every layer, one row per token slot."""

# S slots (blocks x block size), K key-value heads, D head size

from __future__ import annotations

import mmap
from contextlib import suppress

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


def _lazy_pages(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that becomes resident only where it is written. Huge pages would make far more of it resident."""
    num_elements = 1
    for size in shape:
        num_elements *= size
    pages = mmap.mmap(-1, max(1, num_elements * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages has nothing to switch off
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=num_elements).view(shape)
