"""A state space layer in the style of Mamba 2, as in Bamba and Granite's hybrids."""

# T tokens of the step, H heads, P head size, G groups of heads, I inner width, C channels, W width of the convolution,
# M hidden size

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.attention.backend import ForwardInputs
from penstock.cache.storage import LayerState
from penstock.models.layer_specs import MambaSpec
from penstock.models.layers import Linear, RmsNorm
from penstock.models.recurrence import RecurrentTokens, convolve, on_gpu, recur


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    spec: MambaSpec
    input: Linear  # gate, channels of the convolution, time steps
    conv_CW: torch.Tensor
    conv_bias_C: torch.Tensor | None
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    skip_H: torch.Tensor
    norm: RmsNorm | None
    output: Linear

    @classmethod
    def empty(
        cls, spec: MambaSpec, eps: float, linears: Mapping[str, Linear], *, dtype: torch.dtype, device: torch.device
    ) -> Mamba:
        channels = spec.num_channels
        return cls(
            spec=spec,
            input=linears["recurrent_input"],
            conv_CW=torch.empty(channels, spec.conv_width, dtype=dtype, device=device),
            conv_bias_C=torch.empty(channels, dtype=dtype, device=device) if spec.has_conv_bias else None,
            a_log_H=torch.empty(spec.num_heads, device=device),
            dt_bias_H=torch.empty(spec.num_heads, device=device),
            skip_H=torch.empty(spec.num_heads, device=device),
            norm=RmsNorm(weight=torch.empty(spec.inner_width, device=device), eps=eps) if spec.has_norm else None,
            output=linears["recurrent_output"],
        )

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return (self.input,)

    def __call__(self, x_TM: torch.Tensor, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        """[T, inner width]: what the output projection is given. The states of the step's chunks advance."""
        spec, projected = self.spec, self._project(x_TM)
        if inputs.chunk_tables is not None:
            return on_gpu().mamba(self, projected, inputs.chunk_tables, state)
        gate, channels_TC, steps_TH = projected.split([spec.inner_width, spec.num_channels, spec.num_heads], -1)
        mixed_TC = convolve(channels_TC, self.conv_CW, self.conv_bias_C, inputs, state.tails_SWC)
        x, written_along, read_by = mixed_TC.split([spec.inner_width, spec.group_width, spec.group_width], -1)
        x_THP = x.unflatten(-1, (spec.num_heads, spec.head_size)).float()
        time_TH = F.softplus(steps_TH.float() + self.dt_bias_H).clamp_(*spec.time_step_limits)
        tokens = RecurrentTokens(
            q_NHK=self._by_head(read_by),
            k_NHK=self._by_head(written_along),
            v_NHV=x_THP * time_TH[..., None],
            decay_NH=-self.a_log_H.exp() * time_TH,
        )
        read_THP = recur(tokens, inputs, state.matrices_SHKV).addcmul_(x_THP, self.skip_H[:, None])
        read_TI, gate_TI = read_THP.flatten(1), F.silu(gate.float())
        if spec.norms_before_gate:
            return self._normed(read_TI).mul_(gate_TI).to(x_TM.dtype)
        return self._normed(read_TI * gate_TI).to(x_TM.dtype)

    def _project(self, x_TM: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        projected = self.input(x_TM if spec.input_scale == 1.0 else x_TM * spec.input_scale)
        if spec.section_scales:
            widths = [spec.inner_width, spec.inner_width, spec.group_width, spec.group_width, spec.num_heads]
            for section, scale in zip(projected.split(widths, -1), spec.section_scales, strict=True):
                section *= scale
        return projected

    def _normed(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Normalises each group of heads by itself; transformers before 5.23 took them all together."""
        if self.norm is None:
            return x_TI
        if self.spec.num_groups == 1:
            return self.norm(x_TI)
        x_TGI = x_TI.unflatten(-1, (self.spec.num_groups, -1))
        scale_TG1 = x_TGI.square().mean(-1, keepdim=True).add_(self.norm.eps).rsqrt_()
        return (x_TGI * scale_TG1).flatten(1).mul_(self.norm.weight)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, state size] in float32; the heads of a group share it."""
        spec = self.spec
        x = x.unflatten(-1, (spec.num_groups, spec.state_size)).float()
        return x.repeat_interleave(spec.num_heads // spec.num_groups, dim=1)

    def destinations(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name in the checkpoint, where it goes)."""
        yield f"{prefix}.conv1d.weight", self.conv_CW[:, None]
        if self.conv_bias_C is not None:
            yield f"{prefix}.conv1d.bias", self.conv_bias_C
        yield f"{prefix}.A_log", self.a_log_H
        yield f"{prefix}.dt_bias", self.dt_bias_H
        yield f"{prefix}.D", self.skip_H
        if self.norm is not None:
            yield f"{prefix}.norm.weight", self.norm.weight
