"""Other values of the keys of a config, each of its own kind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

# What no forward of a prompt looks at, or what is a kind of its own.
NOT_TRIED = {
    *("architectures", "transformers_version", "dtype", "model_type", "num_hidden_layers", "vocab_size", "use_cache"),
    *("max_position_embeddings", "is_encoder_decoder", "chunk_size_feed_forward", "id2label", "label2id"),
}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    YARN,
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 20, "beta_slow": 2},
    YARN | {"attention_factor": 1.3, "truncate": False},
    LLAMA3 | {"original_max_position_embeddings": 64},
)
# Values that mean nothing, whose result is nobody's promise: no group of experts, no shared expert of a given width.
MEANINGLESS = {("topk_group", 0), ("moe_shared_expert_intermediate_size", 0)}


def changes(name: str, value: Any) -> Iterator[Any]:
    """Other values of a key, of its own kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {value + 1, value * 2, value // 2, 0, 3} - {value}
    elif isinstance(value, float):
        yield value * 1.7 + 0.1
    elif name == "rope_parameters":
        yield from rotary_changes(value)
    elif name in ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act"):
        yield from (one for one in ACTIVATIONS if one != value)
    elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        yield from (value[::-1], value[1:] + value[:1], value[:1] * len(value))
    elif isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
        yield from (value[::-1], [one + 1 for one in value])
    elif value is None:
        yield from (8, True, 0.7)


def rotary_changes(value: Any) -> Iterator[dict[str, Any]]:
    is_flat = not isinstance(value, dict) or "rope_type" in value
    for scaling in SCALINGS:
        new = {"rope_theta": 10_000.0, **scaling}
        if is_flat:
            yield new
        else:
            yield from (copy.deepcopy(value) | {kind: new} for kind in value)
