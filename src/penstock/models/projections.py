"""The matrices of a decoder that rows are multiplied with, and the stored tensors that each is made of. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from penstock.models.families import renamed
from penstock.models.layer_specs import ConvSpec, DeltaSpec, ExpertsSpec, MambaSpec, RecurrentSpec
from penstock.models.spec import DecoderSpec

# query: of queries that qkv gives in short.
# gate_up: of MLPs without a gate, up alone. Layers may have inputs of their own: rows of a table, and the context that
# all of them are made of; what they gate goes through input_gate and input_output.
Outer = Literal["embeddings", "head", "layer_table", "layer_context"]
Role = Literal[
    Outer,
    "qkv",
    "query",
    "output",
    "gate_up",
    "down",
    "input_gate",
    "input_output",
    "expert_gate_up",
    "expert_down",
    "shared_gate_up",
    "shared_down",
    "recurrent_input",
    "recurrent_gates",
    "recurrent_output",
]
EXPERT_ROLES: tuple[Role, ...] = ("expert_gate_up", "expert_down")
SHARED_ROLES: tuple[Role, ...] = ("shared_gate_up", "shared_down")
RECURRENT_ROLES: tuple[Role, ...] = ("recurrent_input", "recurrent_gates", "recurrent_output")
LANES = 16  # outputs of codes that lie together
RECURRENCE_NAMES: dict[type, str] = {DeltaSpec: "linear_attn", MambaSpec: "mamba", ConvSpec: "conv"}
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
    outputs_N: np.ndarray | None = None  # of each row, where it is kept in few bits; None: one after another


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    role: Role
    parts: tuple[Part, ...]  # one below the other
    num_inputs: int
    kept_apart: tuple[int, ...] = ()  # outputs where memory of its own begins and ends, where it is kept in few bits

    @property
    def apart(self) -> tuple[int, ...]:
        return self.kept_apart or (0, self.num_outputs)

    @property
    def sizes(self) -> list[int]:
        return [part.num_rows for part in self.parts]

    @property
    def num_outputs(self) -> int:
        return sum(self.sizes)

    @property
    def outputs(self) -> Iterator[tuple[Part, np.ndarray]]:
        """Yields (part, the output of each of its rows) of a matrix that is kept in few bits."""
        first = 0
        for part in self.parts:
            yield part, np.arange(first, first + part.num_rows) if part.outputs_N is None else part.outputs_N
            first += part.num_rows


def projections(spec: DecoderSpec) -> Iterator[Projection]:
    """Lists the projections of the whole model."""
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
        prefix, heads, rows = f"model.layers.{index}.self_attn", spec.num_attended(layer), spec.attention_rows(layer)
        separate = [(f"{prefix}.{kind}_proj", count) for kind, count in zip("qkv", rows, strict=True) if count]
        if spec.latent is not None:
            first, rank, rotated = spec.latent.first_rows(spec.num_heads)
            queries = "q_a_proj" if spec.latent.query_rank else "q_proj"
            separate = [(f"{prefix}.{queries}", first), (f"{prefix}.kv_a_proj_with_mqa", rank + rotated)]
            if spec.latent.query_rank:
                num_queries = spec.num_heads * spec.latent.query_size
                found.append(_projection(spec, "query", [(f"{prefix}.q_b_proj", num_queries)], first))
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
    if layer.has_experts and spec.experts is not None:
        found += _of_experts(spec, spec.experts, f"model.layers.{index}")
    if layer.is_recurrent and spec.recurrent is not None:
        found += _of_recurrence(spec, spec.recurrent, f"model.layers.{index}")
    return {projection.role: projection for projection in found}


def _of_experts(spec: DecoderSpec, experts: ExpertsSpec, layer: str) -> Iterator[Projection]:
    names, inner, hidden = experts.names, experts.intermediate_size, spec.hidden_size
    prefix, count = f"{layer}.{names.experts}", experts.num_experts
    of_expert_E = np.arange(count)[:, None]
    ups_EF, downs_EM = (of_expert_E * padded(size) + np.arange(size) for size in (inner, hidden))
    apart = tuple(part * count * padded(inner) for part in range(2 + experts.is_gated))
    both = [ups_EF + first for first in apart[:-1]]  # the outputs of gates, then of what they gate
    if names.layout == "one by one":
        kinds = [names.gate, names.up][-len(both) :]
        rows = [(f"{e}.{kind}.weight", part[e]) for kind, part in zip(kinds, both, strict=True) for e in range(count)]
        downs = [(f"{e}.{names.down}.weight", downs_EM[e]) for e in range(count)]
    else:
        together = np.stack(both, -1) if names.layout == "inputs first" else np.concatenate(both, -1)
        rows, downs = [(names.gate, together.ravel())], [(names.down, downs_EM.ravel())]
    kept: list[tuple[Role, list[tuple[str, np.ndarray]], int, tuple[int, ...]]] = [
        ("expert_gate_up", rows, hidden, apart),
        ("expert_down", downs, inner, (0, count * padded(hidden))),
    ]
    for role, parts, num_inputs, starts in kept:
        named = tuple(
            Part(name=stored_name(spec, f"{prefix}.{name}"), bias="", num_rows=len(outputs_N), outputs_N=outputs_N)
            for name, outputs_N in parts
        )
        yield Projection(role=role, parts=named, num_inputs=num_inputs, kept_apart=starts)
    if experts.shared_size:
        count = 1 + experts.is_gated
        *first, down = (f"{layer}.{names.shared}.{name}" for name in names.shared_parts)
        separate = [(name, count * experts.shared_size // len(first)) for name in first]
        yield _projection(spec, "shared_gate_up", separate, hidden)
        yield _projection(spec, "shared_down", [(down, hidden)], experts.shared_size)


def padded(num_outputs: int) -> int:
    """Counts the outputs of an expert with those that fill up its last block."""
    return -(-num_outputs // LANES) * LANES


def _of_recurrence(spec: DecoderSpec, recurrent: RecurrentSpec, layer: str) -> Iterator[Projection]:
    prefix, hidden = f"{layer}.{RECURRENCE_NAMES[type(recurrent)]}", spec.hidden_size
    if not isinstance(recurrent, DeltaSpec):
        inner = recurrent.inner_width if isinstance(recurrent, MambaSpec) else recurrent.num_channels
        yield _projection(spec, "recurrent_input", [(f"{prefix}.in_proj", recurrent.widest_rows)], hidden)
        yield _projection(spec, "recurrent_output", [(f"{prefix}.out_proj", hidden)], inner)
        return
    heads = recurrent.num_value_heads
    if recurrent.is_grouped:
        inputs, gates = [("in_proj_qkvz", recurrent.widest_rows)], [("in_proj_ba", 2 * heads)]
    else:
        inputs = [("in_proj_qkv", recurrent.num_channels), ("in_proj_z", recurrent.value_width)]
        gates = [("in_proj_b", heads), ("in_proj_a", heads)]
    first = _projection(spec, "recurrent_input", [(f"{prefix}.{name}", count) for name, count in inputs], hidden)
    if recurrent.is_grouped:  # codes of all queries lie together, of all keys, values and gates
        part = replace(first.parts[0], outputs_N=_ungrouped(recurrent))
        first = replace(first, parts=(part,))
    yield first
    yield _projection(spec, "recurrent_gates", [(f"{prefix}.{name}", count) for name, count in gates], hidden)
    yield _projection(spec, "recurrent_output", [(f"{prefix}.out_proj", hidden)], recurrent.value_width)


def _ungrouped(spec: DeltaSpec) -> np.ndarray:
    """Finds the output of each row, where rows have queries, keys, values and gates of each key head together."""
    heads = np.arange(spec.num_key_heads)[:, None]
    values = spec.value_width // spec.num_key_heads
    starts = (0, spec.key_width, 2 * spec.key_width, spec.num_channels)
    sizes = (spec.key_size, spec.key_size, values, values)
    parts = [first + heads * size + np.arange(size) for first, size in zip(starts, sizes, strict=True)]
    return np.concatenate(parts, axis=1).ravel()


def _projection(spec: DecoderSpec, role: Role, parts: list[tuple[str, int]], num_inputs: int) -> Projection:
    named = tuple(
        Part(name=stored_name(spec, f"{name}.weight"), bias=stored_name(spec, f"{name}.bias"), num_rows=num_rows)
        for name, num_rows in parts
    )
    return Projection(role=role, parts=named, num_inputs=num_inputs)


def stored_name(spec: DecoderSpec, name: str) -> str:
    return renamed(name, spec.renames)
