"""A decoder configured by the model's own config, over packed chunks and paged keys and values."""

# T tokens of the step, H heads, K key-value heads, D head size, M hidden size, V vocabulary, L logit rows

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.attention.backend import AttentionBackend, AttentionRule, ForwardInputs, HeadNorms, Rotation
from penstock.cache.storage import StateStorage
from penstock.models.delta import GatedDelta
from penstock.models.experts import Experts
from penstock.models.layer_specs import DeltaSpec
from penstock.models.layers import GatedMlp, Linear, RmsNorm, wide_product
from penstock.models.mamba import Mamba
from penstock.models.rotary import Rotary
from penstock.models.spec import DecoderSpec, LayerSpec
from penstock.models.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    index: int  # among the layers that have keys and values
    rule: AttentionRule
    qkv: Linear
    output: Linear
    sinks_H: torch.Tensor | None  # None: the layer has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    spec: LayerSpec
    mixer: Attention | GatedDelta | Mamba
    mlp: GatedMlp | Experts
    norms: dict[str, RmsNorm]  # by their names in the checkpoint; absent ones are not applied


class Decoder:
    """Allocated first, then filled from the weights slice by slice: no second copy of them exists."""

    def __init__(self, spec: DecoderSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.embeddings_VM = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.head_VM = self.embeddings_VM if spec.has_tied_embeddings else torch.empty_like(self.embeddings_VM)
        self.rotaries = {name: Rotary(rotary, device) for name, rotary in spec.rotaries.items()}
        self.layers = [self._empty_layer(index) for index in range(spec.num_layers)]
        self.final_norm = self._empty_norm(spec.hidden_size)

    def load(self, source: WeightSource) -> None:
        for name, destination in self._destinations():
            for ours, theirs in self.spec.renames:
                name = name.replace(ours, theirs)
            source.copy_into(destination, name)
        for norm in self._norms():
            norm.weight.add_(self.spec.norm_offset)

    def forward(
        self, inputs: ForwardInputs, attention: AttentionBackend, states: StateStorage | None = None
    ) -> torch.Tensor:
        """Hidden states [T, M] of every token of the step, which `attention` has begun.

        It keeps keys and values; `states` keeps what recurrent layers carry.
        """
        rotations = {name: self._rotation(rotary, inputs) for name, rotary in self.rotaries.items()}
        hidden_TM = self.embeddings_VM[inputs.ids_T]
        if self.spec.embedding_scale is not None:
            # The factor is rounded to the model's dtype, as the reference does.
            hidden_TM *= torch.tensor(self.spec.embedding_scale, dtype=self.dtype)
        if inputs.media is not None:
            hidden_TM[inputs.media.rows_N] = inputs.media.features_ND.to(self.dtype)
        for index, layer in enumerate(self.layers):
            normed = _normed(layer, "input_layernorm", hidden_TM)
            if isinstance(layer.mixer, GatedDelta | Mamba):
                assert states is not None, "recurrent layers need their states"
                mixed = layer.mixer(normed, inputs, states.layers[index])
            else:
                rotation = rotations[layer.spec.rotary] if layer.spec.rotary else None
                mixed = self._attended(layer, layer.mixer, normed, rotation, attention)
            self._add(layer, "attention", layer.mixer.output, mixed, hidden_TM)
            self._mlp(layer, hidden_TM)
            if inputs.media is not None and index < len(inputs.media.deepstack_LND):
                hidden_TM[inputs.media.rows_N] += inputs.media.deepstack_LND[index].to(self.dtype)
        return hidden_TM

    def logits(self, hidden_LM: torch.Tensor) -> torch.Tensor:
        """Float32 logits of the rows that are wanted."""
        logits_LV = wide_product(self.final_norm(hidden_LM), self.head_VM)
        if self.spec.logit_scale != 1.0:
            logits_LV *= self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits_LV.div_(self.spec.logit_softcap).tanh_().mul_(self.spec.logit_softcap)
        return logits_LV

    def _attended(
        self,
        layer: Layer,
        mixer: Attention,
        normed_TM: torch.Tensor,
        rotation: Rotation | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        spec = self.spec
        q, k, v = mixer.qkv(normed_TM).split([spec.q_rows, *[spec.num_kv_heads * spec.head_size] * 2], dim=-1)
        if spec.qk_norm == "projection":
            q, k = _normed(layer, "self_attn.q_norm", q), _normed(layer, "self_attn.k_norm", k)
        q_THD, k_TKD, v_TKD = (x.unflatten(-1, (heads, -1)) for x, heads in self._heads(q, k, v))
        gate_THD = None
        if spec.has_output_gate:
            q_THD, gate_THD = q_THD.chunk(2, dim=-1)
        norms = None
        if spec.qk_norm == "head":
            norms = HeadNorms(q=layer.norms["self_attn.q_norm"], k=layer.norms["self_attn.k_norm"])
        rotated_THD = attention.store(mixer.index, q_THD, k_TKD, v_TKD, rotation, norms)
        attended_THD = attention.attend(mixer.index, rotated_THD, mixer.rule, mixer.sinks_H)
        if gate_THD is not None:
            attended_THD = attended_THD * gate_THD.sigmoid()
        return attended_THD.flatten(1)

    def _heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        yield q, self.spec.num_heads
        yield k, self.spec.num_kv_heads
        yield v, self.spec.num_kv_heads

    def _mlp(self, layer: Layer, hidden_TM: torch.Tensor) -> None:
        normed = _normed(layer, self._mlp_input_norm, hidden_TM)
        self._add(layer, "mlp", layer.mlp, normed, hidden_TM)

    def _add(
        self, layer: Layer, part: str, last: Linear | GatedMlp | Experts, x: torch.Tensor, hidden_TM: torch.Tensor
    ) -> None:
        if norm := self._output_norm(part):
            hidden_TM += layer.norms[norm](last(x))
        elif self.spec.residual_scale != 1.0:
            hidden_TM.add_(last(x), alpha=self.spec.residual_scale)
        else:
            last.add_to(hidden_TM, x)

    def _rotation(self, rotary: Rotary, inputs: ForwardInputs) -> Rotation:
        by_axis = None if inputs.media is None else inputs.media.positions_AT
        positions = inputs.positions_T if by_axis is None else by_axis
        if len(set(inputs.rotary_variants)) <= 1:
            variant = inputs.rotary_variants[0] if inputs.rotary_variants else "default"
            cos, sin = rotary.cos_sin(positions, variant, self.dtype)
            return Rotation(cos_T1R=cos, sin_T1R=sin)
        parts = [
            rotary.cos_sin(positions[..., first:last], variant, self.dtype)
            for first, last, variant in zip(
                inputs.query_starts, inputs.query_starts[1:], inputs.rotary_variants, strict=False
            )
        ]
        cos, sin = zip(*parts, strict=True)
        return Rotation(cos_T1R=torch.cat(cos), sin_T1R=torch.cat(sin))

    # Checkpoints name the norm after attention `post_attention_layernorm` where it is the MLP's input norm, and
    # also where it norms attention's output; `pre_feedforward_layernorm` exists only beside the latter.

    @property
    def _mlp_input_norm(self) -> str:
        return "pre_feedforward_layernorm" if self.spec.norms_outputs else "post_attention_layernorm"

    def _output_norm(self, part: str) -> str | None:
        if not self.spec.norms_outputs:
            return None
        return "post_attention_layernorm" if part == "attention" else "post_feedforward_layernorm"

    def _empty_layer(self, index: int) -> Layer:
        spec, layer = self.spec, self.spec.layers[index]
        names = []
        if spec.norms_inputs:
            names += ["input_layernorm", self._mlp_input_norm]
        if spec.norms_outputs:
            names += ["post_attention_layernorm", "post_feedforward_layernorm"]
        norms = {name: self._empty_norm(spec.hidden_size) for name in names}
        if spec.qk_norm is not None and not layer.is_recurrent:
            per_head = spec.qk_norm == "head"
            norms["self_attn.q_norm"] = self._empty_norm(spec.head_size * (1 if per_head else spec.num_heads))
            norms["self_attn.k_norm"] = self._empty_norm(spec.head_size * (1 if per_head else spec.num_kv_heads))
        return Layer(spec=layer, mixer=self._empty_mixer(index), mlp=self._empty_mlp(layer), norms=norms)

    def _empty_mixer(self, index: int) -> Attention | GatedDelta | Mamba:
        spec, layer, width = self.spec, self.spec.layers[index], self.spec.hidden_size
        place: Any = {"dtype": self.dtype, "device": self.device}
        if layer.is_recurrent:
            assert spec.recurrent is not None
            if isinstance(spec.recurrent, DeltaSpec):
                return GatedDelta.empty(spec.recurrent, width, spec.norm_eps, **place)
            return Mamba.empty(spec.recurrent, width, spec.norm_eps, **place)
        return Attention(
            index=sum(not earlier.is_recurrent for earlier in spec.layers[:index]),
            rule=AttentionRule(scale=spec.attention_scale, window=layer.window, softcap=spec.attention_softcap),
            qkv=Linear.empty(spec.qkv_rows, width, bias=spec.qkv_bias, **place),
            output=Linear.empty(width, spec.num_heads * spec.head_size, bias=spec.output_bias, **place),
            sinks_H=torch.empty(spec.num_heads, device=self.device) if spec.has_sinks else None,
        )

    def _empty_mlp(self, layer: LayerSpec) -> GatedMlp | Experts:
        spec = self.spec
        place: Any = {"dtype": self.dtype, "device": self.device}
        if layer.has_experts:
            assert spec.experts is not None
            return Experts.empty(spec.experts, spec.hidden_size, spec.activation, **place)
        inner = spec.intermediate_size
        return GatedMlp(
            gate_up=Linear.empty(2 * inner, spec.hidden_size, bias=spec.mlp_bias, **place),
            down=Linear.empty(spec.hidden_size, inner, bias=spec.mlp_bias, **place),
            activation=spec.activation,
        )

    def _empty_norm(self, size: int) -> RmsNorm:
        return RmsNorm(weight=torch.empty(size, dtype=torch.float32, device=self.device), eps=self.spec.norm_eps)

    def _norms(self) -> Iterator[RmsNorm]:
        yield self.final_norm
        for layer in self.layers:
            yield from layer.norms.values()

    def _destinations(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the checkpoint, where it goes). Separate projections go to slices of the fused ones."""
        yield "model.embed_tokens.weight", self.embeddings_VM
        if not self.spec.has_tied_embeddings:
            yield "lm_head.weight", self.head_VM
        yield "model.norm.weight", self.final_norm.weight
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            for name, norm in layer.norms.items():
                yield f"{prefix}.{name}.weight", norm.weight
            yield from self._mixer_destinations(prefix, layer.mixer)
            if isinstance(layer.mlp, Experts):
                yield from layer.mlp.destinations(prefix)
                continue
            gate_up, down = layer.mlp.gate_up, layer.mlp.down
            yield from self._projections(f"{prefix}.mlp", gate_up, ("gate_proj", "up_proj"), "gate_up_proj")
            yield from self._projections(f"{prefix}.mlp", down, ("down_proj",), "down_proj")

    def _mixer_destinations(
        self, prefix: str, mixer: Attention | GatedDelta | Mamba
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(mixer, GatedDelta | Mamba):
            yield from mixer.destinations(f"{prefix}.{'linear_attn' if isinstance(mixer, GatedDelta) else 'mamba'}")
            return
        yield from self._projections(f"{prefix}.self_attn", mixer.qkv, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        yield from self._projections(f"{prefix}.self_attn", mixer.output, ("o_proj",), "o_proj")
        if mixer.sinks_H is not None:
            yield f"{prefix}.self_attn.sinks", mixer.sinks_H

    def _projections(
        self, prefix: str, linear: Linear, parts: tuple[str, ...], fused: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        spec = self.spec
        is_fused = (
            spec.has_fused_qkv if fused == "qkv_proj" else spec.has_fused_mlp if fused == "gate_up_proj" else False
        )
        names = (fused,) if is_fused else parts
        kv_rows = spec.num_kv_heads * spec.head_size
        sizes = {"q_proj": spec.q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        sizes |= {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        row = 0
        for name in names:
            num_rows = sizes.get(name, linear.weight_OI.shape[0])
            yield f"{prefix}.{name}.weight", linear.weight_OI[row : row + num_rows]
            if linear.bias_O is not None:
                yield f"{prefix}.{name}.bias", linear.bias_O[row : row + num_rows]
            row += num_rows


def _normed(layer: Layer, name: str | None, x: torch.Tensor) -> torch.Tensor:
    norm = layer.norms.get(name) if name else None
    return x if norm is None else norm(x)
