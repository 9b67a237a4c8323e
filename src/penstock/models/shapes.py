"""What a model is to the memory model: its shape, from its spec. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.models.generic_spec import GenericSpec
from penstock.models.layer_specs import state_bytes
from penstock.models.projections import EXPERT_ROLES, Projection, layer_projections
from penstock.models.quantization import GROUP_SUM_BYTES, HALF_GROUP, Quantization, matrix_bytes, quantized_sizes
from penstock.models.spec import DecoderSpec, decoder_spec
from penstock.plan.expert_slots import Mixture
from penstock.plan.memory import ModelShape

ROUTE_BYTES = 12  # of a row in a mixture: its expert, its weight and its place
ID_BYTES = 32  # of a token in a step: its id, its position, and both again as they are put together
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def native_shape(
    config: Mapping[str, Any],
    dtype: str,
    quantization: Quantization | None = None,
    *,
    multiplies_codes: bool = False,
    device: str = "cpu",
) -> ModelShape:
    """`multiplies_codes`: quantized matrices are not dequantized for a product."""
    spec = decoder_spec(config)
    quantized = quantized_sizes(spec, quantization) if quantization is not None else None
    has_codes = bool(quantized and quantized.has_experts and multiplies_codes)
    others = (spec.recurrent.widest_rows if spec.recurrent else 0, _layer_input_values(spec))
    largest_rows = max((1 + spec.is_gated) * spec.widest_mlp, spec.qkv_rows, *others)
    return ModelShape.of(
        spec,
        intermediate_size=spec.widest_mlp,
        largest_matrix=0 if quantized and quantized.are_all and multiplies_codes else spec.hidden_size * largest_rows,
        dtype_bytes=DTYPE_BYTES[dtype],
        attends_through_scores=spec.attention_softcap is not None,
        num_quantized=quantized.num_values if quantized else 0,
        quantized_bytes=quantized.num_bytes if quantized else 0,
        dequantized_tile_bytes=quantized.tile_values * DTYPE_BYTES[dtype] if quantized and not multiplies_codes else 0,
        group_sum_bytes_per_token=quantized.most_halves * GROUP_SUM_BYTES if quantized and multiplies_codes else 0,
        layer_input_values=_layer_input_values(spec),
        expert_bytes_per_token=_expert_bytes(spec, DTYPE_BYTES[dtype], device, has_codes=has_codes),
        swept_bytes_per_token=_swept_bytes(spec, DTYPE_BYTES[dtype], is_quantized=quantized is not None),
        **_recurrent_shape(spec, DTYPE_BYTES[dtype]),
    )


def layer_bytes(spec: DecoderSpec, dtype: str, quantization: Quantization | None) -> list[int]:
    """Counts what the matrices of each layer take."""
    found = []
    for index in range(spec.num_layers):
        num_bytes = spec.layer_parameters(index) * DTYPE_BYTES[dtype]
        for projection in layer_projections(spec, index).values():
            num_bytes -= projection.num_outputs * projection.num_inputs * DTYPE_BYTES[dtype]
            num_bytes += _projection_bytes(projection, dtype, quantization)
        found.append(num_bytes)
    return found


def mixture_of(spec: DecoderSpec, dtype: str, quantization: Quantization | None) -> Mixture | None:
    """Counts what one expert of each layer takes; None where no layer has some."""
    if spec.experts is None:
        return None
    found = []
    for index in range(spec.num_layers):
        projections = layer_projections(spec, index)
        of_experts = [projections[role] for role in EXPERT_ROLES if role in projections]
        num_bytes = sum(_projection_bytes(projection, dtype, quantization) for projection in of_experts)
        found.append(num_bytes // spec.experts.num_experts)
    return Mixture(num_experts=spec.experts.num_experts, num_active=spec.experts.num_active, expert_bytes=tuple(found))


def _projection_bytes(projection: Projection, dtype: str, quantization: Quantization | None) -> int:
    num_inputs = projection.num_inputs
    if quantization is None or (types := quantization.types(projection)) is None:
        return projection.num_outputs * num_inputs * DTYPE_BYTES[dtype]
    return sum(matrix_bytes(kind, num_outputs, num_inputs) for kind, num_outputs in types)


def _expert_bytes(spec: DecoderSpec, dtype_bytes: int, device: str, *, has_codes: bool) -> int:
    """Counts a token's bytes: the inner values of its experts, what each of them gives, and their order."""
    if spec.experts is None or not (device == "cuda" or has_codes):
        return 0
    if device == "cpu":  # a wave has as many rows as the step
        inner, hidden = spec.experts.intermediate_size, spec.hidden_size
        values = 2 * (hidden + (2 + spec.is_gated) * inner) + 4 * (hidden + spec.experts.num_experts)
        return values + spec.experts.num_active * ROUTE_BYTES + max(inner, hidden) // HALF_GROUP * GROUP_SUM_BYTES
    values = spec.experts.num_active * (spec.experts.intermediate_size + spec.hidden_size) + spec.hidden_size
    return values * dtype_bytes + spec.experts.num_active * ROUTE_BYTES


def _swept_bytes(spec: DecoderSpec, dtype_bytes: int, *, is_quantized: bool) -> int:
    """Counts hidden states, which are float32 beside codes, cosines and sines, inputs of layers, and ids and places."""
    rotated = sum(rotary.num_dims for rotary in spec.rotaries.values())
    hidden_bytes = spec.hidden_size * (4 if is_quantized else dtype_bytes)
    return hidden_bytes + (rotated + _layer_input_values(spec)) * dtype_bytes + ID_BYTES


def _recurrent_shape(spec: DecoderSpec, dtype_bytes: int) -> dict[str, int]:
    if spec.recurrent is None:
        return {}
    num_layers, num_without_attention = len(spec.recurrent_layers), spec.num_layers - spec.num_attention_layers
    in_dtype, in_float32 = spec.recurrent.values_per_token
    return {
        "num_recurrent_layers": num_without_attention,
        "state_bytes": num_layers * state_bytes(spec.recurrent, dtype_bytes),
        "recurrent_bytes_per_token": in_dtype * dtype_bytes + in_float32 * 4,
    }


def _layer_input_values(spec: DecoderSpec) -> int:
    return spec.num_layers * spec.layer_inputs.width if spec.layer_inputs else 0


def generic_shape(spec: GenericSpec, *, num_parameters: int, item_bytes: int, keeps_own_cache: bool) -> ModelShape:
    """`keeps_own_cache`: keys grow by copying, and heads are repeated, layer by layer."""
    copied = 2 * item_bytes * spec.head_size * (spec.num_heads + spec.num_kv_heads)
    return ModelShape.of(
        spec,
        num_layers=spec.num_kv_layers,
        num_parameters=num_parameters,
        dtype_bytes=item_bytes,
        copied_bytes_per_token=copied if keeps_own_cache and spec.num_kv_layers else 0,
        kv_values_per_token=spec.own_kv_values if keeps_own_cache else None,
    )
