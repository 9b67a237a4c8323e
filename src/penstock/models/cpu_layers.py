"""Norms, the gated activation and products in C, for bfloat16 on a CPU: one pass over memory each."""

# T tokens, I inputs, O outputs, F intermediate size, D normed dimensions

from __future__ import annotations

import threading
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType as Type

from penstock.kernels.calls import CKernels, address, c_kernels
from penstock.models.quantization import HALF_GROUP
from penstock.models.quantized import QuantizedMatrix, Weight

GELU_TANH = "gelu_pytorch_tanh"
MAX_ROWS = 512  # past these torch is as fast: it packs the matrix first

_of_thread = threading.local()


def kernels_for(x: torch.Tensor) -> CKernels | None:
    """None where torch has to do the work."""
    return c_kernels() if x.dtype == torch.bfloat16 and x.is_cpu else None


def kernels_for_product(x_TI: torch.Tensor, weight_OI: Weight) -> CKernels | None:
    """None where torch has to multiply: many rows of a matrix in the dtype, or another layout."""
    kernels = kernels_for(x_TI) if x_TI.dim() == 2 else None
    if kernels is None or isinstance(weight_OI, QuantizedMatrix):
        return kernels
    if weight_OI.dtype != x_TI.dtype or not weight_OI.is_contiguous():
        return None
    num_rows, num_inputs = x_TI.shape
    is_ours = num_rows <= kernels.library.FEW_ROWS or (num_rows <= MAX_ROWS and num_inputs % 2 == 0)
    return kernels if is_ours or kernels.instructions.multiplies_all else None


def workspace(num_bytes: int) -> torch.Tensor:
    """Is kept for the Python thread that calls, since steps of two engines may run at once."""
    kept = getattr(_of_thread, "workspace", None)
    if kept is None or kept.numel() < num_bytes:
        kept = _of_thread.workspace = torch.empty(num_bytes, dtype=torch.uint8)
        assert kept.data_ptr() % 64 == 0, "panels are read in whole lines"
    return kept


def norm_fields(
    x: torch.Tensor, weight_D: torch.Tensor, out: torch.Tensor, eps: float, sums: torch.Tensor | None = None
) -> dict[str, Any]:
    shape, strides = x.shape, x.stride()
    has_heads = len(shape) == 3
    return {
        "rows": x.data_ptr(),
        "outer_stride": strides[0],
        "inner_stride": strides[1] if has_heads else 0,
        "out": out.data_ptr(),
        "weight": weight_D.data_ptr(),
        "num_outer": shape[0],
        "num_inner": shape[1] if has_heads else 1,
        "width": shape[-1],
        "is_wide": x.dtype == torch.float32,
        "sums": address(sums),
        "sums_are_wide": sums is not None and sums.dtype == torch.float32,
        "eps": eps,
    }


def gate_fields(gate_up_TF: torch.Tensor, out_TF: torch.Tensor, kind: str) -> dict[str, Any]:
    num_rows, width = out_TF.shape
    places = {"gate_up": gate_up_TF.data_ptr(), "out": out_TF.data_ptr()}
    return {**places, "num_rows": num_rows, "width": width, "activation": int(kind == GELU_TANH)}


def product_fields(
    x_TI: torch.Tensor, weight_OI: Weight, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *, adds: bool
) -> list[dict[str, Any]]:
    """One product for each part of a matrix. Leaves out the workspace, and the sums of groups that codes need."""
    num_rows, num_inputs = x_TI.shape
    parts = [(weight_OI, Type.BF16, 0, out_TO.shape[1])] if isinstance(weight_OI, torch.Tensor) else weight_OI.places
    return [
        {
            "rows": x_TI.data_ptr(),
            "weight": memory.data_ptr(),
            "type": int(kind),
            "bias": 0 if bias_O is None else bias_O[first:].data_ptr(),
            "wide" if out_TO.dtype == torch.float32 else "out": out_TO[:, first:].data_ptr(),
            "num_rows": num_rows,
            "num_inputs": num_inputs,
            "num_outputs": num_outputs,
            "stride": out_TO.stride(0),
            "adds": adds,
        }
        for memory, kind, first, num_outputs in parts
    ]


def rms_norm(kernels: CKernels, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the last dimension of [tokens, D] or [tokens, heads, D], bfloat16 or float32, to bfloat16."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    kernels.run("penstock_rms_norm", "struct norm *", norm_fields(x, weight_D, out, eps))
    return out


def gated_activation(kernels: CKernels, gate_up_TF: torch.Tensor, kind: str) -> torch.Tensor:
    gate_up_TF = gate_up_TF.contiguous()
    num_rows, width = gate_up_TF.shape
    out_TF = torch.empty(num_rows, width // 2, dtype=gate_up_TF.dtype)
    kernels.run("penstock_gated_activation", "struct gate *", gate_fields(gate_up_TF, out_TF, kind))
    return out_TF


def multiply(
    kernels: CKernels,
    x_TI: torch.Tensor,
    weight_OI: Weight,
    bias_O: torch.Tensor | None,
    add_to: torch.Tensor | None = None,  # None: the product goes to a tensor of its own
    *,
    is_wide: bool = False,  # float32, as it was summed
) -> torch.Tensor:
    x_TI = x_TI.contiguous()
    num_rows, num_inputs = x_TI.shape
    out_TO = add_to
    if out_TO is None:
        out_TO = torch.empty(num_rows, weight_OI.shape[0], dtype=torch.float32 if is_wide else x_TI.dtype)
    shared: dict[str, Any] = {}
    if isinstance(weight_OI, QuantizedMatrix):
        group_sums = torch.empty(num_rows * (num_inputs // HALF_GROUP))
        shared["group_sums"] = group_sums.data_ptr()
    if num_rows > kernels.library.FEW_ROWS:
        num_bytes = kernels.library.penstock_product_bytes(num_rows, num_inputs, torch.get_num_threads())
        shared["workspace"] = workspace(num_bytes).data_ptr()
    for fields in product_fields(x_TI, weight_OI, bias_O, out_TO, adds=add_to is not None):
        kernels.run("penstock_multiply", "struct product *", fields | shared)
    return out_TO
