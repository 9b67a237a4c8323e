"""How a GGUF file says that positions rotate: Hugging Face's config entries for it."""

from __future__ import annotations

from math import log, sqrt
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from penstock.errors import InvalidModelFile, UnsupportedModel, brief
from penstock.models.gguf import GgufFile
from penstock.models.gguf_keys import Keys, shortest_float32


def rotary_entries(gguf: GgufFile, keys: Keys, head_dim: int, max_positions: int) -> dict[str, Any]:
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise InvalidModelFile(
            f"{gguf.path}: {rotary_dim} rotary dimensions do not fit heads of {head_dim}; convert the model again."
        )
    entries: dict[str, Any] = {} if rotary_dim == head_dim else {"partial_rotary_factor": rotary_dim / head_dim}
    kind = keys.raw("rope.scaling.type", "linear")  # llama.cpp's default, which without a factor scales nothing
    factor = keys.optional_number("rope.scaling.factor") or keys.optional_number("rope.scale_linear")
    if "rope_factors_long.weight" in gguf.tensors:
        original = keys.integer("rope.scaling.original_context_length", max_positions)
        entries["original_max_position_embeddings"] = original
        entries["rope_scaling"] = _longrope(gguf, keys, rotary_dim, max_positions, original)
    elif "rope_freqs.weight" in gguf.tensors:
        factors = _rotary_factors(gguf, "rope_freqs.weight", rotary_dim)
        if kind not in ("none", "linear") or factor not in (None, 1):
            raise _unsupported_scaling(gguf, f"{brief(kind)} beside rope_freqs.weight")
        if any(item != 1.0 for item in factors):
            entries["rope_scaling"] = {"rope_type": "factors", "factors": factors}
    elif kind == "yarn" and factor:
        entries["rope_scaling"] = _yarn(keys, factor)
    elif kind == "linear":
        if factor not in (None, 1):
            entries["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise _unsupported_scaling(gguf, brief(kind))
    return entries


def _unsupported_scaling(gguf: GgufFile, kind: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{gguf.path} uses rotary scaling {kind}; linear, yarn, longrope and llama3 are read from GGUF, "
        "so use the model's safetensors folder instead."
    )


def _yarn(keys: Keys, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    stored = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    for theirs, ours in stored.items():
        if (value := keys.optional_number(f"rope.scaling.{ours}")) is not None:
            scaling[theirs] = value
    return scaling


def _longrope(gguf: GgufFile, keys: Keys, rotary_dim: int, max_positions: int, original: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": _rotary_factors(gguf, "rope_factors_long.weight", rotary_dim),
        "short_factor": _rotary_factors(gguf, "rope_factors_short.weight", rotary_dim),
        "original_max_position_embeddings": original,
    }
    stored = keys.optional_number("rope.scaling.attn_factor")
    usual = sqrt(1 + log(max_positions / original) / log(original)) if max_positions > original > 1 else 1.0
    if stored is not None and abs(stored - usual) > 1e-5:
        scaling["attention_factor"] = stored
    return scaling


def _rotary_factors(gguf: GgufFile, name: str, rotary_dim: int) -> list[float]:
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.shape != (rotary_dim // 2,) or tensor.quant_type != GGMLQuantizationType.F32:
        found = "missing" if tensor is None else f"{tensor.quant_type.name} of shape {tensor.shape}"
        raise InvalidModelFile(
            f"{gguf.path}: {name} is {found}, not F32 of shape ({rotary_dim // 2},); convert the model again."
        )
    try:
        with tensor.path.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            values = np.frombuffer(file.read(tensor.num_bytes), dtype="<f4")
    except (OSError, ValueError) as error:
        raise InvalidModelFile(f"{gguf.path}: {name} cannot be read ({error}); download it again.") from error
    if len(values) != rotary_dim // 2 or not np.all(np.isfinite(values) & (values > 0)):
        raise InvalidModelFile(f"{gguf.path}: {name} holds values that are no factors; download it again.")
    return [shortest_float32(value) for value in values]


def rotated_share(gguf: GgufFile, head_dim: int) -> float:
    """The part of a head that rotates, where the file divides the frequencies of the rest by what leaves nothing."""
    factors = _rotary_factors(gguf, "rope_freqs.weight", head_dim)
    num_rotated = sum(factor == 1.0 for factor in factors)
    if any(factor != 1.0 for factor in factors[:num_rotated]) or any(one < 1e20 for one in factors[num_rotated:]):
        raise _unsupported_scaling(gguf, "by rope_freqs.weight")
    return 2 * num_rotated / head_dim
