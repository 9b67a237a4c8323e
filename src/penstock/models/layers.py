"""The parts of a decoder: plain tensors and the functions over them."""

# T tokens, I inputs, O outputs, F intermediate size

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None

    @classmethod
    def empty(cls, num_out: int, num_in: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        weight = torch.empty(num_out, num_in, dtype=dtype, device=device)
        return cls(weight_OI=weight, bias_O=torch.empty(num_out, dtype=dtype, device=device) if bias else None)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """Computed in float32 whatever the model's dtype; the weight holds its offset already."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).mul_(self.weight).to(x.dtype)


def gated_activation(gate_up_TF: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) * up, of the two halves of one product."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none").mul_(up)
