"""The gated delta rule as a layer, as in Qwen3-Next."""

# T tokens of the step, H value heads, K key size, V value size, C channels, W width of the convolution, M hidden size

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.attention.backend import ForwardInputs
from penstock.cache.storage import LayerState
from penstock.models.layer_specs import DeltaSpec
from penstock.models.layers import Linear, RmsNorm
from penstock.models.recurrence import RecurrentTokens, convolve, on_gpu, recur

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    spec: DeltaSpec
    qkvz: Linear
    beta_alpha: Linear
    conv_CW: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm: RmsNorm
    output: Linear

    @classmethod
    def empty(
        cls, spec: DeltaSpec, eps: float, linears: Mapping[str, Linear], *, dtype: torch.dtype, device: torch.device
    ) -> GatedDelta:
        heads = spec.num_value_heads
        return cls(
            spec=spec,
            qkvz=linears["recurrent_input"],
            beta_alpha=linears["recurrent_gates"],
            conv_CW=torch.empty(spec.num_channels, spec.conv_width, dtype=dtype, device=device),
            a_log_H=torch.empty(heads, device=device),
            dt_bias_H=torch.empty(heads, device=device),
            norm=RmsNorm(weight=torch.empty(spec.value_size, device=device), eps=eps),
            output=linears["recurrent_output"],
        )

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return self.qkvz, self.beta_alpha

    def __call__(self, x_TM: torch.Tensor, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        """[T, value width]: what the output projection is given. The states of the step's chunks advance."""
        if inputs.chunk_tables is not None:
            return on_gpu().gated_delta(self, x_TM, inputs.chunk_tables, state)
        qkv_TC, z_THV, beta_TH, alpha_TH = self._project(x_TM)
        mixed_TC = convolve(qkv_TC, self.conv_CW, None, inputs, state.tails_SWC)
        read_THV = recur(self._tokens(mixed_TC, beta_TH, alpha_TH), inputs, state.matrices_SHKV)
        normed_THV = self.norm(read_THV.to(x_TM.dtype))
        return (normed_THV * F.silu(z_THV.float())).to(x_TM.dtype).flatten(1)

    def _project(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes (q, k and v as channels, z, beta, alpha). Rows grouped by key head are taken apart."""
        spec = self.spec
        qkvz, beta_alpha = self.qkvz(x_TM), self.beta_alpha(x_TM)
        group = spec.num_value_heads // spec.num_key_heads
        if spec.is_grouped and isinstance(self.qkvz.weight_OI, torch.Tensor):  # codes are kept ungrouped
            sizes = [spec.key_size, spec.key_size, group * spec.value_size, group * spec.value_size]
            q, k, v, z = qkvz.unflatten(-1, (spec.num_key_heads, -1)).split(sizes, dim=-1)
            qkv_TC = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
        else:
            qkv_TC, z = qkvz.split([spec.num_channels, spec.value_width], dim=-1)
        if spec.is_grouped:
            beta, alpha = beta_alpha.unflatten(-1, (spec.num_key_heads, 2, group)).unbind(2)
            beta, alpha = beta.flatten(1), alpha.flatten(1)
        else:
            beta, alpha = beta_alpha.chunk(2, dim=-1)
        return qkv_TC, z.reshape(len(x_TM), spec.num_value_heads, spec.value_size), beta, alpha

    def _tokens(self, mixed_TC: torch.Tensor, beta_TH: torch.Tensor, alpha_TH: torch.Tensor) -> RecurrentTokens:
        spec = self.spec
        q, k, v = mixed_TC.split([spec.key_width, spec.key_width, spec.value_width], dim=-1)
        group = spec.num_value_heads // spec.num_key_heads

        def heads(x: torch.Tensor) -> torch.Tensor:
            x_NHK = x.unflatten(-1, (spec.num_key_heads, spec.key_size)).float()
            x_NHK = x_NHK * (x_NHK.square().sum(-1, keepdim=True) + L2_EPS).rsqrt_()
            return x_NHK.repeat_interleave(group, dim=1) if group > 1 else x_NHK

        return RecurrentTokens(
            q_NHK=heads(q).mul_(spec.key_size**-0.5),
            k_NHK=heads(k),
            v_NHV=v.unflatten(-1, (spec.num_value_heads, spec.value_size)).float(),
            beta_NH=beta_TH.float().sigmoid(),
            decay_NH=-self.a_log_H.exp() * F.softplus(alpha_TH.float() + self.dt_bias_H),
        )

    def destinations(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name in the checkpoint, where it goes)."""
        yield f"{prefix}.conv1d.weight", self.conv_CW[:, None]
        yield f"{prefix}.A_log", self.a_log_H
        yield f"{prefix}.dt_bias", self.dt_bias_H
        yield f"{prefix}.norm.weight", self.norm.weight
