"""A decoder configured by the model's own config, over joined chunks and paged keys and values."""

# T tokens of the step, H heads, K key-value heads, D head size, M hidden size, V vocabulary, L logit rows

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from penstock.attention.backend import AttentionBackend, AttentionRule, ForwardInputs, HeadNorms, Rotation
from penstock.attention.chunk_tables import ChunkTables
from penstock.cache.storage import StateStorage
from penstock.models.delta import GatedDelta
from penstock.models.experts import Experts
from penstock.models.layer_inputs import InputGate, LayerInputs, rows_of
from penstock.models.layer_specs import DeltaSpec, ExpertsSpec, LatentSpec, MambaSpec
from penstock.models.layer_stream import LayerStream
from penstock.models.layers import (
    GatedMlp,
    LayerNorm,
    Linear,
    Mlp,
    PlainMlp,
    RmsNorm,
    Xielu,
    plain_activation,
    wide_product,
)
from penstock.models.mamba import Mamba
from penstock.models.mxfp4 import Mxfp4Matrices
from penstock.models.projections import (
    EXPERT_ROLES,
    RECURRENCE_NAMES,
    RECURRENT_ROLES,
    SHARED_ROLES,
    Projection,
    Role,
    layer_projections,
    outer_projection,
    stored_name,
)
from penstock.models.quantization import Quantization
from penstock.models.quantized import QuantizedMatrix, QuantizedRows
from penstock.models.rotary import Rotary
from penstock.models.short_conv import ShortConv
from penstock.models.spec import DecoderSpec, LayerSpec
from penstock.models.weights import Destination, HalvesFirst, WeightSource, fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    index: int  # among the layers that have keys and values
    rule: AttentionRule
    qkv: Linear
    output: Linear
    sinks_H: torch.Tensor | None  # None: the layer has none
    value_norm: RmsNorm | None  # by head, without weights of its own
    query: Linear | None = None  # of queries that qkv gives in short
    made_OI: torch.Tensor | None = None  # makes keys and values of every head out of what is kept


LATENT_EPS = 1e-6
GATE_ROLES: tuple[Role, ...] = ("input_gate", "input_output")
Recurrence = GatedDelta | Mamba | ShortConv


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    spec: LayerSpec
    mixer: Attention | Recurrence | None  # None: tokens do not see each other
    beside: Recurrence | None  # adds what it reads from the same input
    mlp: Mlp | Experts | None
    norms: dict[str, RmsNorm | LayerNorm]  # by their names in the checkpoint; absent ones are not applied
    experts: Experts | None = None  # beside the MLP, not instead of it
    gate: InputGate | None = None  # where layers have inputs of their own
    scale_1: torch.Tensor | None = None  # of what it gives


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Tokens on their way through the layers."""

    inputs: ForwardInputs
    hidden_TM: torch.Tensor
    rotations: dict[str, Rotation]
    query_scale_T11: torch.Tensor | None
    inputs_TLP: torch.Tensor | None  # where layers have inputs of their own


class Decoder:
    """Allocated first, then filled from the weights slice by slice: no second copy of them exists."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        stream: LayerStream | None = None,
    ) -> None:
        """`stream`: has the matrices of layers that do not stay; None: all of them stay."""
        self.spec = spec
        self.stream = stream
        self.dtype = dtype
        self.device = device
        # What the layers add to. Products with codes give float32 sums, and adding those loses nothing to rounding.
        self.residual_dtype = dtype if quantization is None or quantization.on_card else torch.float32
        self._quantization = quantization
        self._projections = [layer_projections(spec, index) for index in range(spec.num_layers)]
        self.embeddings_VM = self._empty_weight(outer_projection(spec, "embeddings"))
        self.head_VM = self.embeddings_VM
        if not spec.has_tied_embeddings:
            self.head_VM = self._empty_weight(outer_projection(spec, "head"))
        self.rotaries = {name: Rotary(rotary, device) for name, rotary in spec.rotaries.items()}
        self.layers = [self._placed_layer(index) for index in range(spec.num_layers)]
        self.layer_inputs = self._empty_layer_inputs()
        self.final_norm = self._empty_norm(spec.hidden_size)

    def load(self, source: WeightSource) -> None:
        source = self._with_halves_first(source)
        for name, destination in self._outer_destinations():
            fill(source, destination, name)
        for index in range(len(self.layers)):
            if self.stream is not None and index in self.stream:
                self.stream.load(index, self._layer_destinations(index), source)
                continue
            for name, destination in self._layer_destinations(index):
                fill(source, destination, name)
        self.final_norm.weight.add_(self.spec.norm_offset)
        for layer in self.layers:
            for norm in layer.norms.values():
                norm.weight.add_(self.spec.norm_offset)
            for experts in (layer.mlp, layer.experts):
                if isinstance(experts, Experts):
                    experts.settle(self.spec.hidden_size)

    def _with_halves_first(self, source: WeightSource) -> WeightSource:
        if not self.spec.interleaves_rotary:
            return source
        parts = [part for of_layer in self._projections if "qkv" in of_layer for part in of_layer["qkv"].parts[:2]]
        rotated = frozenset(name for part in parts for name in (part.name, part.bias))
        num_rotated = self.spec.rotaries["global"].num_dims
        return HalvesFirst(source, rotated, head_size=self.spec.head_size, num_rotated=num_rotated)

    def forward(
        self, inputs: ForwardInputs, attention: AttentionBackend, states: StateStorage | None = None
    ) -> torch.Tensor:
        """Hidden states [T, M] of every token of the step, which `attention` has begun.

        It keeps keys and values; `states` keeps what recurrent layers carry.
        """
        passage = self.begin(inputs)
        for index in range(len(self.layers)):
            self.advance(index, passage, attention, states)
        return passage.hidden_TM

    def begin(self, inputs: ForwardInputs, out_TM: torch.Tensor | None = None) -> Passage:
        """Makes tokens ready for the first layer. `out_TM`: where their hidden states go; None: to a new tensor."""
        hidden_TM = self.embedded(inputs.ids_T).to(self.residual_dtype)
        if self.spec.recurrent is not None and hidden_TM.is_cuda and inputs.chunk_tables is None:
            tables = ChunkTables.of(inputs.query_starts, inputs.state_slots, dtype=self.dtype, device=self.device)
            inputs = replace(inputs, chunk_tables=tables)
        if out_TM is not None:
            hidden_TM = out_TM.copy_(hidden_TM)
        if inputs.media is not None:
            hidden_TM[inputs.media.rows_N] = inputs.media.features_ND.to(hidden_TM.dtype)
        inputs_TLP = None
        if self.layer_inputs is not None:
            media_N = None if inputs.media is None else inputs.media.rows_N
            inputs_TLP = self.layer_inputs(inputs.ids_T, hidden_TM.to(self.dtype), media_N)
        return Passage(
            inputs=inputs,
            hidden_TM=hidden_TM,
            rotations={name: self._rotation(rotary, inputs) for name, rotary in self.rotaries.items()},
            query_scale_T11=self._query_scale(inputs),
            inputs_TLP=inputs_TLP,
        )

    def advance(
        self, index: int, passage: Passage, attention: AttentionBackend, states: StateStorage | None = None
    ) -> None:
        """Takes tokens through one layer; of the last layer, those whose logits are asked, if that is known."""
        layer, inputs, hidden_TM = self.layers[index], passage.inputs, passage.hidden_TM
        asked = inputs.of_asked_rows() if index == len(self.layers) - 1 else None
        rows = slice(None) if asked is None else inputs.logit_rows
        normed = self._normed(layer, "input_layernorm", hidden_TM)
        if asked is not None:
            hidden_TM = hidden_TM[rows]
        if isinstance(layer.mixer, Attention):
            rotation = passage.rotations[layer.spec.rotary] if layer.spec.rotary else None
            mixed = self._attended(layer, layer.mixer, normed, rotation, attention, passage.query_scale_T11, asked)
            if len(hidden_TM):
                self._add(layer, "attention", layer.mixer.output, mixed, hidden_TM, self.spec.attention_output_scale)
        for recurrence in (layer.mixer, layer.beside):
            if isinstance(recurrence, Recurrence):
                assert states is not None, "recurrent layers need their states"
                mixed = recurrence(normed, inputs, states.layers[index])[rows]
                scale = recurrence.spec.output_scale if isinstance(recurrence, Mamba) else 1.0
                if len(hidden_TM):
                    self._add(layer, "attention", recurrence.output, mixed, hidden_TM, scale)
        if not len(hidden_TM):
            return
        if layer.mlp is not None:
            self._mlp(layer, layer.mlp, hidden_TM, inputs.num_real_1, normed[rows] if self.spec.is_parallel else None)
        if layer.gate is not None and passage.inputs_TLP is not None:
            layer.gate.add_to(hidden_TM, passage.inputs_TLP[rows, index])
        if layer.scale_1 is not None:
            hidden_TM *= layer.scale_1
        if inputs.media is not None and index < len(inputs.media.deepstack_LND):
            hidden_TM[inputs.media.rows_N] += inputs.media.deepstack_LND[index].to(self.dtype)
        if asked is not None:
            passage.hidden_TM[rows] = hidden_TM

    @torch.inference_mode()
    def use_products(self, num_tokens: int) -> None:
        """Computes the products of each kind of layer: a matrix kernel is loaded when it is first used."""
        hidden_TM = torch.zeros(num_tokens, self.spec.hidden_size, dtype=self.residual_dtype, device=self.device)
        kinds = {(type(layer.mixer), type(layer.beside), type(layer.mlp)): layer for layer in reversed(self.layers)}
        for layer in kinds.values():
            normed = self._normed(layer, "input_layernorm", hidden_TM)
            for mixer in (layer.mixer, layer.beside):
                if mixer is None:
                    continue
                for linear in (mixer.qkv,) if isinstance(mixer, Attention) else mixer.inputs:
                    linear(normed)
                num_read = mixer.output.dense_OI.shape[1]
                self._add(layer, "attention", mixer.output, hidden_TM.new_zeros(num_tokens, num_read), hidden_TM)
            if layer.mlp is not None:
                self._mlp(layer, layer.mlp, hidden_TM)

    def embedded(self, ids_T: torch.Tensor) -> torch.Tensor:
        return rows_of(self.embeddings_VM, ids_T, self.dtype, self.spec.embedding_scale)

    def logits(self, hidden_LM: torch.Tensor) -> torch.Tensor:
        """Float32 logits of the rows that are wanted."""
        logits_LV = wide_product(self.final_norm(hidden_LM, self.dtype), self.head_VM)
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
        query_scale_T11: torch.Tensor | None,
        asked: ForwardInputs | None,
    ) -> torch.Tensor:
        """What the output projection is given: of every row, or of those that are asked."""
        spec = self.spec
        if spec.attention_input_scale != 1.0:
            normed_TM = normed_TM * spec.attention_input_scale
        if mixer.made_OI is not None and spec.latent is not None:
            return self._attended_in_short(
                layer, mixer, spec.latent, mixer.made_OI, normed_TM, rotation, attention, asked
            )
        q, k, v = mixer.qkv(normed_TM).split(spec.attention_rows(layer.spec), dim=-1)
        if spec.qk_norm == "projection":
            q, k = self._normed(layer, "self_attn.q_norm", q), self._normed(layer, "self_attn.k_norm", k)
        q_THD = q.unflatten(-1, (spec.num_heads, -1))
        k_TKD = v_TKD = None
        if layer.spec.keeps_keys:
            k_TKD = k.unflatten(-1, (layer.spec.num_kv_heads, -1))
            v_TKD = k_TKD if layer.spec.keys_are_values else v.unflatten(-1, k_TKD.shape[1:])
            v_TKD = v_TKD if mixer.value_norm is None else mixer.value_norm(v_TKD)
        gate_THD = None
        if spec.has_output_gate:
            q_THD, gate_THD = q_THD.chunk(2, dim=-1)
        norms = None
        if spec.qk_norm == "head":
            norms = HeadNorms(q=layer.norms["self_attn.q_norm"], k=layer.norms.get("self_attn.k_norm"))
        elif spec.qk_norm == "rotated head":
            assert k_TKD is not None, "no family shares keys that are normed last"
            q_THD, k_TKD = (_rotated(x, rotation) for x in (q_THD, k_TKD))
            q_THD, k_TKD = layer.norms["self_attn.q_norm"](q_THD), layer.norms["self_attn.k_norm"](k_TKD)
            rotation = None
        rotated_THD = attention.store(mixer.index, q_THD, k_TKD, v_TKD, rotation, norms)
        if query_scale_T11 is not None:
            rotated_THD *= query_scale_T11
        attended_THD = self._attend(mixer, rotated_THD, attention, asked)
        if gate_THD is not None:
            gate_THD = gate_THD if asked is None else gate_THD[asked.logit_rows]
            attended_THD = attended_THD * gate_THD.sigmoid()
        return attended_THD.flatten(1)

    def _attend(
        self, mixer: Attention, rotated_THD: torch.Tensor, attention: AttentionBackend, asked: ForwardInputs | None
    ) -> torch.Tensor:
        """Attends once keys and values are stored: every row, or those that are asked, as a step of their own."""
        if asked is not None:
            rotated_THD = rotated_THD[asked.logit_rows]
            if not asked.num_chunks:
                return rotated_THD
            attention.begin_step(asked)
        return attention.attend(mixer.index, rotated_THD, mixer.rule, mixer.sinks_H)

    def _attended_in_short(
        self,
        layer: Layer,
        mixer: Attention,
        sizes: LatentSpec,
        made_OI: torch.Tensor,
        normed_TM: torch.Tensor,
        rotation: Rotation | None,
        attention: AttentionBackend,
        asked: ForwardInputs | None,
    ) -> torch.Tensor:
        """Keys are not made: queries are brought to what is kept, and what is attended there to values."""
        spec = self.spec
        q, kept_TL, k_TR = mixer.qkv(normed_TM).split(sizes.first_rows(spec.num_heads), dim=-1)
        if mixer.query is not None:
            q = mixer.query(self._normed(layer, "self_attn.q_a_layernorm", q))
        plain_THP, q_THR = q.unflatten(-1, (spec.num_heads, -1)).split((sizes.plain_size, sizes.rotated_size), dim=-1)
        keys_HPL, values_HVL = made_OI.view(spec.num_heads, -1, sizes.rank).split(
            (sizes.plain_size, sizes.value_size), dim=1
        )
        if sizes.is_interleaved:
            q_THR, k_TR = (torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) for x in (q_THR, k_TR))
        q_THL = torch.bmm(plain_THP.transpose(0, 1), keys_HPL).transpose(0, 1)
        kept_TL = self._normed(layer, "self_attn.kv_a_layernorm", kept_TL)
        q_THD, k_TKD = torch.cat([q_THR, q_THL], dim=-1), torch.cat([k_TR, kept_TL], dim=-1)[:, None]
        q_THD, k_TKD = (_rotated(x, rotation) for x in (q_THD, k_TKD))  # first: keys are kept as values too
        rotated_THD = attention.store(mixer.index, q_THD, k_TKD, k_TKD, None)
        attended_THL = self._attend(mixer, rotated_THD, attention, asked)[..., sizes.rotated_size :]
        return torch.bmm(attended_THL.transpose(0, 1), values_HVL.mT).transpose(0, 1).flatten(1)

    def _normed(self, layer: Layer, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = layer.norms.get(name)
        return x.to(self.dtype) if norm is None else norm(x, self.dtype)

    def _mlp(
        self,
        layer: Layer,
        mlp: Mlp | Experts,
        hidden_TM: torch.Tensor,
        num_real_1: torch.Tensor | None = None,
        normed: torch.Tensor | None = None,  # None: the MLP has a norm of its own
    ) -> None:
        if normed is None:
            normed = self._normed(layer, self.mlp_input_norm, hidden_TM)
        if isinstance(mlp, Experts):
            mlp = mlp.reading(hidden_TM, num_real_1)
        if layer.experts is not None:
            experts = layer.experts.reading(hidden_TM, num_real_1)
            mixed = experts(self._normed(layer, "pre_feedforward_layernorm_2", hidden_TM))
            mixed = layer.norms["post_feedforward_layernorm_2"](mixed)
            mixed += layer.norms["post_feedforward_layernorm_1"](mlp(normed))
            hidden_TM += layer.norms["post_feedforward_layernorm"](mixed)
        else:
            self._add(layer, "mlp", mlp, normed, hidden_TM, self.spec.mlp_scales[1])

    def _add(
        self,
        layer: Layer,
        part: str,
        last: Linear | Mlp | Experts,
        x: torch.Tensor,
        hidden_TM: torch.Tensor,
        scale: float = 1.0,
    ) -> None:
        scale *= self.spec.residual_scale
        if norm := self.output_norm(part):
            hidden_TM += layer.norms[norm](last(x))
        elif scale != 1.0:
            hidden_TM.add_(last(x), alpha=scale)
        else:
            last.add_to(hidden_TM, x)

    def _query_scale(self, inputs: ForwardInputs) -> torch.Tensor | None:
        if (scale := self.spec.query_scale) is None:
            return None
        contexts_T = (inputs.positions_T // scale.original_context).float()
        return (1 + scale.beta * contexts_T.log1p()).to(self.dtype)[:, None, None]

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
    def mlp_input_norm(self) -> str:
        return "pre_feedforward_layernorm" if self.spec.norms_outputs else "post_attention_layernorm"

    def output_norm(self, part: str) -> str | None:
        if not self.spec.norms_outputs:
            return None
        return "post_attention_layernorm" if part == "attention" else "post_feedforward_layernorm"

    def _placed_layer(self, index: int) -> Layer:
        layer = self._empty_layer(index)
        return layer if self.stream is None or index not in self.stream else self.stream.place(index, layer)

    def _empty_layer(self, index: int) -> Layer:
        spec, layer = self.spec, self.spec.layers[index]
        names = []
        if spec.norms_inputs:
            names += ["input_layernorm"] * (layer.has_attention or layer.is_recurrent)
            names += [self.mlp_input_norm] * (layer.has_mlp and not spec.is_parallel)
        if spec.norms_outputs:
            names += ["post_attention_layernorm", "post_feedforward_layernorm"]
        if layer.has_mlp_beside:
            names += [f"{name}_feedforward_layernorm_{place}" for name, place in (("post", 1), ("post", 2), ("pre", 2))]
        if spec.layer_inputs is not None:
            names.append("post_per_layer_input_norm")
        norms: dict[str, RmsNorm | LayerNorm] = {name: self._empty_norm(spec.hidden_size) for name in names}
        if spec.qk_norm is not None and layer.has_attention:
            per_head = spec.qk_norm != "projection"
            norms["self_attn.q_norm"] = self._empty_rms_norm(layer.head_size * (1 if per_head else spec.num_heads))
            if layer.keeps_keys:
                num_normed = 1 if per_head else layer.num_kv_heads
                norms["self_attn.k_norm"] = self._empty_rms_norm(layer.head_size * num_normed)
        if spec.latent is not None:  # norms that have the library's own eps, whatever the config says
            ranks = {"self_attn.q_a_layernorm": spec.latent.query_rank, "self_attn.kv_a_layernorm": spec.latent.rank}
            norms |= {name: replace(self._empty_rms_norm(rank), eps=LATENT_EPS) for name, rank in ranks.items() if rank}
        recurrence = self._empty_recurrence(index) if layer.is_recurrent else None
        mixer, beside = (self._empty_attention(index), recurrence) if layer.has_attention else (recurrence, None)
        return Layer(
            spec=layer,
            mixer=mixer,
            beside=beside,
            mlp=self._empty_mlp(index),
            norms=norms,
            experts=self._empty_experts(index) if layer.has_experts and layer.has_mlp_beside else None,
            gate=self._empty_gate(index, norms),
            scale_1=torch.empty(1, dtype=self.dtype, device=self.device) if spec.scales_layers else None,
        )

    def _empty_layer_inputs(self) -> LayerInputs | None:
        spec = self.spec
        if spec.layer_inputs is None:
            return None
        norm = self._empty_rms_norm(spec.layer_inputs.width)
        return LayerInputs(
            table_VX=self._empty_weight(outer_projection(spec, "layer_table")),
            context=self._empty_linear(outer_projection(spec, "layer_context"), bias=False),
            # What it norms is meant to be divided by the root of the hidden size before.
            norm=RmsNorm(weight=norm.weight, eps=norm.eps * spec.hidden_size),
            padding=spec.layer_inputs.padding,
        )

    def _empty_gate(self, index: int, norms: dict[str, RmsNorm | LayerNorm]) -> InputGate | None:
        if self.spec.layer_inputs is None:
            return None
        norm = norms["post_per_layer_input_norm"]
        assert isinstance(norm, RmsNorm)
        gate, output = (self._empty_linear(self._projections[index][r], bias=False) for r in GATE_ROLES)
        return InputGate(gate=gate, output=output, activation=plain_activation(self.spec.activation), norm=norm)

    def _empty_recurrence(self, index: int) -> Recurrence:
        spec, recurrent = self.spec, self.spec.recurrent
        place: Any = {"dtype": self.dtype, "device": self.device}
        assert recurrent is not None
        has_bias = not isinstance(recurrent, DeltaSpec) and recurrent.has_bias
        projections = self._projections[index]
        linears: dict[str, Linear] = {
            r: self._empty_linear(projections[r], bias=has_bias) for r in RECURRENT_ROLES if r in projections
        }
        if isinstance(recurrent, DeltaSpec):
            return GatedDelta.empty(recurrent, spec.norm_eps, linears, **place)
        if isinstance(recurrent, MambaSpec):
            return Mamba.empty(recurrent, spec.norm_eps, linears, **place)
        return ShortConv.empty(recurrent, linears, **place)

    def _empty_attention(self, index: int) -> Attention:
        spec, layer = self.spec, self.spec.layers[index]
        before = spec.layers[: index if layer.keys_of is None else layer.keys_of]
        return Attention(
            index=sum(earlier.keeps_keys for earlier in before),
            rule=AttentionRule(
                scale=spec.attention_scale,
                window=layer.window,
                softcap=spec.attention_softcap,
                sees_spans=layer.sees_spans,
            ),
            qkv=self._empty_linear(self._projections[index]["qkv"], bias=spec.qkv_bias),
            output=self._empty_linear(self._projections[index]["output"], bias=spec.output_bias),
            sinks_H=torch.empty(spec.num_heads, device=self.device) if spec.has_sinks else None,
            value_norm=RmsNorm(weight=torch.ones(layer.head_size, device=self.device), eps=spec.norm_eps)
            if spec.norms_values
            else None,
            **self._empty_latent(index),
        )

    def _empty_latent(self, index: int) -> dict[str, Any]:
        if (latent := self.spec.latent) is None:
            return {}
        num_made = self.spec.num_heads * (latent.plain_size + latent.value_size)
        query = self._projections[index].get("query")
        return {
            "query": None if query is None else self._empty_linear(query, bias=False),
            "made_OI": torch.empty(num_made, latent.rank, dtype=self.dtype, device=self.device),
        }

    def _empty_mlp(self, index: int) -> Mlp | Experts | None:
        spec, layer = self.spec, self.spec.layers[index]
        if not layer.has_mlp:
            return None
        if not layer.has_dense_mlp:
            return self._empty_experts(index)
        place: Any = {"dtype": self.dtype, "device": self.device}
        first, down = (self._empty_linear(self._projections[index][r], bias=spec.mlp_bias) for r in ("gate_up", "down"))
        if spec.activation == "xielu":
            return PlainMlp(first=first, down=down, activation=Xielu.empty(**place))
        mlp = Mlp.of(first, down, spec.activation, is_gated=spec.is_gated)
        return replace(mlp, gate_scale=spec.mlp_scales[0]) if isinstance(mlp, GatedMlp) else mlp

    def _empty_experts(self, index: int) -> Experts:
        spec, projections = self.spec, self._projections[index]
        assert spec.experts is not None
        shared = [self._empty_linear(projections[r], bias=False) for r in SHARED_ROLES if r in projections]
        codes = [self._empty_expert_codes(projections[r], spec.experts) for r in EXPERT_ROLES]
        place: Any = {"norm_eps": spec.norm_eps, "dtype": self.dtype, "device": self.device}
        return Experts.empty(spec.experts, spec.hidden_size, spec.activation, shared=shared, codes=codes, **place)

    def _empty_expert_codes(
        self, projection: Projection, experts: ExpertsSpec
    ) -> QuantizedMatrix | Mxfp4Matrices | None:
        if self._quantization is None or not self._quantization.on_card:
            return self._empty_codes(projection)
        alternates = projection.role == "expert_gate_up" and experts.names.layout == "inputs first"
        num_outputs = projection.num_outputs // experts.num_experts
        return Mxfp4Matrices.empty(
            experts.num_experts, num_outputs, projection.num_inputs, is_alternating=alternates, device=self.device
        )

    def _empty_linear(self, projection: Projection, *, bias: bool) -> Linear:
        weight_OI, order = self._empty_weight(projection), None
        if self._quantization is not None and isinstance(weight_OI, QuantizedMatrix):
            order = self._quantization.order(projection)
        bias_O = torch.empty(projection.num_outputs, dtype=self.dtype, device=self.device) if bias else None
        return Linear(weight_OI=weight_OI, bias_O=bias_O, order_I=None if order is None else torch.from_numpy(order))

    def _empty_weight(self, projection: Projection) -> torch.Tensor | QuantizedMatrix:
        codes = self._empty_codes(projection)
        if codes is not None:
            return codes
        return torch.empty(projection.num_outputs, projection.num_inputs, dtype=self.dtype, device=self.device)

    def _empty_codes(self, projection: Projection) -> QuantizedMatrix | None:
        types = None if self._quantization is None else self._quantization.types(projection)
        return None if types is None else QuantizedMatrix.empty(types, projection.num_inputs)

    def _empty_norm(self, size: int) -> RmsNorm | LayerNorm:
        if self.spec.norm == "rms":
            return self._empty_rms_norm(size)
        weight = torch.empty(size, dtype=torch.float32, device=self.device)
        bias = torch.empty_like(weight) if self.spec.has_norm_biases else None
        return LayerNorm(weight=weight, bias=bias, eps=self.spec.norm_eps)

    def _empty_rms_norm(self, size: int) -> RmsNorm:
        return RmsNorm(weight=torch.empty(size, dtype=torch.float32, device=self.device), eps=self.spec.norm_eps)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        """Yields (name in the checkpoint, where it goes). Separate projections go to slices of the fused ones."""
        yield from self._outer_destinations()
        for index in range(len(self.layers)):
            yield from self._layer_destinations(index)

    def _outer_destinations(self) -> Iterator[tuple[str, torch.Tensor | QuantizedRows]]:
        """Yields what belongs to no layer."""
        yield from _parts(outer_projection(self.spec, "embeddings"), self.embeddings_VM)
        if not self.spec.has_tied_embeddings:
            yield from _parts(outer_projection(self.spec, "head"), self.head_VM)
        for name, destination in _norm_parts("model.norm", self.final_norm):
            yield stored_name(self.spec, name), destination
        if self.layer_inputs is not None:
            yield from _parts(outer_projection(self.spec, "layer_table"), self.layer_inputs.table_VX)
            yield from _linear_parts(outer_projection(self.spec, "layer_context"), self.layer_inputs.context)
            norm = self.layer_inputs.norm.weight
            yield stored_name(self.spec, "model.per_layer_projection_norm.weight"), norm

    def _layer_destinations(self, index: int) -> Iterator[tuple[str, Destination]]:
        """Yields what belongs to one layer."""
        layer, prefix, of_layer = self.layers[index], f"model.layers.{index}", self._projections[index]
        others = [part for name, norm in layer.norms.items() for part in _norm_parts(f"{prefix}.{name}", norm)]
        linears: list[tuple[Role, Linear | None]] = []
        for recurrence in (layer.mixer, layer.beside):
            if isinstance(recurrence, Recurrence):
                others += recurrence.destinations(f"{prefix}.{RECURRENCE_NAMES[type(recurrence.spec)]}")
                gates = recurrence.beta_alpha if isinstance(recurrence, GatedDelta) else None
                first = recurrence.qkvz if isinstance(recurrence, GatedDelta) else recurrence.input
                linears += zip(RECURRENT_ROLES, (first, gates, recurrence.output), strict=True)
        if isinstance(layer.mixer, Attention):
            linears += [("qkv", layer.mixer.qkv), ("output", layer.mixer.output), ("query", layer.mixer.query)]
            if layer.mixer.made_OI is not None:
                others.append((f"{prefix}.self_attn.kv_b_proj.weight", layer.mixer.made_OI))
            if layer.mixer.sinks_H is not None:
                others.append((f"{prefix}.self_attn.sinks", layer.mixer.sinks_H))
        for experts in (layer.mlp, layer.experts):
            if isinstance(experts, Experts):
                others += experts.destinations(prefix)
                for role, matrix in zip(EXPERT_ROLES, (experts.gate_up, experts.down), strict=True):
                    if isinstance(matrix, QuantizedMatrix):
                        yield from _parts(of_layer[role], matrix)
                    elif isinstance(matrix, Mxfp4Matrices):
                        yield of_layer[role].parts[0].name, matrix
                if experts.shared is not None:
                    linears += zip(SHARED_ROLES, (experts.shared.first, experts.shared.down), strict=True)
        if isinstance(layer.mlp, Mlp):
            linears += [("gate_up", layer.mlp.first), ("down", layer.mlp.down)]
            if isinstance(layer.mlp, PlainMlp) and isinstance(xielu := layer.mlp.activation, Xielu):
                others += [(f"{prefix}.mlp.act_fn.{one.name}", getattr(xielu, one.name)) for one in fields(xielu)]
        if layer.gate is not None:
            linears += zip(GATE_ROLES, (layer.gate.gate, layer.gate.output), strict=True)
        if layer.scale_1 is not None:
            others.append((f"{prefix}.layer_scalar", layer.scale_1))
        for role, linear in linears:
            if linear is not None:
                yield from _linear_parts(of_layer[role], linear)
        for name, destination in others:
            yield stored_name(self.spec, name), destination


def _rotated(x_THD: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    if rotation is None:
        return x_THD
    out_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    rotation.apply(slice(None), x_THD, out=out_THD)
    return out_THD


def _norm_parts(name: str, norm: RmsNorm | LayerNorm) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{name}.weight", norm.weight
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        yield f"{name}.bias", norm.bias


def _linear_parts(projection: Projection, linear: Linear) -> Iterator[tuple[str, torch.Tensor | QuantizedRows]]:
    yield from _parts(projection, linear.weight_OI)
    if linear.bias_O is not None:
        yield from zip([part.bias for part in projection.parts], linear.bias_O.split(projection.sizes), strict=True)


def _parts(
    projection: Projection, weight: torch.Tensor | QuantizedMatrix
) -> Iterator[tuple[str, torch.Tensor | QuantizedRows]]:
    if isinstance(weight, QuantizedMatrix):
        yield from ((part.name, QuantizedRows(matrix=weight, outputs_N=rows)) for part, rows in projection.outputs)
    else:
        yield from zip([part.name for part in projection.parts], weight.split(projection.sizes), strict=True)
