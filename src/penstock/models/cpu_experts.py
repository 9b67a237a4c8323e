"""Mixtures whose experts are kept in few bits, in C: which experts a token has, and the sum of what they give."""

# T tokens, A experts of a token, E experts, M hidden size

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gguf.constants import GGMLQuantizationType as Type

from penstock.kernels.build import ffi
from penstock.kernels.calls import CKernels, address
from penstock.models.cpu_layers import GELU_TANH, workspace
from penstock.models.mxfp4 import Mxfp4Matrices
from penstock.models.projections import padded
from penstock.models.quantized import QuantizedMatrix, Weight

if TYPE_CHECKING:
    from penstock.models.experts import Experts

ACTIVATIONS = {"silu": "SILU", GELU_TANH: "GELU_TANH", "relu2": "SQUARED_RELU"}


def is_known(experts: Experts) -> bool:
    """Whether C computes this mixture."""
    return isinstance(experts.gate_up, QuantizedMatrix) and experts.activation in ACTIVATIONS


def mixture_fields(kernels: CKernels, experts: Experts, num_inputs: int) -> dict[str, Any]:
    """Fills a call for any tokens; those, their experts and where it adds to are left out."""
    spec, inner = experts.spec, experts.spec.intermediate_size
    matrices = dict.fromkeys(("gate", "up"), experts.gate_up) if spec.is_gated else {"up": experts.gate_up}
    sizes = {"num_inputs": num_inputs, "num_outputs": inner, "bias_stride": len(matrices) * inner}
    found = {
        name: {**_of_experts(matrix, index, spec.num_experts, inner), **sizes, "bias": _bias(experts, index * inner)}
        for index, (name, matrix) in enumerate(matrices.items())
    }
    found["down"] = {
        **_of_experts(experts.down, 0, spec.num_experts, num_inputs),
        "num_inputs": inner,
        "num_outputs": num_inputs,
        "bias": address(experts.down_bias_EM),
        "bias_stride": num_inputs,
    }
    if experts.streamed is not None:
        for fields, places in zip(found.values(), experts.streamed.addresses, strict=True):
            fields["places"] = places
    name = ACTIVATIONS[experts.activation] if spec.clamp is None else "CLAMPED_SILU"
    return {
        **found,
        "activation": getattr(kernels.library, name),
        "limit": spec.clamp or 0.0,
        "alpha": spec.clamp_alpha,
        "num_active": spec.num_active,
        "num_experts": spec.num_experts,
    }


def _bias(experts: Experts, first: int) -> int:
    return 0 if experts.gate_up_bias_EF is None else experts.gate_up_bias_EF[:, first:].data_ptr()


def _of_experts(matrix: Weight | Mxfp4Matrices, part: int, num_experts: int, num_outputs: int) -> dict[str, Any]:
    if isinstance(matrix, torch.Tensor):
        return {"weight": matrix.data_ptr(), "type": int(Type.BF16), "bytes": matrix[0].nbytes}
    assert not isinstance(matrix, Mxfp4Matrices), "those are a card's"
    memory, kind, _, count = matrix.places[part]
    assert count == num_experts * padded(num_outputs), "each expert has blocks of its own"
    return {"weight": memory.data_ptr(), "type": int(kind), "bytes": memory.nbytes // num_experts}


def routing_fields(experts: Experts) -> dict[str, Any]:
    router = experts.router
    return {
        "router": router.dense_OI.data_ptr(),
        "bias": address(router.bias_O),
        "num_inputs": router.weight_OI.shape[1],
        "num_experts": experts.spec.num_experts,
        "num_active": experts.spec.num_active,
        "is_over_all": not experts.spec.normalizes_chosen,
    }


def route(kernels: CKernels, experts: Experts, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses (weights, experts) by a softmax, both as C takes them."""
    shape = len(x_TM), experts.spec.num_active
    weights_TA, experts_TA = torch.empty(shape), torch.empty(shape, dtype=torch.int32)
    _score(kernels, experts, x_TM, {"experts": experts_TA.data_ptr(), "weights": weights_TA.data_ptr()})
    return weights_TA, experts_TA


def scores(kernels: CKernels, experts: Experts, x_TM: torch.Tensor) -> torch.Tensor:
    """Computes the router's logits, which are the same whatever is computed beside them."""
    return _score(kernels, experts, x_TM, {})


def _score(kernels: CKernels, experts: Experts, x_TM: torch.Tensor, chosen: dict[str, Any]) -> torch.Tensor:
    x_TM = x_TM.contiguous()
    logits_TE = torch.empty(len(x_TM), experts.spec.num_experts)
    places = {"rows": x_TM.data_ptr(), "logits": logits_TE.data_ptr(), "num_tokens": len(x_TM)}
    kernels.run("penstock_route", "struct routing *", routing_fields(experts) | places | chosen)
    return logits_TE


def add_mixed(
    kernels: CKernels,
    experts: Experts,
    out_TM: torch.Tensor,
    x_TM: torch.Tensor,
    weights_TA: torch.Tensor,
    experts_TA: torch.Tensor,
) -> None:
    """Adds to float32 rows what the experts give, in the order of the experts."""
    x_TM, weights_TA, experts_TA = x_TM.contiguous(), weights_TA.float().contiguous(), experts_TA.int().contiguous()
    fields = mixture_fields(kernels, experts, x_TM.shape[1]) | {
        "rows": x_TM.data_ptr(),
        "experts": experts_TA.data_ptr(),
        "weights": weights_TA.data_ptr(),
        "out": out_TM.data_ptr(),
        "num_tokens": len(x_TM),
    }
    fields["workspace"] = workspace(mixture_bytes(kernels, fields, torch.get_num_threads())).data_ptr()
    kernels.run("penstock_mix", "struct mixture *", fields)


def mixture_bytes(kernels: CKernels, fields: dict[str, Any], num_threads: int) -> int:
    """Counts what a call needs beside its rows."""
    call = ffi().new("struct mixture *", fields | {"num_threads": num_threads})
    return kernels.library.penstock_mixture_bytes(call)
