"""FlashInfer's FlashAttention 3 over our pages, for the wide chunks of a step, where it is installed.

It has no float32 and compiles its kernels on first use, so it stands beside our own kernels, not in their place.
"""

# T tokens of the wide chunks, H heads, K key-value heads, D head size

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from penstock.attention.backend import AttentionRule
from penstock.cache.storage import KvStorage

HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 16 * 2**20
HOPPER = (9, 0)
# The host may plan a step while the one before it runs, so each writes into buffers of its own.
NUM_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WideChunks:
    """The rows [first_row, end_row) of a step: adjacent chunks, their rows, and the pages that they see."""

    first_row: int
    end_row: int
    row_starts: np.ndarray
    page_starts: np.ndarray
    pages: np.ndarray
    last_page_lens: np.ndarray

    @classmethod
    def of(
        cls, chosen: np.ndarray, starts: np.ndarray, contexts: np.ndarray, table: np.ndarray, block_size: int
    ) -> WideChunks | None:
        """None where there is none, or where other chunks lie between them."""
        if not len(chosen) or chosen[-1] - chosen[0] + 1 != len(chosen):
            return None
        num_pages = -(-contexts[chosen] // block_size)
        first, end = int(starts[chosen[0]]), int(starts[chosen[-1] + 1])
        return cls(
            first_row=first,
            end_row=end,
            row_starts=starts[chosen[0] : chosen[-1] + 2] - first,
            page_starts=np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32),
            pages=np.concatenate([table[chunk, :count] for chunk, count in zip(chosen, num_pages, strict=True)]),
            last_page_lens=((contexts[chosen] - 1) % block_size + 1).astype(np.int32),
        )


def is_usable(storage: KvStorage) -> bool:
    """Whether FlashInfer is installed and has kernels for this card, dtype and head size."""
    keys = storage.keys[0]
    if keys.device.type != "cuda" or find_spec("flashinfer") is None:
        return False
    is_hopper = torch.cuda.get_device_capability(keys.device) == HOPPER
    return is_hopper and keys.dtype in DTYPES and keys.shape[-1] in HEAD_SIZES


class FlashInferReader:
    """Plans once per step and rule, then runs for every layer of that rule."""

    name = "flashinfer"

    def __init__(self, storage: KvStorage, block_size: int, *, num_heads: int) -> None:
        self.storage = storage
        self.block_size = block_size
        self.num_heads = num_heads
        self.num_kv_heads, self.head_size = storage.keys[0].shape[1:]
        self.device = storage.keys[0].device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._wrappers: dict[tuple[AttentionRule, int], Any] = {}
        self._chunks: WideChunks | None = None
        self._planned: dict[AttentionRule, Any] = {}
        self._turn = 0

    def begin_step(self, chunks: WideChunks | None) -> None:
        self._chunks = chunks
        self._planned = {}
        self._turn = (self._turn + 1) % NUM_BUFFERS

    def attend(self, layer: int, q_THD: torch.Tensor, out_THD: torch.Tensor, rule: AttentionRule) -> None:
        """Writes the rows of the wide chunks; other rows are left alone."""
        chunks = self._chunks
        assert chunks is not None, "begin_step comes first"
        if rule not in self._planned:
            self._planned[rule] = self._plan(chunks, rule)
        rows = slice(chunks.first_row, chunks.end_row)
        pages = (-1, self.block_size, self.num_kv_heads, self.head_size)
        keys, values = self.storage.keys[layer].view(pages), self.storage.values[layer].view(pages)
        self._planned[rule].run(q_THD[rows], (keys, values), out=out_THD[rows])

    def _plan(self, chunks: WideChunks, rule: AttentionRule) -> Any:
        key = (rule, self._turn)
        if key not in self._wrappers:
            wrapper_class = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[key] = wrapper_class(self._workspace, "NHD", backend="fa3")
        wrapper = self._wrappers[key]
        wrapper.plan(
            _pinned(chunks.row_starts),
            _pinned(chunks.page_starts),
            _pinned(chunks.pages),
            _pinned(chunks.last_page_lens),
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.block_size,
            causal=True,
            sm_scale=rule.scale,
            window_left=-1 if rule.window is None else rule.window - 1,
            logits_soft_cap=rule.softcap,
            q_data_type=self.storage.keys[0].dtype,
        )
        return wrapper


def _pinned(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).pin_memory()
