"""The config.json that the model in a GGUF file would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import InvalidModelFile, UnsupportedModel, brief
from penstock.models.families import FAMILIES
from penstock.models.gguf import GgufFile
from penstock.models.gguf_architectures import Architecture
from penstock.models.gguf_keys import Keys
from penstock.models.gguf_rotary import rotary_entries, rotated_share
from penstock.models.gguf_translation import architecture, hf_tensors, num_layers, stems_by_layer

# What would change the numbers, and what it is where it does not; families that have a word for it read it.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (None, 0),
    "expert_weights_scale": (None, 0, 1),
    "expert_group_count": (None, 0, 1),
    "moe_latent_size": (None, 0),
    "nextn_predict_layers": (None, 0),
    "attention.causal": (None, True),
    "attention.scale": (None, 0),
    "attention.clamp_kqv": (None, 0),
    "attention.temperature_scale": (None, 0),
    "rope.dimension_sections": (None,),
    "logit_scale": (None, 0, 1),
    "residual_scale": (None, 0, 1),
    "embedding_scale": (None, 0, 1),
    "attn_logit_softcapping": (None, 0),
}


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """The config.json that the stored model would have."""
    name, family = architecture(gguf)
    keys = Keys(gguf, name)
    _refuse_variants(keys, name, family)
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        shape = None if embedding is None else embedding.shape
        raise InvalidModelFile(
            f"{gguf.path}: token_embd.weight has shape {shape}, not rows of {hidden_size}; convert the model again."
        )
    layers = _layers(gguf, keys)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(keys, family),
        "num_hidden_layers": len(layers),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads, **_of_layers(family)),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": _norm_eps(keys),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **family.fixed,
        **_biases(gguf, name, family),
        **_token_ids(gguf),
    }
    if family.rotates:
        config |= rotary_entries(gguf, keys, head_dim, config["max_position_embeddings"])
    config |= _window_entries(keys, family, len(layers))
    if family.kinds or family.other_kind:
        config["layer_types"] = [_kind(family, stems) for stems in layers]
    config |= {word: keys.integer(key) for word, key in family.integers.items()}
    config |= {word: value for word, key in family.numbers.items() if (value := keys.optional_number(key)) is not None}
    if entries := _ENTRIES.get(family.model_type):
        config |= entries(keys, config, layers)
    hf_tensors(gguf)  # refuses tensors without a place
    theirs = FAMILIES[config["model_type"]].keys
    return {theirs.get(ours, ours): value for ours, value in config.items()}


def _refuse_variants(keys: Keys, name: str, family: Architecture) -> None:
    """Things that would change the numbers and that these families' plain form does not have."""
    plain = {
        **_PLAIN,
        "attention.value_length": (None, keys.raw("attention.key_length")),
        "expert_gating_func": (None, 0, family.gating),
        **{key: (None, wanted) for key, wanted in family.needs.items()},
    }
    read = {*family.reads, *family.integers.values(), *family.numbers.values()}
    for key, allowed in plain.items():
        if key not in read and keys.raw(key) not in allowed:
            raise UnsupportedModel(
                f"{keys.path}: {name}.{key} is {brief(keys.raw(key))}, a variant of {name} that is not run from "
                "GGUF; use the model's safetensors folder instead."
            )


def _layers(gguf: GgufFile, keys: Keys) -> list[set[str]]:
    """Lists what each layer that runs has, such as attn_q."""
    stems, count = stems_by_layer(gguf.tensors), keys.integer("block_count")
    if set(stems) != set(range(min(count, len(stems) + 1))):
        raise InvalidModelFile(
            f"{gguf.path} declares {count} layers and holds tensors of {len(stems)}; convert the model again."
        )
    return [stems[index] for index in range(num_layers(keys))]


def _kind(family: Architecture, stems: set[str]) -> str:
    return next((kind for stem, kind in family.kinds.items() if stem in stems), family.other_kind)


def _intermediate_size(keys: Keys, family: Architecture) -> int:
    """Reads the width of the plain MLPs; where all layers have experts, what the file says is used by nothing."""
    stored = keys.raw("feed_forward_length")
    has_none = stored in (None, 0) or (isinstance(stored, list) and not any(stored))
    of_experts = "expert_" if has_none and "expert_count" in family.integers.values() else ""
    return keys.integer(f"{of_experts}feed_forward_length", **_of_layers(family))


def _of_layers(family: Architecture) -> dict[str, Any]:
    return {"layer": 0} if family.has_unlike_layers else {"skips_zeros": bool(family.kinds)}


def _norm_eps(keys: Keys) -> float:
    either = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    return keys.number(next((key for key in either if keys.raw(key) is not None), either[0]))


def _biases(gguf: GgufFile, name: str, family: Architecture) -> dict[str, bool]:
    stems, weights = _stems(gguf, ".bias"), _stems(gguf, ".weight")
    rest, found = stems - family.biased, {}
    for word, biased in family.biases.items():
        found[word] = bool(rest & biased)
        rest -= biased
    has_all = all(biased & stems in (frozenset(), biased & weights) for biased in family.biases.values())
    if rest or not has_all or (family.biased & weights) - stems:
        raise UnsupportedModel(
            f"{gguf.path} has biases on {sorted(stems) or 'nothing'}, which Hugging Face's {name} models "
            "cannot have; use the model's safetensors folder instead."
        )
    return found


def _stems(gguf: GgufFile, suffix: str) -> set[str]:
    names = (name for name in gguf.tensors if name.startswith("blk.") and name.endswith(suffix))
    return {name.split(".", 2)[2].removesuffix(suffix) for name in names}


def _token_ids(gguf: GgufFile) -> dict[str, int | None]:
    """None where the file has none: a config class's own default would be another model's id."""
    stored = {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    found = {name: gguf.metadata.get(key) for name, key in stored.items()}
    return {name: value if type(value) is int else None for name, value in found.items()}


def _window_entries(keys: Keys, family: Architecture, num_layers: int) -> dict[str, Any]:
    """Sliding windows: one rule for all layers, or a pattern where every n-th layer sees everything."""
    window = keys.raw("attention.sliding_window")
    window = None if window in (None, 0) else keys.integer("attention.sliding_window")
    if not family.names_window and not (window and family.with_window):
        return {}
    entries = {**family.with_window, "sliding_window": window}
    if family.full_every:
        full = _full_layers(keys, num_layers, family.full_every) if window else [True] * num_layers
        entries["layer_types"] = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    return entries


def _full_layers(keys: Keys, num_layers: int, default_period: int) -> list[bool]:
    pattern = keys.raw("attention.sliding_window_pattern", default_period)
    if isinstance(pattern, list) and len(pattern) == num_layers:
        return [not slides for slides in pattern]
    if isinstance(pattern, list):
        raise keys.refuse("attention.sliding_window_pattern", pattern, f"one entry for each of {num_layers} layers")
    period = keys.integer("attention.sliding_window_pattern", default_period)
    return [(layer + 1) % period == 0 for layer in range(num_layers)]


# --- what some families have besides ------------------------------------------------------------------------

Layers = list[set[str]]


def _query_scalar(config: Mapping[str, Any], layers_of_27b: int) -> int:
    """Only the 27B models, told by their layers, scale queries by the hidden size per head."""
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]


def _gemma3(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
    }


def _gemma4(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    """Full layers have larger heads, maybe fewer; the last layers have no keys of their own, and maybe wider MLPs."""
    slides, count = keys.raw("attention.sliding_window_pattern"), len(layers)
    if not isinstance(slides, list) or len(slides) != count or not all(type(one) is bool for one in slides):
        raise keys.refuse("attention.sliding_window_pattern", slides, f"true or false for each of {count} layers")
    heads = {
        index: keys.integer("attention.head_count_kv", config["num_attention_heads"], layer=index)
        for index in range(count)
    }
    first = heads[slides.index(True)] if True in slides else heads[0]
    full = [index for index, is_local in enumerate(slides) if not is_local]
    widths = {keys.integer("feed_forward_length", layer=index) for index in range(count)}
    shared, inputs = (keys.raw(key) or 0 for key in ("attention.shared_kv_layers", "embedding_length_per_layer_input"))
    experts = keys.raw("expert_count") not in (None, 0)
    return {
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in slides],
        "head_dim": keys.integer("attention.key_length_swa"),
        "num_key_value_heads": first,
        "per_layer_config": {
            str(index): {"head_dim": config["head_dim"], "num_key_value_heads": heads[index]} for index in full
        },
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len(widths) > 1,
        "attention_k_eq_v": any("attn_k" in layers[index] and "attn_v" not in layers[index] for index in full),
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": rotated_share(keys.gguf, config["head_dim"]),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        },
        "enable_moe_block": experts,
        "num_experts": keys.integer("expert_count") if experts else None,
        "top_k_experts": keys.integer("expert_used_count") if experts else None,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length") if experts else None,
    }


def _mistral3(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    """Ministral 3 scales queries by position, and has no factor on its rotary table; Mistral Small 3 has neither."""
    scale, multiplier = (
        keys.optional_number(key) for key in ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
    )
    if scale is None or not config["rope_scaling"]:
        return {}
    scaling = {**config["rope_scaling"], "rope_theta": config["rope_theta"], "llama_4_scaling_beta": scale}
    if multiplier is not None:
        scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "rope_scaling": scaling}


def _gpt_oss(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    return {"attention_bias": True, "rope_scaling": scaling and {**scaling, "truncate": False}}


def _with_dense_layers(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    dense = [index for index, stems in enumerate(layers) if "ffn_gate_inp" not in stems]
    return {"num_dense_layers": len(dense)} if config["model_type"] == "lfm2_moe" else {"mlp_only_layers": dense}


def _delta(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    return {"linear_value_head_dim": _state_head_size(keys), **_axes(keys, config, layers)}


def _axes(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    """How many frequencies turn with time, height and width, of models that read images."""
    sections = keys.raw("rope.dimension_sections")
    if (
        not isinstance(sections, list)
        or config["rope_scaling"] is not None
        or any(type(n) is not int for n in sections)
    ):
        return {}
    in_turns = config["model_type"] != "qwen2_5_vl_text"
    scaling = {"rope_type": "default", "mrope_section": sections[:3], "mrope_interleaved": in_turns}
    return {"rope_scaling": scaling}


def _state_head_size(keys: Keys) -> int:
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if inner % heads:
        raise keys.refuse("ssm.inner_size", inner, f"a multiple of {heads} heads")
    return inner // heads


def _granite_hybrid(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    if config["layer_types"].count("mamba"):
        inner, hidden = keys.integer("ssm.inner_size"), config["hidden_size"]
        if inner % hidden:
            raise keys.refuse("ssm.inner_size", inner, f"a multiple of the hidden size, {hidden}")
        entries |= {"mamba_d_head": _state_head_size(keys), "mamba_expand": inner // hidden}
        is_rotary = keys.raw("rope.scaling.finetuned") is not False
        entries["position_embedding_type"] = "rope" if is_rotary else "nope"
    if keys.raw("expert_count") in (None, 0):
        return {**entries, "num_local_experts": 0, "shared_intermediate_size": config["intermediate_size"]}
    shared = keys.raw("expert_shared_feed_forward_length") not in (None, 0)
    return {
        **entries,
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length") if shared else 0,
    }


def _nemotron_h(keys: Keys, config: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    entries = {"mamba_d_head": _state_head_size(keys), "layers_block_type": config["layer_types"]}
    if "num_experts" not in config:
        entries["num_experts"] = 0
    else:
        groups = keys.integer("expert_group_used_count", 1)
        entries |= {"norm_topk_prob": keys.raw("expert_weights_norm") is not False, "topk_group": groups}
        entries["n_shared_experts"] = keys.integer("expert_shared_count", 1)
    return entries


_ENTRIES: Mapping[str, Callable[[Keys, Mapping[str, Any], Layers], dict[str, Any]]] = {
    "smollm3": lambda keys, config, layers: {"no_rope_layers": [int(n % 4 != 0) for n in range(1, len(layers) + 1)]},
    "gemma2": lambda keys, config, layers: {"query_pre_attn_scalar": _query_scalar(config, 46)},
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "mistral": _mistral3,
    "gpt_oss": _gpt_oss,
    "qwen2_moe": _with_dense_layers,
    "qwen3_moe": _with_dense_layers,
    "lfm2_moe": _with_dense_layers,
    "qwen2_5_vl_text": _axes,
    "qwen3_vl_text": _axes,
    "qwen3_vl_moe_text": _axes,
    "qwen3_next": _delta,
    "qwen3_5_text": _delta,
    "qwen3_5_moe_text": _delta,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
}
