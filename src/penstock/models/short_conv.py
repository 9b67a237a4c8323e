"""A gated short convolution as a layer, as in LFM2: its state is the few inputs before the next token."""

# T tokens of the step, C channels (the hidden size), W width of the convolution, M hidden size

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from penstock.attention.backend import ForwardInputs
from penstock.cache.storage import LayerState
from penstock.models.layer_specs import ConvSpec
from penstock.models.layers import Linear
from penstock.models.recurrence import convolve


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    spec: ConvSpec
    input: Linear  # gate before, gate after, channels
    conv_CW: torch.Tensor
    conv_bias_C: torch.Tensor | None
    output: Linear

    @classmethod
    def empty(
        cls, spec: ConvSpec, linears: Mapping[str, Linear], *, dtype: torch.dtype, device: torch.device
    ) -> ShortConv:
        return cls(
            spec=spec,
            input=linears["recurrent_input"],
            conv_CW=torch.empty(spec.num_channels, spec.conv_width, dtype=dtype, device=device),
            conv_bias_C=torch.empty(spec.num_channels, dtype=dtype, device=device) if spec.has_bias else None,
            output=linears["recurrent_output"],
        )

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return (self.input,)

    def __call__(self, x_TM: torch.Tensor, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        """[T, C]: what the output projection is given. The tails of the step's chunks advance."""
        before_TC, after_TC, x_TC = self.input(x_TM).chunk(3, dim=-1)
        mixed_TC = convolve(before_TC * x_TC, self.conv_CW, self.conv_bias_C, inputs, state.tails_SWC, activates=False)
        return mixed_TC.mul_(after_TC)

    def destinations(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name in the checkpoint, where it goes)."""
        yield f"{prefix}.conv.weight", self.conv_CW[:, None]
        if self.conv_bias_C is not None:
            yield f"{prefix}.conv.bias", self.conv_bias_C
