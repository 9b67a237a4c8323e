"""Layers of a decoder that are unlike each other, as Gemma 4's config says it: heads, shared keys, widths. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
FULL_EVERY = 6  # layers, where a config lists none


def gemma4_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What each layer is; its heads, which some configs give once for all full layers; and whether it has experts."""
    num_layers = int(config["num_hidden_layers"])
    by_period = [FULL if (index + 1) % FULL_EVERY == 0 else SLIDING for index in range(num_layers)]
    kinds = [*(config.get("layer_types") or by_period)[: num_layers - 1], FULL]
    own = config.get("per_layer_config")
    if own is None:
        heads = {"head_dim": config["global_head_dim"]}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            heads["num_key_value_heads"] = config["num_global_key_value_heads"]
        own = {index: heads for index, kind in enumerate(kinds) if kind == FULL}
    num_experts = config["num_experts"] if config.get("enable_moe_block") else 0
    return {"layer_types": kinds, "per_layer_config": own, "num_local_experts": num_experts}


def gemma4_layers(config: Mapping[str, Any], heads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fields of each LayerSpec beside its heads. The last layers attend to the keys of the last one of their kind."""
    kinds = config["layer_types"]
    first_shared = len(heads) - int(config.get("num_kv_shared_layers") or 0)
    last_of = {kind: index for index, kind in enumerate(kinds[:first_shared])}
    found = []
    for index, kind in enumerate(kinds):
        is_shared = index >= first_shared
        if is_shared and (kind not in last_of or heads[last_of[kind]] != heads[index]):
            raise ValueError(f"layer {index} has no earlier {kind} whose keys it could share")
        found.append(
            {
                "keys_of": last_of[kind] if is_shared else None,
                "keys_are_values": bool(config.get("attention_k_eq_v")) and kind == FULL,
                "mlp_factor": 2 if is_shared and config.get("use_double_wide_mlp") else 1,
                "has_mlp_beside": bool(config["num_local_experts"]),
                "sees_spans": kind == SLIDING,
            }
        )
    return found
