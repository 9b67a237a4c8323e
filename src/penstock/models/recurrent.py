"""The gated delta rule: a layer that carries a matrix per head from token to token instead of keys and values.

A chunk of any length advances the state. Within a chunk, tiles of tokens are solved at once: what a token writes
depends on what the tokens before it wrote, which is a triangular system.
"""

# T tokens of the step, N tokens of a chunk or tile, B decodes, H value heads, K key size, V value size, C channels,
# W width of the convolution, M hidden size

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.attention.backend import ForwardInputs
from penstock.cache.storage import LayerState
from penstock.models.layers import Linear, RmsNorm
from penstock.models.spec import DeltaSpec

TILE = 64
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """What the rule needs of some tokens, in float32; `decay` is a logarithm."""

    q_NHK: torch.Tensor
    k_NHK: torch.Tensor
    v_NHV: torch.Tensor
    beta_NH: torch.Tensor
    decay_NH: torch.Tensor

    def rows(self, rows: slice | torch.Tensor) -> _Tokens:
        return _Tokens(
            q_NHK=self.q_NHK[rows],
            k_NHK=self.k_NHK[rows],
            v_NHV=self.v_NHV[rows],
            beta_NH=self.beta_NH[rows],
            decay_NH=self.decay_NH[rows],
        )


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
        cls, spec: DeltaSpec, hidden_size: int, norm_eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> GatedDelta:
        def linear(num_out: int, num_in: int) -> Linear:
            return Linear.empty(num_out, num_in, bias=False, dtype=dtype, device=device)

        heads = spec.num_value_heads
        return cls(
            spec=spec,
            qkvz=linear(spec.num_channels + spec.value_width, hidden_size),
            beta_alpha=linear(2 * heads, hidden_size),
            conv_CW=torch.empty(spec.num_channels, spec.conv_width, dtype=dtype, device=device),
            a_log_H=torch.empty(heads, device=device),
            dt_bias_H=torch.empty(heads, device=device),
            norm=RmsNorm(weight=torch.empty(spec.value_size, device=device), eps=norm_eps),
            output=linear(hidden_size, spec.value_width),
        )

    def __call__(self, x_TM: torch.Tensor, inputs: ForwardInputs, state: LayerState) -> torch.Tensor:
        """[T, value width]: what the output projection is given. The states of the step's chunks advance."""
        qkv_TC, z_THV, beta_TH, alpha_TH = self._project(x_TM)
        mixed_TC = torch.empty_like(qkv_TC)
        out_THV = torch.empty(z_THV.shape, dtype=torch.float32, device=x_TM.device)
        singles = inputs.single_tokens()
        for rows, slot in inputs.longer_chunks():
            mixed_TC[rows] = _convolved(qkv_TC[rows], self.conv_CW, state.tails_SWC[slot])
        if singles is not None:
            rows_B, slots_B = singles
            mixed_TC[rows_B] = _convolved_singles(qkv_TC[rows_B], self.conv_CW, state.tails_SWC, slots_B)
        tokens = self._tokens(mixed_TC, beta_TH, alpha_TH)
        for rows, slot in inputs.longer_chunks():
            out_THV[rows] = advance(tokens.rows(rows), state.matrices_SHKV[slot])
        if singles is not None:
            rows_B, slots_B = singles
            out_THV[rows_B] = advance_singles(tokens.rows(rows_B), state.matrices_SHKV, slots_B)
        normed_THV = self.norm(out_THV.to(x_TM.dtype))
        return (normed_THV * F.silu(z_THV.float())).to(x_TM.dtype).flatten(1)

    def _project(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(q, k and v as channels, z, beta, alpha). Checkpoints that group rows by key head are taken apart here."""
        spec = self.spec
        qkvz, beta_alpha = self.qkvz(x_TM), self.beta_alpha(x_TM)
        if spec.is_grouped:
            group = spec.num_value_heads // spec.num_key_heads
            sizes = [spec.key_size, spec.key_size, group * spec.value_size, group * spec.value_size]
            q, k, v, z = qkvz.unflatten(-1, (spec.num_key_heads, -1)).split(sizes, dim=-1)
            qkv_TC = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
            beta, alpha = beta_alpha.unflatten(-1, (spec.num_key_heads, 2, group)).unbind(2)
            beta, alpha = beta.flatten(1), alpha.flatten(1)
        else:
            qkv_TC, z = qkvz.split([spec.num_channels, spec.value_width], dim=-1)
            beta, alpha = beta_alpha.chunk(2, dim=-1)
        return qkv_TC, z.reshape(len(x_TM), spec.num_value_heads, spec.value_size), beta, alpha

    def _tokens(self, mixed_TC: torch.Tensor, beta_TH: torch.Tensor, alpha_TH: torch.Tensor) -> _Tokens:
        spec = self.spec
        q, k, v = mixed_TC.split([spec.key_width, spec.key_width, spec.value_width], dim=-1)
        group = spec.num_value_heads // spec.num_key_heads

        def heads(x: torch.Tensor) -> torch.Tensor:
            x_NHK = x.unflatten(-1, (spec.num_key_heads, spec.key_size)).float()
            x_NHK = x_NHK * (x_NHK.square().sum(-1, keepdim=True) + L2_EPS).rsqrt_()
            return x_NHK.repeat_interleave(group, dim=1) if group > 1 else x_NHK

        return _Tokens(
            q_NHK=heads(q).mul_(spec.key_size**-0.5),
            k_NHK=heads(k),
            v_NHV=v.unflatten(-1, (spec.num_value_heads, spec.value_size)).float(),
            beta_NH=beta_TH.float().sigmoid(),
            decay_NH=-self.a_log_H.exp() * F.softplus(alpha_TH.float() + self.dt_bias_H),
        )

    def destinations(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the checkpoint, where it goes)."""
        spec, heads = self.spec, self.spec.num_value_heads
        if spec.is_grouped:
            yield f"{prefix}.in_proj_qkvz.weight", self.qkvz.weight_OI
            yield f"{prefix}.in_proj_ba.weight", self.beta_alpha.weight_OI
        else:
            yield f"{prefix}.in_proj_qkv.weight", self.qkvz.weight_OI[: spec.num_channels]
            yield f"{prefix}.in_proj_z.weight", self.qkvz.weight_OI[spec.num_channels :]
            yield f"{prefix}.in_proj_b.weight", self.beta_alpha.weight_OI[:heads]
            yield f"{prefix}.in_proj_a.weight", self.beta_alpha.weight_OI[heads:]
        yield f"{prefix}.conv1d.weight", self.conv_CW[:, None]
        yield f"{prefix}.A_log", self.a_log_H
        yield f"{prefix}.dt_bias", self.dt_bias_H
        yield f"{prefix}.norm.weight", self.norm.weight
        yield f"{prefix}.out_proj.weight", self.output.weight_OI


def _convolved(x_NC: torch.Tensor, conv_CW: torch.Tensor, tail_WC: torch.Tensor) -> torch.Tensor:
    """Causal, each channel by itself; `tail` holds the inputs before the chunk and then those before the next."""
    padded = torch.cat([tail_WC, x_NC])
    tail_WC.copy_(padded[len(x_NC) :])
    out_NC = padded[: len(x_NC)] * conv_CW[:, 0]
    for step in range(1, conv_CW.shape[1]):
        out_NC.addcmul_(padded[step : step + len(x_NC)], conv_CW[:, step])
    return F.silu(out_NC)


def _convolved_singles(
    x_BC: torch.Tensor, conv_CW: torch.Tensor, tails_SWC: torch.Tensor, slots_B: torch.Tensor
) -> torch.Tensor:
    padded_BWC = torch.cat([tails_SWC[slots_B], x_BC[:, None]], dim=1)
    tails_SWC[slots_B] = padded_BWC[:, 1:]
    return F.silu((padded_BWC * conv_CW.t()).sum(1))


def advance(tokens: _Tokens, matrix_HKV: torch.Tensor) -> torch.Tensor:
    """[N, H, V]: what the tokens of one chunk read, in order; the matrix is advanced in place."""
    out_NHV = torch.empty_like(tokens.v_NHV)
    for first in range(0, len(out_NHV), TILE):
        rows = slice(first, first + TILE)
        out_NHV[rows] = _advance_tile(tokens.rows(rows), matrix_HKV)
    return out_NHV


def _advance_tile(tokens: _Tokens, matrix_HKV: torch.Tensor) -> torch.Tensor:
    q_HNK, k_HNK, v_HNV = (x.transpose(0, 1) for x in (tokens.q_NHK, tokens.k_NHK, tokens.v_NHV))
    beta_HN1 = tokens.beta_NH.t()[..., None]
    total_HN = tokens.decay_NH.cumsum(0).t()
    since_start_HN1 = total_HN.exp()[..., None]
    # How much of what token j wrote is left at token i; nothing of what comes later.
    later_HNN = (total_HN[:, :, None] - total_HN[:, None, :]).tril_().exp_().tril_()
    seen_HNK = k_HNK * since_start_HN1
    wanted_HNV = beta_HN1 * (v_HNV - seen_HNK @ matrix_HKV)
    system_HNN = beta_HN1 * (k_HNK @ k_HNK.transpose(1, 2)) * later_HNN
    written_HNV = torch.linalg.solve_triangular(system_HNN, wanted_HNV, upper=False, unitriangular=True)
    read_HNV = (q_HNK * since_start_HN1) @ matrix_HKV
    read_HNV += (q_HNK @ k_HNK.transpose(1, 2) * later_HNN) @ written_HNV
    until_end_HN1 = (total_HN[:, -1:] - total_HN).exp()[..., None]
    matrix_HKV.mul_(since_start_HN1[:, -1:])
    matrix_HKV.baddbmm_((k_HNK * until_end_HN1).transpose(1, 2), written_HNV)
    return read_HNV.transpose(0, 1)


def advance_singles(tokens: _Tokens, matrices_SHKV: torch.Tensor, slots_B: torch.Tensor) -> torch.Tensor:
    """[B, H, V]: one token for each of many sequences."""
    matrices_BHKV = matrices_SHKV[slots_B].mul_(tokens.decay_NH.exp()[..., None, None])
    k_BHK1, q_BHK1 = tokens.k_NHK[..., None], tokens.q_NHK[..., None]
    held_BHV = (matrices_BHKV * k_BHK1).sum(-2)
    written_BHV = (tokens.v_NHV - held_BHV) * tokens.beta_NH[..., None]
    matrices_BHKV.addcmul_(k_BHK1, written_BHV[..., None, :])
    matrices_SHKV[slots_B] = matrices_BHKV
    return (matrices_BHKV * q_BHK1).sum(-2)
