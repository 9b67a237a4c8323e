"""Picks what attends on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.attention.backend import AttentionBackend
from penstock.attention.cpu import CpuAttention
from penstock.cache.storage import KvStorage
from penstock.errors import InvalidSetting

if TYPE_CHECKING:
    from penstock.attention.cuda import CudaAttention


def attention_backend(storage: KvStorage, block_size: int, num_heads: int) -> AttentionBackend:
    if storage.device.type != "cuda":
        return CpuAttention(storage, block_size)
    try:
        from penstock.attention.cuda import CudaAttention
    except ImportError as error:
        raise InvalidSetting(f"A GPU needs Triton, which is missing ({error}); pip install triton.") from error
    attention = CudaAttention(storage, block_size, num_heads=num_heads)
    attention.pick_reader()
    return attention


def attention_on_card(attention: AttentionBackend) -> CudaAttention | None:
    """None on a CPU, which may have no Triton."""
    if isinstance(attention, CpuAttention):
        return None
    from penstock.attention.cuda import CudaAttention

    assert isinstance(attention, CudaAttention)
    return attention
