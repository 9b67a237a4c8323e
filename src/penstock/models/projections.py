"""The matrices of a decoder that rows are multiplied with, and the stored tensors that each is made of. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.models.spec import DecoderSpec

# gate_up: of MLPs without a gate, up alone. Layers may have inputs of their own: rows of a table, and the context that
# all of them are made of; what they gate goes through input_gate and input_output.
Role = Literal[
    "embeddings",
    "head",
    "layer_table",
    "layer_context",
    "qkv",
    "output",
    "gate_up",
    "down",
    "input_gate",
    "input_output",
]
Outer = Literal["embeddings", "head", "layer_table", "layer_context"]
OUTSIDE_LAYERS = ("embeddings", "head", "layer_table")
OUTER: dict[Outer, str] = {
    "embeddings": "model.embed_tokens",
    "head": "lm_head",
    "layer_table": "model.embed_tokens_per_layer",
    "layer_context": "model.per_layer_model_projection",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stored tensor and its rows."""

    name: str  # in the checkpoint
    bias: str  # the name of its bias, where it has one
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    role: Role
    parts: tuple[Part, ...]  # one below the other
    num_inputs: int

    @property
    def num_outputs(self) -> int:
        return sum(part.num_rows for part in self.parts)


def projections(spec: DecoderSpec) -> Iterator[Projection]:
    """Lists the projections of the whole model, but for those of experts and recurrent layers."""
    yield outer_projection(spec, "embeddings")
    if not spec.has_tied_embeddings:
        yield outer_projection(spec, "head")
    if spec.layer_inputs is not None:
        yield outer_projection(spec, "layer_table")
        yield outer_projection(spec, "layer_context")
    for index in range(spec.num_layers):
        yield from layer_projections(spec, index).values()


def outer_projection(spec: DecoderSpec, role: Outer) -> Projection:
    num_outputs, num_inputs = spec.vocab_size, spec.hidden_size
    if spec.layer_inputs is not None and role in ("layer_table", "layer_context"):
        of_layers = spec.num_layers * spec.layer_inputs.width
        is_table = role == "layer_table"
        num_outputs, num_inputs = (spec.layer_inputs.vocab_size, of_layers) if is_table else (of_layers, num_inputs)
    return _projection(spec, role, [(OUTER[role], num_outputs)], num_inputs)


def layer_projections(spec: DecoderSpec, index: int) -> dict[Role, Projection]:
    layer, found = spec.layers[index], []
    if layer.has_attention:
        prefix, heads, rows = (
            f"model.layers.{index}.self_attn",
            spec.num_heads * layer.head_size,
            spec.attention_rows(layer),
        )
        separate = [(f"{prefix}.{kind}_proj", count) for kind, count in zip("qkv", rows, strict=True) if count]
        fused = [(f"{prefix}.qkv_proj", sum(rows))]
        found.append(_projection(spec, "qkv", fused if spec.has_fused_qkv else separate, spec.hidden_size))
        found.append(_projection(spec, "output", [(f"{prefix}.o_proj", spec.hidden_size)], heads))
    if layer.has_dense_mlp:
        prefix, inner = f"model.layers.{index}.mlp", spec.intermediate_size * layer.mlp_factor
        separate = [(f"{prefix}.gate_proj", inner)] * spec.is_gated + [(f"{prefix}.up_proj", inner)]
        fused = [(f"{prefix}.gate_up_proj", 2 * inner)]
        found.append(_projection(spec, "gate_up", fused if spec.has_fused_mlp else separate, spec.hidden_size))
        found.append(_projection(spec, "down", [(f"{prefix}.down_proj", spec.hidden_size)], inner))
    if spec.layer_inputs is not None:
        prefix, width = f"model.layers.{index}.per_layer", spec.layer_inputs.width
        found.append(_projection(spec, "input_gate", [(f"{prefix}_input_gate", width)], spec.hidden_size))
        found.append(_projection(spec, "input_output", [(f"{prefix}_projection", spec.hidden_size)], width))
    return {projection.role: projection for projection in found}


def _projection(spec: DecoderSpec, role: Role, parts: list[tuple[str, int]], num_inputs: int) -> Projection:
    named = tuple(
        Part(name=stored_name(spec, f"{name}.weight"), bias=stored_name(spec, f"{name}.bias"), num_rows=num_rows)
        for name, num_rows in parts
    )
    return Projection(role=role, parts=named, num_inputs=num_inputs)


def stored_name(spec: DecoderSpec, name: str) -> str:
    for ours, theirs in spec.renames:
        name = name.replace(ours, theirs)
    return name
