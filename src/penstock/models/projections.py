"""The matrices of a decoder that rows are multiplied with, and the stored tensors that each is made of. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.models.spec import DecoderSpec

EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
# gate_up: of MLPs without a gate, up alone.
Role = Literal["embeddings", "head", "qkv", "output", "gate_up", "down"]


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
    for index in range(spec.num_layers):
        yield from layer_projections(spec, index).values()


def outer_projection(spec: DecoderSpec, role: Literal["embeddings", "head"]) -> Projection:
    name = EMBEDDINGS if role == "embeddings" else HEAD
    return _projection(spec, role, [(name, spec.vocab_size)], spec.hidden_size)


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
    if layer.has_mlp and not layer.has_experts:
        prefix, inner = f"model.layers.{index}.mlp", spec.intermediate_size
        separate = [(f"{prefix}.gate_proj", inner)] * spec.is_gated + [(f"{prefix}.up_proj", inner)]
        fused = [(f"{prefix}.gate_up_proj", 2 * inner)]
        found.append(_projection(spec, "gate_up", fused if spec.has_fused_mlp else separate, spec.hidden_size))
        found.append(_projection(spec, "down", [(f"{prefix}.down_proj", spec.hidden_size)], inner))
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
