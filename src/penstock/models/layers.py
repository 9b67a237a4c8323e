"""The parts of a decoder: plain tensors and the functions over them."""

# T tokens, M hidden size, I inputs, O outputs, F intermediate size

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from penstock.kernels.calls import c_kernels
from penstock.models import cpu_layers
from penstock.models.quantized import QuantizedMatrix, Weight


def product(x_TI: torch.Tensor, weight_OI: Weight, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    if kernels := cpu_layers.kernels_for_product(x_TI, weight_OI):
        return cpu_layers.multiply(kernels, x_TI, weight_OI, bias_O)
    if isinstance(weight_OI, QuantizedMatrix):
        return _by_tiles(
            weight_OI,
            x_TI.dtype,
            lambda outputs, tile_OI: product(x_TI, tile_OI, None if bias_O is None else bias_O[outputs]),
        )
    if bias_O is None and x_TI.is_cuda and _gpu_products().is_skinny(x_TI, weight_OI):
        return _gpu_products().product(x_TI, weight_OI)
    return F.linear(x_TI, weight_OI, bias_O)


def wide_product(x_TI: torch.Tensor, weight_OI: Weight) -> torch.Tensor:
    """Multiplies to float32: as it was summed, where that can be had, else rounded to the model's dtype before."""
    if kernels := cpu_layers.kernels_for_product(x_TI, weight_OI):
        return cpu_layers.multiply(kernels, x_TI, weight_OI, None, is_wide=True)
    if isinstance(weight_OI, QuantizedMatrix):
        return _by_tiles(weight_OI, x_TI.dtype, lambda _, tile_OI: wide_product(x_TI, tile_OI))
    return product(x_TI, weight_OI).float()


def _by_tiles(
    weight_OI: QuantizedMatrix, dtype: torch.dtype, multiply: Callable[[slice, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What `multiply` gives for the outputs of each tile, side by side."""
    out_TO: torch.Tensor | None = None
    for outputs, tile_OI in weight_OI.tiles(dtype):
        part = multiply(outputs, tile_OI)
        if len(tile_OI) == len(weight_OI):
            return part
        if out_TO is None:
            out_TO = torch.empty(*part.shape[:-1], len(weight_OI), dtype=part.dtype)
        out_TO[..., outputs] = part
    assert out_TO is not None
    return out_TO


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    weight_OI: Weight
    bias_O: torch.Tensor | None
    order_I: torch.Tensor | None = None  # of the inputs, as codes are stored; None: their own

    @classmethod
    def empty(cls, num_out: int, num_in: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        weight = torch.empty(num_out, num_in, dtype=dtype, device=device)
        return cls(weight_OI=weight, bias_O=torch.empty(num_out, dtype=dtype, device=device) if bias else None)

    @property
    def dense_OI(self) -> torch.Tensor:
        """Gives the weight where it is never kept in few bits."""
        assert isinstance(self.weight_OI, torch.Tensor), "this matrix stays in the model's dtype"
        return self.weight_OI

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return product(self._ordered(x_TI), self.weight_OI, self.bias_O)

    def add_to(self, out_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        """Adds the product in place, within the product itself where there is no bias."""
        x_TI, weight_OI = self._ordered(x_TI), self.weight_OI
        if out_TO.is_contiguous() and (kernels := cpu_layers.kernels_for_product(x_TI, weight_OI)):
            cpu_layers.multiply(kernels, x_TI, weight_OI, self.bias_O, add_to=out_TO)
        elif isinstance(weight_OI, QuantizedMatrix):
            for outputs, tile_OI in weight_OI.tiles(x_TI.dtype):
                bias = None if self.bias_O is None else self.bias_O[outputs]
                Linear(weight_OI=tile_OI, bias_O=bias).add_to(out_TO[:, outputs], x_TI)
        elif self.bias_O is None and x_TI.is_cuda and _gpu_products().is_skinny(x_TI, weight_OI):
            _gpu_products().add_product(out_TO, x_TI, weight_OI)
        elif self.bias_O is None and out_TO.dtype == x_TI.dtype and (x_TI.is_cuda or cpu_layers.kernels_for(x_TI)):
            out_TO.addmm_(x_TI, weight_OI.t())
        else:
            out_TO += product(x_TI, weight_OI, self.bias_O)

    def _ordered(self, x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI if self.order_I is None else x_TI[:, self.order_I]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    first: Linear  # gate and up, or up alone
    down: Linear

    @staticmethod
    def of(first: Linear, down: Linear, activation: str, *, is_gated: bool) -> Mlp:
        if is_gated:
            return GatedMlp(first=first, down=down, activation=activation)
        return PlainMlp(first=first, down=down, activation=plain_activation(activation))

    def __call__(self, x_TM: torch.Tensor) -> torch.Tensor:
        return self.down(self.inner(x_TM))

    def add_to(self, out_TM: torch.Tensor, x_TM: torch.Tensor) -> None:
        self.down.add_to(out_TM, self.inner(x_TM))

    def inner(self, x_TM: torch.Tensor) -> torch.Tensor:
        """Computes what the second matrix is given."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp(Mlp):
    activation: str
    gate_scale: float = 1.0

    def inner(self, x_TM: torch.Tensor) -> torch.Tensor:
        gate_up_TF = self.first(x_TM)
        if self.gate_scale != 1.0:
            gate_up_TF.chunk(2, dim=-1)[0].mul_(self.gate_scale)
        return gated_activation(gate_up_TF, self.activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlp(Mlp):
    """A feed-forward part without a gate."""

    activation: Callable[[torch.Tensor], torch.Tensor]

    def inner(self, x_TM: torch.Tensor) -> torch.Tensor:
        return self.activation(self.first(x_TM))


@dataclass(frozen=True, slots=True, kw_only=True)
class Xielu:
    """An activation whose growth on both sides of zero is learnt."""

    alpha_p: torch.Tensor
    alpha_n: torch.Tensor
    beta: torch.Tensor
    eps: torch.Tensor

    @classmethod
    def empty(cls, *, dtype: torch.dtype, device: torch.device) -> Xielu:
        """The first two are stored as vectors of one number, the others as numbers."""
        vectors, numbers = (torch.empty(2, *shape, dtype=dtype, device=device) for shape in ((1,), ()))
        return cls(alpha_p=vectors[0], alpha_n=vectors[1], beta=numbers[0], eps=numbers[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        below = torch.expm1(torch.minimum(x, self.eps)).sub_(x).mul_(self.beta + F.softplus(self.alpha_n))
        return torch.where(x > 0, F.softplus(self.alpha_p) * x * x, below).add_(self.beta * x)


def plain_activation(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Finds an activation that multiplies nothing and has nothing to load."""
    if kind == "relu2":
        return lambda x: F.relu(x).square_()
    if kind == "silu":
        return F.silu
    return partial(F.gelu, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """Computed in float32 whatever the model's dtype; the weight holds its offset already."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normalises x and gives it in `dtype`, or None: that of x."""
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(dtype or x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """Computed in float32 whatever the model's dtype; the weight holds its offset already."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normalises x and gives it in `dtype`, or None: that of x."""
        dtype = dtype or x.dtype
        if x.is_cuda:
            return _on_gpu().rms_norm(x, self.weight, self.eps)
        if x.dim() in (2, 3) and dtype == torch.bfloat16 and (kernels := c_kernels()):
            return cpu_layers.rms_norm(kernels, x, self.weight, self.eps)
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).mul_(self.weight).to(dtype)


def gated_activation(gate_up_TF: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) * up, of the two halves of one product."""
    if gate_up_TF.is_cuda:
        return _on_gpu().gated_activation(gate_up_TF, kind)
    if kind in ("silu", cpu_layers.GELU_TANH) and (kernels := cpu_layers.kernels_for(gate_up_TF)):
        return cpu_layers.gated_activation(kernels, gate_up_TF, kind)
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return plain_activation(kind)(gate).mul_(up)


@cache
def _on_gpu() -> Any:
    """Imported when the first tensor lies on a GPU: Triton is not installed everywhere."""
    from penstock.kernels import triton_layers

    return triton_layers


@cache
def _gpu_products() -> Any:
    from penstock.kernels import triton_products

    return triton_products
