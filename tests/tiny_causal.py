"""A tiny random model of any causal class of transformers, made from its default config by the names of its sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_PARAMETERS = 12_000_000
PROBE_TOKENS = 9
LEAST_LAYERS = 3
MAX_LAYERS = 8  # enough for a period of six
VOCABULARY = 199
NORM_GAIN = 0.5  # of the weights of norms; larger ones let rounding grow where normed queries are not scaled
FIRST_SPECIAL = 190  # tokens that stand for images and the like
# What a size of that name becomes, where it is larger; a config that has no such name is not given one. The heads of
# an indexer stay: of few heads, scores are often exactly zero, and which of equal keys is chosen is nobody's promise.
SMALL = {
    VOCABULARY: """vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size
        encoder_hash_byte_group_vocab""",
    96: """intermediate_size ffn_dim n_inner d_ff dim_ff dff block_ff_dim intermediate_size_mlp ffn_hidden_size d_inner
        encoder_ffn_dim decoder_ffn_dim shared_intermediate_size dense_intermediate_size feed_forward_size""",
    64: """hidden_size n_embd d_model embedding_size embedding_dim word_embed_proj_dim attention_hidden_size emb_dim
        lru_width input_embedding_size output_embedding_size""",
    48: """moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        shared_experts_intermediate_size expert_ffn_hidden_size""",
    32: "q_lora_rank kv_lora_rank o_lora_rank qk_nope_head_dim index_head_dim",
    16: """head_dim v_head_dim d_head dim_head kv_channels qk_rope_head_dim swa_head_dim global_head_dim d_kv
        linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim attention_head_dim
        hidden_size_per_layer_input mamba_d_state state_size ssm_state_size rotary_dim laurel_rank
        chunk_size mamba_chunk_size block_size""",
    13: """sliding_window attention_chunk_size attention_window_size window_size local_attention_window
        sliding_window_size index_topk""",
    8: "mamba_n_heads mamba_num_heads n_mamba_heads",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads linear_num_heads num_experts
        num_local_experts n_routed_experts moe_num_experts swa_num_attention_heads num_blocks""",
    2: """num_key_value_heads num_kv_heads linear_num_key_heads swa_num_key_value_heads num_experts_per_tok moe_k
        moe_topk num_experts_per_token num_global_key_value_heads mamba_n_groups n_groups num_query_groups""",
    1: "n_group topk_group num_expert_group moe_num_shared_experts",
}
SIZES = {name: value for value, names in SMALL.items() for name in names.split()}
DEPTHS = (
    *("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "depth"),
    *("num_encoder_layers", "num_decoder_layers"),
)


# What follows from no rule: settings that a class's defaults leave out, or that belong to each other.
_ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": 64},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "glm5_next_text": {"index_topk": 16},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "mistral4": {"qk_nope_head_dim": 16, "head_dim": 32},
    "muse_spark_audio": {"out_hidden_size": 64},
    "mpt": {"use_cache": True},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local"]},
    "roc_bert": {"shape_vocab_size": 50, "pronunciation_vocab_size": 50},
    "step3p5": {"sliding_window": 13},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA | {"n_mamba_heads": 2, "mamba_dt_rank": 8},
    "zamba2": _ZAMBA | {"n_mamba_heads": 8, "mamba_headdim": 16, "hybrid_layer_ids": [1, 3]},
}


class CannotBuild(Exception):
    """Transformers makes no running model of this type from a small config; the message says why."""


def tiny_causal_model(model_type: str) -> PreTrainedModel:
    """Random weights in float32, large enough that attention is far from uniform."""
    try:
        default = CONFIG_MAPPING[model_type](**_defaults(model_type))
        model_class = _model_class(default)
        config = default if isinstance(default, model_class.config_class) else default.get_text_config(decoder=True)
        small = small_config(config)
        _require_small(model_class, small)
        model = with_random_weights(model_class, small)
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(f"no small config of it makes a model: {_in_one_line(error)}") from error
    _require_running(model)
    return model


def _defaults(model_type: str) -> dict[str, Any]:
    """For configs that refuse their own defaults."""
    return {name: value for name, value in NEEDED.get(model_type, {}).items() if isinstance(value, dict)}


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    found: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    return type(config)(**(_small_values(config) | NEEDED.get(config.model_type, {})))


def _small_values(config: PretrainedConfig) -> dict[str, Any]:
    sizes = config.to_dict()
    values: dict[str, Any] = {"is_decoder": True} if "is_decoder" in sizes else {}
    num_special = 0
    for name, value in sizes.items():
        if isinstance(value, dict) and isinstance(part := getattr(config, name), PretrainedConfig):
            values[name] = small_config(part).to_dict()
        elif name in SIZES and type(value) is int:
            values[name] = min(value, SIZES[name])
        elif name.endswith(("_token_id", "_token_index")) and type(value) is int and value >= FIRST_SPECIAL:
            values[name] = FIRST_SPECIAL + num_special % (VOCABULARY - FIRST_SPECIAL)
            num_special += 1
    heads = sizes.get("num_attention_heads")
    if heads is not None and sizes.get("num_key_value_heads") == heads:
        values["num_key_value_heads"] = values["num_attention_heads"]  # each head keeps keys of its own
    values |= _small_depth(sizes)
    return values | _own_sizes(sizes, values)


def _small_depth(sizes: dict[str, Any]) -> dict[str, Any]:
    """The shortest run of first layers that has every kind, and what is given layer by layer cut to it."""
    depths = {name: sizes[name] for name in DEPTHS if isinstance(sizes.get(name), int)}
    if not depths:
        return {}
    depth = max(depths.values())
    by_layer = {
        name: value for name, value in sizes.items() if isinstance(value, (list, tuple)) and len(value) == depth
    }
    kinds = [str(kind) for kind in zip(*by_layer.values(), strict=True)] or [""]
    num_shared = min(sizes.get("num_kv_shared_layers") or 0, 2)
    needed = max(LEAST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)) + num_shared
    small = min(depth, MAX_LAYERS, needed)
    values: dict[str, Any] = dict.fromkeys(depths, small)
    for name, value in by_layer.items():
        values[name] = [min(one, SIZES[name]) if name in SIZES else one for one in value[:small]]
    return values | ({"num_kv_shared_layers": num_shared} if num_shared else {})


def _own_sizes(sizes: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Layers with sizes of their own stay as much larger than the others as they were."""
    own = {
        int(index): {
            name: value * values[name] // sizes[name] if name in values and type(value) is int else value
            for name, value in layer.items()
        }
        for index, layer in (sizes.get("per_layer_config") or {}).items()
        if int(index) < values.get("num_hidden_layers", MAX_LAYERS)
    }
    return {"per_layer_config": own} if own else {}


def _require_small(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise CannotBuild(f"the small config still has {num_parameters / 1e6:.0f} million parameters")


@torch.no_grad()
def with_random_weights(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue  # a table of sines
        noise = torch.randn_like(parameter)
        if parameter.ndim > 1:
            parameter.copy_(noise * max(0.1, parameter.shape[-1] ** -0.5))
        else:
            parameter.mul_(NORM_GAIN).add_(noise * 0.05)
    return model


@torch.no_grad()
def _require_running(model: PreTrainedModel) -> None:
    ids = torch.arange(3, 3 + PROBE_TOKENS)[None]
    try:
        logits = model(input_ids=ids).logits
    except Exception as error:
        raise CannotBuild(f"its plain forward over text fails: {_in_one_line(error)}") from error
    if not bool(torch.isfinite(logits).all()):
        raise CannotBuild("its plain forward over text gives values that are not numbers")


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
