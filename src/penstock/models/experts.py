"""A mixture of experts: a router picks a few feed-forward parts for each token, and each part runs once per step."""

# T tokens, R rows (a token once for each of its experts), E experts, A experts of a token, M hidden size, F inner size

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F

from penstock.models.layer_specs import ExpertsSpec, SigmoidRouting
from penstock.models.layers import (
    GatedMlp,
    Linear,
    PlainMlp,
    RmsNorm,
    gated_activation,
    plain_activation,
    product,
    wide_product,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Weights of all experts in one tensor each; gate and up rows lie one after the other, or alternate."""

    spec: ExpertsSpec
    activation: str
    router: Linear
    gate_up_EFM: torch.Tensor
    down_EMF: torch.Tensor
    gate_up_bias_EF: torch.Tensor | None
    down_bias_EM: torch.Tensor | None
    shared: GatedMlp | PlainMlp | None  # an expert that every token has
    shared_gate: Linear | None
    score_bias_E: torch.Tensor | None = None
    routed_norm: RmsNorm | None = None  # of what the router reads; None: it reads what the experts do
    scales_E: torch.Tensor | None = None  # of the weights, once they are chosen
    routed_TM: torch.Tensor | None = None  # what the router reads of this step, normed
    num_real_1: torch.Tensor | None = None  # on a GPU: tokens before the padding; None: there is none

    @classmethod
    def empty(
        cls,
        spec: ExpertsSpec,
        hidden_size: int,
        activation: str,
        *,
        norm_eps: float = 1e-6,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Experts:
        tensor = partial(torch.empty, dtype=dtype, device=device)
        linear = partial(Linear.empty, bias=False, dtype=dtype, device=device)
        count, inner = spec.num_experts, spec.intermediate_size
        shared: GatedMlp | PlainMlp | None = None
        rows = 2 if spec.is_gated else 1
        if spec.shared_size:
            first, down = linear(rows * spec.shared_size, hidden_size), linear(hidden_size, spec.shared_size)
            shared = (
                GatedMlp(gate_up=first, down=down, activation=activation)
                if spec.is_gated
                else PlainMlp(up=first, down=down, activation=plain_activation(activation))
            )
        return cls(
            spec=spec,
            activation=activation,
            router=linear(count, hidden_size, bias=spec.has_biases),
            gate_up_EFM=tensor(count, rows * inner, hidden_size),
            down_EMF=tensor(count, hidden_size, inner),
            gate_up_bias_EF=tensor(count, 2 * inner) if spec.has_biases else None,
            down_bias_EM=tensor(count, hidden_size) if spec.has_biases else None,
            shared=shared,
            shared_gate=linear(1, hidden_size) if shared and spec.has_shared_gate else None,
            score_bias_E=torch.empty(count, device=device) if spec.sigmoid and spec.sigmoid.has_bias else None,
            routed_norm=RmsNorm(weight=torch.empty(hidden_size, device=device), eps=norm_eps)
            if spec.norms_routed
            else None,
            scales_E=torch.empty(count, device=device) if spec.norms_routed else None,
        )

    def __call__(self, x_TM: torch.Tensor) -> torch.Tensor:
        """Rows are grouped by expert over the whole step, so that each expert's weights are read once."""
        if x_TM.is_cuda and self.spec.is_gated:
            return _on_gpu().mixed(self, x_TM)
        weights_TA, experts_TA = self.route(x_TM)
        mixed = self._of_one if len(x_TM) == 1 else self._of_many
        out_TM = mixed(x_TM, weights_TA, experts_TA)
        if self.shared is not None:
            shared_TM = self.shared(x_TM)
            out_TM += shared_TM if self.shared_gate is None else shared_TM.mul_(self.shared_gate(x_TM).sigmoid_())
        return out_TM

    def _of_one(self, x_TM: torch.Tensor, weights_TA: torch.Tensor, experts_TA: torch.Tensor) -> torch.Tensor:
        """A single token has nothing to group."""
        out_TM = torch.zeros_like(x_TM)
        for expert, weight in sorted(
            zip(experts_TA[0].tolist(), weights_TA[0].unbind(), strict=True), key=itemgetter(0)
        ):
            out_TM += self._expert(expert, x_TM).mul_(weight)
        return out_TM

    def _of_many(self, x_TM: torch.Tensor, weights_TA: torch.Tensor, experts_TA: torch.Tensor) -> torch.Tensor:
        order_R = experts_TA.flatten().argsort(stable=True)
        counts = torch.bincount(experts_TA.flatten(), minlength=self.spec.num_experts).tolist()
        tokens_R = order_R // self.spec.num_active
        weights_R = weights_TA.flatten()[order_R]
        out_TM = torch.zeros_like(x_TM)
        first = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(first, first + count)
                part_RM = self._expert(expert, _padded(x_TM[tokens_R[rows]]))[:count].mul_(weights_R[rows, None])
                # A token is there once, so nothing is lost; torch's index_add_ would sort the rows first.
                out_TM.index_copy_(0, tokens_R[rows], part_RM.add_(out_TM[tokens_R[rows]]))
                first += count
        return out_TM

    def add_to(self, out_TM: torch.Tensor, x_TM: torch.Tensor) -> None:
        if x_TM.is_cuda and self.spec.is_gated:
            _on_gpu().add_mixed(self, out_TM, x_TM)
        else:
            out_TM += self(x_TM)

    def route(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses (weights, experts). A softmax over all, normalised over the chosen, is the softmax of the chosen."""
        if self.spec.sigmoid is not None:
            weights_TA, experts_TA = self._by_scores(self.spec.sigmoid, x_TM)
            return weights_TA.to(x_TM.dtype), experts_TA
        logits_TE = self.logits(x_TM).float()
        chosen_TA, experts_TA = logits_TE.topk(self.spec.num_active, dim=-1)
        if self.spec.normalizes_chosen:
            weights_TA = chosen_TA.softmax(-1)
        else:
            weights_TA = (chosen_TA - logits_TE.logsumexp(-1, keepdim=True)).exp_()
        return self.scaled(weights_TA, experts_TA).to(x_TM.dtype), experts_TA

    def reading(self, hidden_TM: torch.Tensor, num_real_1: torch.Tensor | None) -> Experts:
        """Prepares one step, whose hidden states the router may read with a norm of its own."""
        routed_TM = None if self.routed_norm is None else self.routed_norm(hidden_TM, self.down_EMF.dtype)
        return replace(self, routed_TM=routed_TM, num_real_1=num_real_1)

    def logits(self, x_TM: torch.Tensor) -> torch.Tensor:
        return self.router(x_TM if self.routed_TM is None else self.routed_TM)

    def scaled(self, weights_TA: torch.Tensor, experts_TA: torch.Tensor) -> torch.Tensor:
        """Multiplies each weight with its expert's factor; experts past the last one are those of padding."""
        if self.scales_E is None:
            return weights_TA
        return weights_TA * self.scales_E[experts_TA.long().clamp(max=len(self.scales_E) - 1)]

    def _by_scores(self, routing: SigmoidRouting, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TE = wide_product(x_TM, self.router.weight_OI)
        scores_TE = logits_TE.softmax(-1) if routing.is_softmax else logits_TE.sigmoid_()
        wanted_TE = scores_TE if self.score_bias_E is None else scores_TE + self.score_bias_E
        if routing.num_active_groups < routing.num_groups:
            groups_TGE = wanted_TE.unflatten(-1, (routing.num_groups, -1))
            best_TG = groups_TGE.topk(2, dim=-1).values.sum(-1)
            chosen_TG = best_TG.topk(routing.num_active_groups, dim=-1).indices
            is_left_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, chosen_TG, False)
            wanted_TE = groups_TGE.masked_fill(is_left_TG[..., None], -torch.inf).flatten(1)
        experts_TA = wanted_TE.topk(self.spec.num_active, dim=-1).indices
        weights_TA = scores_TE.gather(1, experts_TA)
        if self.spec.normalizes_chosen:
            weights_TA /= weights_TA.sum(-1, keepdim=True) + routing.eps
        return weights_TA * routing.scale, experts_TA

    def _expert(self, expert: int, x_RM: torch.Tensor) -> torch.Tensor:
        bias_F = None if self.gate_up_bias_EF is None else self.gate_up_bias_EF[expert]
        gate_up_RF = product(x_RM, self.gate_up_EFM[expert], bias_F)
        if not self.spec.is_gated:
            inner_RF = plain_activation(self.activation)(gate_up_RF)
        elif self.spec.clamp is None:
            inner_RF = gated_activation(gate_up_RF, self.activation)
        else:
            inner_RF = _clamped_activation(gate_up_RF, self.spec.clamp, self.spec.clamp_alpha)
        bias_M = None if self.down_bias_EM is None else self.down_bias_EM[expert]
        return product(inner_RF, self.down_EMF[expert], bias_M)

    def destinations(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name in the checkpoint, where it goes)."""
        names = self.spec.names
        yield f"{prefix}.{names.router}.weight", self.router.weight_OI
        if self.router.bias_O is not None:
            yield f"{prefix}.{names.router}.bias", self.router.bias_O
        if self.score_bias_E is not None:
            yield (
                f"{prefix}.{names.score_bias}",
                self.score_bias_E[None] if names.score_bias_is_row else self.score_bias_E,
            )
        if self.routed_norm is not None and self.scales_E is not None:
            yield f"{prefix}.{names.routed_scale}", self.routed_norm.weight
            yield f"{prefix}.{names.expert_scales}", self.scales_E
        experts = f"{prefix}.{names.experts}"
        if names.layout == "one by one":
            yield from self._one_by_one(experts)
        else:
            is_turned = names.layout == "inputs first"
            yield f"{experts}.{names.gate}", self.gate_up_EFM.transpose(1, 2) if is_turned else self.gate_up_EFM
            yield f"{experts}.{names.down}", self.down_EMF.transpose(1, 2) if is_turned else self.down_EMF
        for name, bias in ((names.gate, self.gate_up_bias_EF), (names.down, self.down_bias_EM)):
            if bias is not None:
                yield f"{experts}.{name}_bias", bias
        yield from self._shared_destinations(prefix)

    def _one_by_one(self, experts: str) -> Iterator[tuple[str, torch.Tensor]]:
        names, inner = self.spec.names, self.spec.intermediate_size
        for expert in range(self.spec.num_experts):
            if self.spec.is_gated:
                yield f"{experts}.{expert}.{names.gate}.weight", self.gate_up_EFM[expert, :inner]
            yield f"{experts}.{expert}.{names.up}.weight", self.gate_up_EFM[expert, -inner:]
            yield f"{experts}.{expert}.{names.down}.weight", self.down_EMF[expert]

    def _shared_destinations(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        if self.shared is None:
            return
        names, size = self.spec.names, self.spec.shared_size
        first, last = self.shared.gate_up if isinstance(self.shared, GatedMlp) else self.shared.up, self.shared.down
        assert isinstance(first, Linear)
        assert isinstance(last, Linear)
        gate_up, down = first.weight_OI, last.weight_OI
        parts = [gate_up, down] if len(names.shared_parts) == 2 else [gate_up[:size], gate_up[size:], down]
        for name, part in zip(names.shared_parts, parts, strict=True):
            yield f"{prefix}.{names.shared}.{name}.weight", part
        if self.shared_gate is not None:
            yield f"{prefix}.{names.shared_gate}.weight", self.shared_gate.weight_OI


@cache
def _on_gpu() -> Any:
    """Imported when the first tensor lies on a GPU: Triton is not installed everywhere."""
    from penstock.models import cuda_experts

    return cuda_experts


def _padded(x_RM: torch.Tensor) -> torch.Tensor:
    """Rows up to one of few numbers: in bfloat16 a CPU's matrix library keeps code and buffers for each that it saw."""
    num_rows = len(x_RM)
    if x_RM.dtype == torch.float32 or num_rows in (1, 2, 4):
        return x_RM
    step = 8 if num_rows <= 32 else 32 if num_rows <= 256 else 128
    return F.pad(x_RM, (0, 0, 0, -num_rows % step))


def _clamped_activation(gate_up_RF: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Computes (up + 1) * gate * sigmoid(alpha * gate), both clamped; gate and up alternate."""
    gate, up = gate_up_RF[..., ::2].clamp(max=limit), gate_up_RF[..., 1::2].clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1))
