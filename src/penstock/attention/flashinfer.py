"""FlashInfer's FlashAttention 3 over our pages, for the wide chunks of a step, where it is installed.

It has no float32 and compiles its kernels on first use, so it stands beside our own kernels, not in their place.
"""

# T tokens of the wide chunks, H heads, K key-value heads, D head size

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from penstock.attention.backend import AttentionRule
from penstock.cache.storage import KvStorage
from penstock.config import HOPPER
from penstock.plan.waves import Waves

HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
TILE_TOKENS = {128: 128}  # of a chunk, that one head takes at a time, by its size; where that was measured
WORKSPACE_BYTES = 16 * 2**20
# The host may plan a step while the one before it runs, so each writes into buffers of its own.
NUM_BUFFERS = 2
SILENT_S, TOLD_EVERY_S = 3.0, 15.0  # a cache of compiled kernels is read within the first

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class WideChunks:
    """The rows [first_row, end_row) of a step: adjacent chunks, their rows, and the pages that they see.

    A chunk alone whose pages follow each other is read as one run of slots, which is a fifth faster.
    """

    first_row: int
    end_row: int
    row_starts: np.ndarray
    page_starts: np.ndarray
    pages: np.ndarray
    last_page_lens: np.ndarray
    run: slice | None  # None: there are several chunks, or their pages lie apart

    @classmethod
    def of(
        cls, chosen: np.ndarray, starts: np.ndarray, contexts: np.ndarray, table: np.ndarray, block_size: int
    ) -> WideChunks | None:
        """None where there is none, or where other chunks lie between them."""
        if not len(chosen) or chosen[-1] - chosen[0] + 1 != len(chosen):
            return None
        num_pages = -(-contexts[chosen] // block_size)
        first, end = int(starts[chosen[0]]), int(starts[chosen[-1] + 1])
        pages = np.concatenate([table[chunk, :count] for chunk, count in zip(chosen, num_pages, strict=True)])
        run = None
        if len(chosen) == 1 and np.all(np.diff(pages) == 1):
            first_slot = int(pages[0]) * block_size
            run = slice(first_slot, first_slot + int(contexts[chosen[0]]))
        return cls(
            first_row=first,
            end_row=end,
            row_starts=starts[chosen[0] : chosen[-1] + 2] - first,
            page_starts=np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32),
            pages=pages,
            last_page_lens=((contexts[chosen] - 1) % block_size + 1).astype(np.int32),
            run=run,
        )


@contextmanager
def told_while_compiling() -> Generator[None]:
    """Logs what takes so long as soon as it does, and how long it has taken, until it is over."""
    is_over = threading.Event()

    def tell() -> None:
        began, wait_s = time.monotonic(), SILENT_S
        while not is_over.wait(wait_s):
            passed = f"{time.monotonic() - began:.0f} s so far"
            _log.warning("FlashInfer compiles its attention for this card, once, in about two minutes; %s.", passed)
            wait_s = TOLD_EVERY_S

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


def obstacle(storage: KvStorage) -> str | None:
    """Why FlashInfer cannot be used: it is not installed, or has no kernels for this card, dtype or head size."""
    keys, shapes = storage.keys[0], {storage.heads(layer) for layer in range(len(storage.keys))}
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    if keys.device.type != "cuda" or torch.cuda.get_device_capability(keys.device) != HOPPER:
        return "FlashInfer is used on Hopper cards"
    if keys.dtype not in DTYPES:
        return f"FlashInfer has no kernels for {str(keys.dtype).removeprefix('torch.')}"
    if sizes := {size for _, size in shapes} - set(HEAD_SIZES):
        return f"FlashInfer has no kernels for heads of {max(sizes)}"
    if len(shapes) > 1:
        return "FlashInfer is used where all layers have the same heads"
    return None


class FlashInferReader:
    """Plans once per step and rule, then runs for every layer of that rule."""

    def __init__(self, storage: KvStorage, block_size: int, *, num_heads: int, num_processors: int = 132) -> None:
        self.storage = storage
        self.block_size = block_size
        self.num_heads = num_heads
        self.num_kv_heads, self.head_size = storage.keys[0].shape[1:]
        self.device = storage.keys[0].device
        self.waves: Waves | None = None  # None: heads of this size were not measured, and it reads every wide chunk
        if self.head_size in TILE_TOKENS:
            tile_tokens = TILE_TOKENS[self.head_size]
            self.waves = Waves(tile_tokens=tile_tokens, num_heads=num_heads, tiles_at_once=num_processors)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._wrappers: dict[tuple[AttentionRule, int, str], Any] = {}
        self._chunks: WideChunks | None = None
        self._planned: dict[AttentionRule, Any] = {}
        self._turn = 0

    def is_faster_for(self, counts: np.ndarray) -> bool:
        """Tells whether chunks of so many tokens are its to read, and not our own kernels'."""
        num_tokens = int(counts.sum())
        return num_tokens > 0 and (self.waves is None or self.waves.are_filled_by(num_tokens))

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
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        if chunks.run is not None:
            self._planned[rule].run(q_THD[rows], keys[chunks.run], values[chunks.run], out=out_THD[rows])
        else:
            pages = (-1, self.block_size, self.num_kv_heads, self.head_size)
            self._planned[rule].run(q_THD[rows], (keys.view(pages), values.view(pages)), out=out_THD[rows])

    def _plan(self, chunks: WideChunks, rule: AttentionRule) -> Any:
        kind = "BatchPrefillWithPagedKVCacheWrapper" if chunks.run is None else "BatchPrefillWithRaggedKVCacheWrapper"
        key = (rule, self._turn, kind)
        if key not in self._wrappers:
            self._wrappers[key] = getattr(import_module("flashinfer"), kind)(self._workspace, "NHD", backend="fa3")
        wrapper = self._wrappers[key]
        dtype = self.storage.keys[0].dtype
        rules = {
            "causal": True,
            "sm_scale": rule.scale,
            "window_left": -1 if rule.window is None else rule.window - 1,
            "logits_soft_cap": rule.softcap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        heads = (self.num_heads, self.num_kv_heads, self.head_size)
        if chunks.run is not None:
            num_keys = chunks.run.stop - chunks.run.start
            wrapper.plan(_pinned(chunks.row_starts), _pinned(np.array([0, num_keys])), *heads, **rules)
            return wrapper
        places = (chunks.row_starts, chunks.page_starts, chunks.pages, chunks.last_page_lens)
        wrapper.plan(*map(_pinned, places), *heads, self.block_size, **rules)
        return wrapper


def _pinned(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).pin_memory()
