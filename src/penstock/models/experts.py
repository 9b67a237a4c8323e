"""A mixture of experts: a router picks a few feed-forward parts for each token, and each part runs once per step."""

# T tokens, R rows (a token once for each of its experts), E experts, A experts of a token, M hidden size, F inner size

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F

from penstock.kernels.calls import CKernels
from penstock.models import cpu_experts, cpu_layers
from penstock.models.layer_specs import ExpertsSpec, SigmoidRouting
from penstock.models.layers import Linear, Mlp, RmsNorm, gated_activation, plain_activation, product, wide_product
from penstock.models.mxfp4 import Mxfp4Matrices
from penstock.models.quantized import QuantizedMatrix, Weight
from penstock.models.streamed_experts import StreamedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Weights of all experts in one tensor each; gate and up rows lie one after the other, or alternate.

    Those that are kept in few bits: all gates, then all that they gate, each expert's from a block of its own on.
    """

    spec: ExpertsSpec
    activation: str
    router: Linear
    gate_up: Weight | Mxfp4Matrices
    down: Weight | Mxfp4Matrices
    gate_up_bias_EF: torch.Tensor | None
    down_bias_EM: torch.Tensor | None
    shared: Mlp | None  # an expert that every token has
    shared_gate: Linear | None
    score_bias_E: torch.Tensor | None = None
    routed_norm: RmsNorm | None = None  # of what the router reads; None: it reads what the experts do
    scales_E: torch.Tensor | None = None  # of the weights, once they are chosen
    routed_TM: torch.Tensor | None = None  # what the router reads of this step, normed
    num_real_1: torch.Tensor | None = None  # on a GPU: tokens before the padding; None: there is none
    streamed: StreamedExperts | None = None  # where they are read for each step; None: they stay

    @classmethod
    def empty(
        cls,
        spec: ExpertsSpec,
        hidden_size: int,
        activation: str,
        *,
        shared: Sequence[Linear] = (),
        codes: Sequence[QuantizedMatrix | Mxfp4Matrices | None] = (None, None),
        norm_eps: float = 1e-6,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Experts:
        tensor = partial(torch.empty, dtype=dtype, device=device)
        linear = partial(Linear.empty, bias=False, dtype=dtype, device=device)
        count, inner = spec.num_experts, spec.intermediate_size
        rows = 2 if spec.is_gated else 1
        gate_up, down = codes
        return cls(
            spec=spec,
            activation=activation,
            router=linear(count, hidden_size, bias=spec.has_biases),
            gate_up=tensor(count, rows * inner, hidden_size) if gate_up is None else gate_up,
            down=tensor(count, hidden_size, inner) if down is None else down,
            gate_up_bias_EF=tensor(count, 2 * inner) if spec.has_biases else None,
            down_bias_EM=tensor(count, hidden_size) if spec.has_biases else None,
            shared=Mlp.of(*shared, activation, is_gated=spec.is_gated) if shared else None,
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
        if (kernels := cpu_layers.kernels_for(x_TM)) and cpu_experts.is_known(self):
            out_TM = torch.zeros(x_TM.shape)
            self._add_in_c(kernels, out_TM, x_TM)
            return out_TM
        weights_TA, experts_TA = self.route(x_TM)
        if self.streamed is not None:
            self.streamed.take(experts_TA)
        mixed = self._of_one if len(x_TM) == 1 else self._of_many
        out_TM = mixed(x_TM, weights_TA, experts_TA)
        if self.shared is not None:
            shared_TM = self.shared(x_TM)
            out_TM += shared_TM if self.shared_gate is None else shared_TM.mul_(self.shared_gate(x_TM).sigmoid_())
        return out_TM

    def _of_one(self, x_TM: torch.Tensor, weights_TA: torch.Tensor, experts_TA: torch.Tensor) -> torch.Tensor:
        """A single token has nothing to group."""
        out_TM = torch.zeros_like(x_TM)
        chosen = zip(experts_TA[0].tolist(), weights_TA[0].unbind(), strict=True)
        for expert, weight in sorted(chosen, key=itemgetter(0)):
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
        elif out_TM.dtype == torch.float32 and (kernels := cpu_layers.kernels_for(x_TM)) and cpu_experts.is_known(self):
            self._add_in_c(kernels, out_TM, x_TM)
        else:
            out_TM += self(x_TM)

    def _add_in_c(self, kernels: CKernels, out_TM: torch.Tensor, x_TM: torch.Tensor) -> None:
        """Adds to float32 rows; experts that are kept in few bits are read as they lie."""
        if self.spec.sigmoid is None:
            routed_TM = x_TM if self.routed_TM is None else self.routed_TM
            weights_TA, experts_TA = cpu_experts.route(kernels, self, routed_TM)
            weights_TA = self.scaled(weights_TA, experts_TA)
        else:
            logits_TE = cpu_experts.scores(kernels, self, x_TM)
            weights_TA, experts_TA = self._by_scores(self.spec.sigmoid, logits_TE)
        if self.streamed is not None:
            self.streamed.take(experts_TA)
        cpu_experts.add_mixed(kernels, self, out_TM, x_TM, weights_TA, experts_TA)
        if self.shared is not None and self.shared_gate is None:
            self.shared.add_to(out_TM, x_TM)
        elif self.shared is not None and self.shared_gate is not None:
            out_TM += self.shared(x_TM).mul_(self.shared_gate(x_TM).sigmoid_())

    def route(self, x_TM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses (weights, experts). A softmax over all, normalised over the chosen, is the softmax of the chosen."""
        if self.spec.sigmoid is not None:
            logits_TE = wide_product(x_TM, self.router.weight_OI)
            weights_TA, experts_TA = self._by_scores(self.spec.sigmoid, logits_TE)
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
        routed_TM = None if self.routed_norm is None else self.routed_norm(hidden_TM, self.router.dense_OI.dtype)
        return replace(self, routed_TM=routed_TM, num_real_1=num_real_1)

    def logits(self, x_TM: torch.Tensor) -> torch.Tensor:
        return self.router(x_TM if self.routed_TM is None else self.routed_TM)

    def scaled(self, weights_TA: torch.Tensor, experts_TA: torch.Tensor) -> torch.Tensor:
        """Multiplies each weight with its expert's factor; experts past the last one are those of padding."""
        if self.scales_E is None:
            return weights_TA
        return weights_TA * self.scales_E[experts_TA.long().clamp(max=len(self.scales_E) - 1)]

    def _by_scores(self, routing: SigmoidRouting, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores_TE = logits_TE.softmax(-1) if routing.is_softmax else logits_TE.sigmoid_()
        wanted_TE = scores_TE if self.score_bias_E is None else scores_TE + self.score_bias_E
        if routing.num_active_groups < routing.num_groups:
            groups_TGE = wanted_TE.unflatten(-1, (routing.num_groups, -1))
            best_TG = groups_TGE.topk(routing.num_best, dim=-1).values.sum(-1)
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
        gate_up_RF = product(x_RM, self._matrices(expert)[0], bias_F)
        if not self.spec.is_gated:
            inner_RF = plain_activation(self.activation)(gate_up_RF)
        elif self.spec.clamp is None:
            inner_RF = gated_activation(gate_up_RF, self.activation)
        else:
            alternates = isinstance(self.gate_up, torch.Tensor)
            inner_RF = _clamped_activation(gate_up_RF, self.spec.clamp, self.spec.clamp_alpha, alternates=alternates)
        bias_M = None if self.down_bias_EM is None else self.down_bias_EM[expert]
        return product(inner_RF, self._matrices(expert)[1], bias_M)

    def _matrices(self, expert: int) -> tuple[Weight, Weight]:
        """Gives (gate and up, down)."""
        sizes = (self.spec.intermediate_size, self.router.weight_OI.shape[1])
        found = [
            one[expert] if isinstance(one, torch.Tensor) else one.of_expert(expert, self.spec.num_experts, size)
            for one, size in zip((self.gate_up, self.down), sizes, strict=True)
            if not isinstance(one, Mxfp4Matrices)
        ]
        return (found[0], found[1]) if self.streamed is None else self.streamed.moved(expert, (found[0], found[1]))

    @property
    def gate_up_EFM(self) -> torch.Tensor:
        assert isinstance(self.gate_up, torch.Tensor), "codes are multiplied on a CPU alone"
        return self.gate_up

    @property
    def down_EMF(self) -> torch.Tensor:
        assert isinstance(self.down, torch.Tensor), "codes are multiplied on a CPU alone"
        return self.down

    def settle(self, hidden_size: int) -> None:
        """Brings what was read to the form in which it is used."""
        if self.routed_norm is not None:
            self.routed_norm.weight.mul_(hidden_size**-0.5)
        if self.gate_up_bias_EF is not None and not isinstance(self.gate_up, torch.Tensor):  # they alternate as stored
            self.gate_up_bias_EF.copy_(torch.cat([self.gate_up_bias_EF[:, ::2], self.gate_up_bias_EF[:, 1::2]], 1))

    def destinations(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name in the checkpoint, where it goes)."""
        names = self.spec.names
        yield f"{prefix}.{names.router}.weight", self.router.dense_OI
        if self.router.bias_O is not None:
            yield f"{prefix}.{names.router}.bias", self.router.bias_O
        if self.score_bias_E is not None:
            bias_E = self.score_bias_E[None] if names.score_bias_is_row else self.score_bias_E
            yield f"{prefix}.{names.score_bias}", bias_E
        if self.routed_norm is not None and self.scales_E is not None:
            yield f"{prefix}.{names.routed_scale}", self.routed_norm.weight
            yield f"{prefix}.{names.expert_scales}", self.scales_E
        experts = f"{prefix}.{names.experts}"
        if names.layout == "one by one":
            yield from self._one_by_one(experts)
        else:
            is_turned = names.layout == "inputs first"
            for name, matrix in ((names.gate, self.gate_up), (names.down, self.down)):
                if isinstance(matrix, torch.Tensor):
                    yield f"{experts}.{name}", matrix.transpose(1, 2) if is_turned else matrix
        for name, bias in ((names.gate, self.gate_up_bias_EF), (names.down, self.down_bias_EM)):
            if bias is not None:
                yield f"{experts}.{name}_bias", bias
        if self.shared_gate is not None:
            yield f"{prefix}.{names.shared_gate}.weight", self.shared_gate.dense_OI

    def _one_by_one(self, experts: str) -> Iterator[tuple[str, torch.Tensor]]:
        names, inner = self.spec.names, self.spec.intermediate_size
        for expert in range(self.spec.num_experts):
            if self.spec.is_gated and isinstance(self.gate_up, torch.Tensor):
                yield f"{experts}.{expert}.{names.gate}.weight", self.gate_up[expert, :inner]
            if isinstance(self.gate_up, torch.Tensor):
                yield f"{experts}.{expert}.{names.up}.weight", self.gate_up[expert, -inner:]
            if isinstance(self.down, torch.Tensor):
                yield f"{experts}.{expert}.{names.down}.weight", self.down[expert]


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


def _clamped_activation(gate_up_RF: torch.Tensor, limit: float, alpha: float, *, alternates: bool) -> torch.Tensor:
    """Computes (up + 1) * gate * sigmoid(alpha * gate), both clamped; gate and up alternate, or are halves."""
    gate, up = (gate_up_RF[..., ::2], gate_up_RF[..., 1::2]) if alternates else gate_up_RF.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.add_(1))
