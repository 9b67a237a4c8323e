"""Norms, the gated activation and products in C, for bfloat16 on a CPU: one pass over memory each."""

# T tokens, I inputs, O outputs, F intermediate size, D normed dimensions

from __future__ import annotations

import ctypes
import threading

import torch

from penstock.attention.c_library import CKernels, c_kernels
from penstock.models.packed import PackedMatrix
from penstock.models.packing import GROUP, Format

GELU_TANH = "gelu_pytorch_tanh"
FEW_ROWS = 16  # of a product whose time is that of reading the matrix
MOST_ROWS = 512  # past these torch is as fast: it packs the matrix first

_of_thread = threading.local()


class NormCall(ctypes.Structure):
    """`struct norm` of cpu_calls.h."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("outer_stride", ctypes.c_int64),
        ("inner_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("parallel", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in ("num_outer", "num_inner", "width", "num_threads", "is_wide")],
        ("eps", ctypes.c_float),
    ]


class GateCall(ctypes.Structure):
    """`struct gate` of cpu_calls.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("gate_up", "output", "parallel")],
        *[(name, ctypes.c_int32) for name in ("num_rows", "width", "is_gelu", "num_threads")],
    ]


class ProductCall(ctypes.Structure):
    """`struct product` of cpu_calls.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("rows", "weight", "bias", "out", "wide", "workspace")],
        *[(name, ctypes.c_void_p) for name in ("group_sums", "parallel")],
        *[(name, ctypes.c_int32) for name in ("num_rows", "num_inputs", "num_outputs", "adds", "num_threads")],
        ("is_int4", ctypes.c_int32),
    ]


def kernels_for_product(x_TI: torch.Tensor, weight_OI: torch.Tensor | PackedMatrix) -> CKernels | None:
    """None where torch has to multiply: many rows of a matrix in the dtype, or another layout."""
    if isinstance(weight_OI, PackedMatrix):
        return kernels_for(x_TI) if x_TI.dim() == 2 else None
    if x_TI.dim() != 2 or weight_OI.dtype != x_TI.dtype or not weight_OI.is_contiguous():
        return None
    num_rows, num_inputs = x_TI.shape
    is_ours = num_rows <= FEW_ROWS or (num_rows <= MOST_ROWS and num_inputs % 2 == 0)
    return kernels_for(x_TI) if is_ours else None


def product_workspace(kernels: CKernels, num_rows: int, num_inputs: int, num_threads: int) -> torch.Tensor:
    """Kept for the Python thread that calls, since steps of two engines may run at once."""
    kernels.library.penstock_product_bytes.restype = ctypes.c_int64
    num_bytes = kernels.library.penstock_product_bytes(num_rows, num_inputs, num_threads)
    kept = getattr(_of_thread, "workspace", None)
    if kept is None or kept.numel() < num_bytes:
        kept = _of_thread.workspace = torch.empty(num_bytes, dtype=torch.uint8)
        assert kept.data_ptr() % 64 == 0, "panels are read in whole lines"
    return kept


def kernels_for(x: torch.Tensor) -> CKernels | None:
    """None where torch has to do the work."""
    return c_kernels() if x.dtype == torch.bfloat16 and x.device.type == "cpu" else None


def rms_norm(kernels: CKernels, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension of [tokens, D] or [tokens, heads, D], from bfloat16 or float32 to bfloat16."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    call = NormCall(
        input=x.data_ptr(),
        outer_stride=x.stride(0),
        inner_stride=x.stride(1) if x.dim() == 3 else 0,
        output=out.data_ptr(),
        weight=weight_D.data_ptr(),
        parallel=kernels.parallel,
        num_outer=x.shape[0],
        num_inner=x.shape[1] if x.dim() == 3 else 1,
        width=x.shape[-1],
        num_threads=torch.get_num_threads(),
        is_wide=x.dtype == torch.float32,
        eps=eps,
    )
    kernels.library.penstock_rms_norm(ctypes.byref(call))
    return out


def gated_activation(kernels: CKernels, gate_up_TF: torch.Tensor, kind: str) -> torch.Tensor:
    gate_up_TF = gate_up_TF.contiguous()
    num_rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out_TF = torch.empty(num_rows, width, dtype=gate_up_TF.dtype)
    call = GateCall(
        gate_up=gate_up_TF.data_ptr(),
        output=out_TF.data_ptr(),
        parallel=kernels.parallel,
        num_rows=num_rows,
        width=width,
        is_gelu=kind == GELU_TANH,
        num_threads=torch.get_num_threads(),
    )
    kernels.library.penstock_gated_activation(ctypes.byref(call))
    return out_TF


def multiply(
    kernels: CKernels,
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor | PackedMatrix,
    bias_O: torch.Tensor | None,
    add_to: torch.Tensor | None = None,  # None: the product goes to a tensor of its own
    *,
    is_wide: bool = False,  # float32, as it was summed
) -> torch.Tensor:
    x_TI = x_TI.contiguous()
    num_rows, num_inputs = x_TI.shape
    is_packed = isinstance(weight_OI, PackedMatrix)
    if add_to is None:
        out_TO = torch.empty(num_rows, weight_OI.shape[0], dtype=torch.float32 if is_wide else x_TI.dtype)
    else:
        out_TO, is_wide = add_to, add_to.dtype == torch.float32
    num_threads, has_few_rows = torch.get_num_threads(), num_rows <= FEW_ROWS
    group_sums = torch.empty(num_rows * (num_inputs // GROUP) if is_packed else 0)
    call = ProductCall(
        rows=x_TI.data_ptr(),
        weight=weight_OI.bytes.data_ptr() if is_packed else weight_OI.data_ptr(),
        bias=None if bias_O is None else bias_O.data_ptr(),
        out=None if is_wide else out_TO.data_ptr(),
        wide=out_TO.data_ptr() if is_wide else None,
        workspace=None if has_few_rows else product_workspace(kernels, num_rows, num_inputs, num_threads).data_ptr(),
        group_sums=group_sums.data_ptr(),
        parallel=kernels.parallel,
        num_rows=num_rows,
        num_inputs=num_inputs,
        num_outputs=weight_OI.shape[0],
        adds=add_to is not None,
        num_threads=num_threads,
        is_int4=is_packed and weight_OI.format is Format.INT4,
    )
    library = kernels.library
    if is_packed:
        library.penstock_multiply_packed(ctypes.byref(call))
    else:
        (library.penstock_multiply if has_few_rows else library.penstock_multiply_many)(ctypes.byref(call))
    return out_TO
