"""Attention over pages through the C kernel: the step's layout as C sees it, and one call per layer."""

# T tokens of the step, H heads, K key-value heads, D head size

from __future__ import annotations

import ctypes
from itertools import accumulate, chain

import torch

from penstock.attention.backend import AttentionRule, ForwardInputs, Rotation
from penstock.attention.c_library import CKernels, c_kernels
from penstock.cache.storage import KvStorage

LARGEST_HEAD = 256
LARGEST_GROUP = 64  # query heads of one key-value head

_POINTERS = ("queries", "out", "keys", "values", "query_starts", "context_lens", "blocks", "block_starts", "sinks")
_POINTERS += ("partials", "workspace", "parallel")
_SIZES = ("num_chunks", "block_size", "num_heads", "num_kv_heads", "head_size", "window")


class AttentionCall(ctypes.Structure):
    """`struct attention` of cpu_calls.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        *[(name, ctypes.c_int32) for name in _SIZES],
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    ]


class Heads(ctypes.Structure):
    _fields_ = [("first", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]

    @classmethod
    def of(cls, x_THD: torch.Tensor) -> Heads:
        return cls(x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1))


_LAYOUT = ("query_starts", "context_lens", "blocks", "block_starts")


class StoreCall(ctypes.Structure):
    """`struct store` of cpu_calls.h."""

    _fields_ = [
        *[(name, Heads) for name in ("queries", "keys", "values")],
        *[(name, ctypes.c_void_p) for name in ("rotated", "key_pages", "value_pages", "cosines", "sines")],
        *[(name, ctypes.c_void_p) for name in (*_LAYOUT, "parallel")],
        *[(name, ctypes.c_int32) for name in ("num_chunks", "block_size", "num_heads", "num_kv_heads", "head_size")],
        ("half", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    ]


class CompiledAttention:
    """What CpuAttention calls where `make_compiled` gave one."""

    def __init__(self, kernels: CKernels, storage: KvStorage, block_size: int) -> None:
        library = kernels.library
        self._storage = storage
        self._attend, self._store = library.penstock_attend, library.penstock_store
        self._num_partials = library.penstock_num_partials
        self._num_partials.restype = ctypes.c_int64
        library.penstock_workspace_bytes.restype = ctypes.c_int64
        self._workspace_bytes = int(library.penstock_workspace_bytes())
        _, num_kv_heads, head_size = storage.keys[0].shape
        sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": head_size}
        self._call = AttentionCall(parallel=kernels.parallel, **sizes)
        self._store_call = StoreCall(parallel=kernels.parallel, **sizes)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._partials = torch.empty(0)
        self._layout: list[torch.Tensor] = []  # kept alive: C reads them

    def begin_step(self, inputs: ForwardInputs) -> None:
        block_starts = [0, *accumulate(map(len, inputs.block_table))]
        self._layout = [
            torch.tensor(values, dtype=torch.int32)
            for values in (inputs.query_starts, inputs.context_lens, list(chain(*inputs.block_table)), block_starts)
        ]
        for call in (self._call, self._store_call):
            for name, values in zip(_LAYOUT, self._layout, strict=True):
                setattr(call, name, values.data_ptr())
            call.num_chunks, call.num_threads = inputs.num_chunks, torch.get_num_threads()
        if len(self._workspace) < self._call.num_threads * self._workspace_bytes + 64:
            self._workspace = torch.empty(self._call.num_threads * self._workspace_bytes + 64, dtype=torch.uint8)
        self._call.workspace = -(-self._workspace.data_ptr() // 64) * 64

    def store(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: Rotation | None
    ) -> torch.Tensor:
        q_THD, k_TKD, v_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_TKD, v_TKD))
        rotated_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        call = self._store_call
        call.queries, call.keys, call.values = Heads.of(q_THD), Heads.of(k_TKD), Heads.of(v_TKD)
        call.rotated, call.num_heads = rotated_THD.data_ptr(), q_THD.shape[1]
        call.key_pages, call.value_pages = self.pages(layer)
        call.cosines = call.sines = None
        if rotation is not None:
            cos, sin = rotation.cos_T1R.contiguous(), rotation.sin_T1R.contiguous()
            call.cosines, call.sines, call.half = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        self._store(ctypes.byref(call))
        return rotated_THD

    def pages(self, layer: int) -> tuple[int, int]:
        """Where the keys and the values of a layer begin."""
        return self._storage.keys[layer].data_ptr(), self._storage.values[layer].data_ptr()

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        q_THD = q_THD.contiguous()
        out_THD = torch.empty_like(q_THD)
        call = self._call
        call.queries, call.out = q_THD.data_ptr(), out_THD.data_ptr()
        call.keys, call.values = self.pages(layer)
        call.num_heads = q_THD.shape[1]
        call.window, call.scale, call.softcap = rule.window or 0, rule.scale, rule.softcap or 0.0
        sinks = None if sinks_H is None else sinks_H.float().contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        self._hold_partials()
        self._attend(ctypes.byref(call))
        return out_THD

    def layout(self, num_heads: int) -> AttentionCall:
        """Of the step that was begun, for all of its layers."""
        self._call.num_heads, self._call.window = num_heads, 0
        self._hold_partials()
        return self._call

    def _hold_partials(self) -> None:
        num_partials = self._num_partials(ctypes.byref(self._call))
        if len(self._partials) < num_partials:
            self._partials = torch.empty(num_partials)
        self._call.partials = self._partials.data_ptr()


def make_compiled(storage: KvStorage, block_size: int) -> CompiledAttention | None:
    """None where torch has to attend."""
    _, _, head_size = storage.keys[0].shape if storage.keys else (0, 0, 0)
    if not storage.keys or storage.keys[0].dtype != torch.bfloat16 or head_size % 2 or head_size > LARGEST_HEAD:
        return None
    kernels = c_kernels()
    return None if kernels is None else CompiledAttention(kernels, storage, block_size)
