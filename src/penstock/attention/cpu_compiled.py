"""Attention over pages through the C kernel: the step's layout as C sees it, and one call per layer."""

# T tokens of the step, H heads, K key-value heads, D head size

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any

import torch

from penstock.attention.backend import AttentionRule, ForwardInputs, Rotation
from penstock.cache.storage import KvStorage
from penstock.kernels.build import ffi
from penstock.kernels.calls import CKernels, address, c_kernels

LARGEST_HEAD = 512
LARGEST_GROUP = 64  # query heads of one key-value head


def heads(x_THD: torch.Tensor) -> dict[str, Any]:
    """Fills `struct heads`: where the first head of the first token lies, and how far the next ones are."""
    row_stride, head_stride, _ = x_THD.stride()
    return {"first": x_THD.data_ptr(), "row_stride": row_stride, "head_stride": head_stride}


class CompiledAttention:
    """What CpuAttention calls where `make_compiled` gave one."""

    def __init__(self, kernels: CKernels, storage: KvStorage, block_size: int) -> None:
        self.name = f"C kernels, {kernels.instructions.name}"
        self._storage = storage
        self._library = kernels.library
        num_kv_heads, head_size = storage.heads(0)
        fields = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": head_size}
        fields["parallel"] = kernels.parallel
        self._call, self._store_call = ffi().new("struct attention *", fields), ffi().new("struct store *", fields)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._partials = torch.empty(0)
        self._layout: list[torch.Tensor] = []  # kept alive: C reads them

    def begin_step(self, inputs: ForwardInputs) -> None:
        block_starts = [0, *accumulate(map(len, inputs.block_table))]
        self._layout = [
            torch.tensor(values, dtype=torch.int32)
            for values in (inputs.query_starts, inputs.context_lens, list(chain(*inputs.block_table)), block_starts)
        ]
        addresses, num_threads = [values.data_ptr() for values in self._layout], torch.get_num_threads()
        for call in (self._call, self._store_call):
            call.query_starts, call.context_lens, call.blocks, call.block_starts = addresses
            call.num_chunks, call.num_threads = inputs.num_chunks, num_threads
        num_bytes = num_threads * self._library.penstock_workspace_bytes()
        if len(self._workspace) < num_bytes:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8)
            assert self._workspace.data_ptr() % 64 == 0, "it is read in whole lines"
        self._call.workspace = self._workspace.data_ptr()

    def store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor | None,
        v_TKD: torch.Tensor | None,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        of_keys = q_THD[:, :0] if k_TKD is None or v_TKD is None else k_TKD
        of_values = of_keys if v_TKD is None else v_TKD
        q_THD, of_keys, of_values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, of_keys, of_values))
        rotated_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        call = self._store_call
        call.queries, call.keys, call.values = heads(q_THD), heads(of_keys), heads(of_values)
        _, call.num_kv_heads, call.head_size = of_keys.shape
        call.rotated, call.num_heads = rotated_THD.data_ptr(), q_THD.shape[1]
        call.key_pages, call.value_pages = self.pages(layer)
        call.cosines = call.sines = 0
        if rotation is not None:
            cos, sin = rotation.cos_T1R.contiguous(), rotation.sin_T1R.contiguous()
            call.cosines, call.sines, call.half = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        self._library.penstock_store(call)
        return rotated_THD

    def pages(self, layer: int) -> tuple[int, int]:
        """Gives the addresses where the keys and the values of a layer begin."""
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
        call.num_kv_heads, call.head_size = self._storage.heads(layer)
        call.window, call.scale, call.softcap = rule.window or 0, rule.scale, rule.softcap or 0.0
        sinks = None if sinks_H is None else sinks_H.float().contiguous()
        call.sinks = address(sinks)
        self._hold_partials()
        self._library.penstock_attend(call)
        return out_THD

    def layout(self, num_heads: int) -> Any:
        """Describes the step that was begun, for all of its layers."""
        self._call.num_heads, self._call.window = num_heads, 0
        self._hold_partials()
        return self._call

    def _hold_partials(self) -> None:
        num_partials = self._library.penstock_num_partials(self._call)
        if len(self._partials) < num_partials:
            self._partials = torch.empty(num_partials)
        self._call.partials = self._partials.data_ptr()


def make_compiled(storage: KvStorage, block_size: int) -> CompiledAttention | None:
    """None where torch has to attend."""
    sizes = {keys.shape[-1] for keys in storage.keys}
    if not sizes or storage.keys[0].dtype != torch.bfloat16 or any(size % 2 for size in sizes):
        return None
    if max(sizes) > LARGEST_HEAD:
        return None
    kernels = c_kernels()
    return None if kernels is None else CompiledAttention(kernels, storage, block_size)
