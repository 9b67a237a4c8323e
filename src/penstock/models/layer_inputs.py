"""Inputs that each layer has for itself: its part of a second row of each token, and of a projection of the first."""

# T tokens, V vocabulary, L layers, P width of a part, M hidden size

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.models.layers import Linear, RmsNorm
from penstock.models.quantized import QuantizedMatrix, Weight


def rows_of(table_VM: Weight, ids_T: torch.Tensor, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    """Looks up a row for each token. The factor is rounded to the model's dtype, as the reference does."""
    rows_TM = table_VM.rows(ids_T, dtype) if isinstance(table_VM, QuantizedMatrix) else table_VM[ids_T]
    if scale is not None:
        rows_TM *= torch.tensor(scale, dtype=dtype)
    return rows_TM


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    table_VX: Weight  # the parts of all layers side by side
    context: Linear
    norm: RmsNorm
    padding: int

    def __call__(self, ids_T: torch.Tensor, embedded_TM: torch.Tensor, media_N: torch.Tensor | None) -> torch.Tensor:
        """[T, L, P]; `media_N`: rows that hold images, which have no token."""
        if media_N is not None:
            ids_T = ids_T.index_fill(0, media_N, self.padding)
        width = self.norm.weight.numel()
        context_TLP = self.norm(self.context(embedded_TM).unflatten(-1, (-1, width)))
        context_TLP += rows_of(self.table_VX, ids_T, embedded_TM.dtype, width**0.5).view_as(context_TLP)
        return context_TLP.mul_(2**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGate:
    """What a layer adds last: its input, gated by the hidden state."""

    gate: Linear
    output: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    norm: RmsNorm

    def add_to(self, hidden_TM: torch.Tensor, input_TP: torch.Tensor) -> None:
        gated_TP = self.activation(self.gate(hidden_TM.to(input_TP.dtype))) * input_TP
        hidden_TM += self.norm(self.output(gated_TP))
