"""The native families: how each `model_type` differs from the plain llama decoder. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.models.layer_specs import ExpertNames

_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_ALL_BIASES = {**_ATTENTION_BIAS, "mlp_bias": "mlp_bias"}
_USE_BIAS = dict.fromkeys(_ALL_BIASES, "use_bias")
PLAIN_ACTIVATIONS = ("relu2", "silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model_type differs from the plain llama decoder."""

    theta: float = 10_000.0
    tied_by_default: bool = False
    sliding: Literal["none", "all", "by-layer-type"] = "none"
    biases: Mapping[str, str] = field(default_factory=lambda: _ATTENTION_BIAS)  # of what, and the config's key
    traits: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # ours, and the config's where it has another
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what a config means that does not say
    known: Mapping[str, Any] = field(default_factory=dict)  # the only values of these keys that have a native form
    activations: tuple[str, ...] = ("silu", "gelu", "gelu_pytorch_tanh")
    rotates: Literal["all", "windows"] = "all"  # layers; windows: those, or all where none has one
    has_local_rotary: bool = False  # layers with a window have a table of their own
    experts: str | None = None  # key into EXPERT_NAMES
    normalizes_chosen: bool = True  # what a config without norm_topk_prob means
    recurrent: Literal["delta", "mamba", "conv"] | None = None
    is_doubled: bool = False  # attention and recurrence in every layer, beside each other
    is_latent: bool = False  # keys and values are kept as one compressed vector
    has_one_part: bool = False  # layers are attention, recurrence, an MLP or a mixture, not two of them
    full_every: tuple[str | int, ...] = ()  # layers: config keys that say it, then what holds without them


EXPERT_NAMES: Mapping[str, ExpertNames] = {
    "qwen": ExpertNames(),
    "mixtral": ExpertNames(
        router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2"
    ),
    "gpt-oss": ExpertNames(router="mlp.router", layout="inputs first", gate="gate_up_proj"),
    "granite": ExpertNames(
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe",
        layout="outputs first",
        gate="input_linear.weight",
        down="output_linear.weight",
        shared="shared_mlp",
        shared_parts=("input_linear", "output_linear"),
    ),
    "lfm2": ExpertNames(
        router="feed_forward.gate",
        experts="feed_forward.experts",
        gate="w1",
        up="w3",
        down="w2",
        score_bias="feed_forward.expert_bias",
    ),
    "nemotron": ExpertNames(
        router="mixer.gate",
        experts="mixer.experts",
        shared="mixer.shared_experts",
        shared_parts=("up_proj", "down_proj"),
        score_bias="mixer.gate.e_score_correction_bias",
    ),
    "deepseek": ExpertNames(shared="mlp.shared_experts"),
    "deepseek2": ExpertNames(shared="mlp.shared_experts"),  # softmax, and groups by their best expert
    "minimax": ExpertNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
        score_bias="block_sparse_moe.e_score_correction_bias",
    ),
    "ernie": ExpertNames(
        shared="mlp.shared_experts", score_bias="mlp.moe_statics.e_score_correction_bias", score_bias_is_row=True
    ),
    "gemma4": ExpertNames(router="router.proj", experts="experts", layout="outputs first", gate="gate_up_proj"),
}
_BAMBA_NAMES = (
    ("post_attention_layernorm", "pre_ff_layernorm"),
    (".mlp.", ".feed_forward."),
    ("model.norm.", "model.final_layernorm."),
)
_GRANITE_NAMES = (("mlp.gate_up_proj", "shared_mlp.input_linear"), ("mlp.down_proj", "shared_mlp.output_linear"))
_LFM2_NAMES = (
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    (".mlp.gate_proj", ".feed_forward.w1"),
    (".mlp.up_proj", ".feed_forward.w3"),
    (".mlp.down_proj", ".feed_forward.w2"),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("model.norm.", "model.embedding_norm."),
)
_NEMOTRON_H_NAMES = (
    (".self_attn.", ".mixer."),
    (".mamba.", ".mixer."),
    (".mlp.", ".mixer."),
    ("input_layernorm", "norm"),
    ("post_attention_layernorm", "norm"),
    ("model.norm.", "model.norm_f."),
    ("model.embed_tokens", "model.embeddings"),
)
_NEMOTRON_H_KEYS = (
    {"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim"}
    | {"mamba_d_state": "ssm_state_size", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel"}
    | {"mamba_conv_bias": "use_conv_bias", "mamba_proj_bias": "use_bias", "num_experts": "n_routed_experts"}
    | {"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"}
    | {"hidden_act": "mlp_hidden_act", "rms_norm_eps": "layer_norm_epsilon"}
)
_NEMOTRON_H_DEFAULTS = (
    {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8}
    | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 8, "mamba_d_conv": 4}
    | {"mamba_proj_bias": False, "time_step_min": 0.001, "num_experts": 8, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 7688, "shared_expert_intermediate_size": 7688}
)
_FALCON_DEFAULTS = (
    {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "mamba_d_ssm": 1024, "mamba_n_heads": 128}
    | {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_rms_norm": False}
    | {"mamba_norm_before_gate": True, "ssm_multipliers": (1.0,) * 5, "embedding_multiplier": 1.0}
    | {"lm_head_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0}
    | {"attention_out_multiplier": 1.0}
)
_LFM2_DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3}
_GLM4_NAMES = (
    ("post_attention_layernorm", "post_self_attn_layernorm"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "post_mlp_layernorm"),
)
_HUNYUAN_NAMES = (("self_attn.q_norm", "self_attn.query_layernorm"), ("self_attn.k_norm", "self_attn.key_layernorm"))
_APERTUS_NAMES = (("input_layernorm", "attention_layernorm"), ("post_attention_layernorm", "feedforward_layernorm"))
_STARCODER_NAMES = ((".mlp.up_proj", ".mlp.c_fc"), (".mlp.down_proj", ".mlp.c_proj"))
_NORMS_AFTER = {"norms_inputs": False, "norms_outputs": True}
_GLM = {"interleaves_rotary": True, "has_fused_mlp": True}
_GLM_DEFAULTS = {"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07} | {
    "num_key_value_heads": 2,
    "head_dim": 128,
}
_DEEPSEEK_KEYS = {"num_experts": "n_routed_experts", "num_dense_layers": "first_k_dense_replace"}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_LAYER_NORM = {"norm": "layer", "has_norm_biases": True}
_MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
} | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}
_APERTUS_ROPE = {"rope_theta": 12_000_000.0, "rope_type": "llama3", "factor": 8.0} | {
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | {
    "original_max_position_embeddings": 4096
}
_EPS_5 = {"rms_norm_eps": 1e-5}
_NO_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}  # unless asked for
_QWEN_SMALL_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_QWEN_HYBRID_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
_GEMMA_DEFAULTS = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA = {"norms_outputs": True, "norm_offset": 1.0}
_GEMMA4_DEFAULTS = {
    **_GEMMA_DEFAULTS,
    "num_key_value_heads": 4,
    "global_head_dim": 512,
    "sliding_window": 512,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}

# What several families have in common.
_QWEN_HYBRID = Family(
    traits={"qk_norm": "head", "norm_offset": 1.0, "has_output_gate": True},
    recurrent="delta",
    full_every=("full_attention_interval", 4),
    defaults=_QWEN_HYBRID_DEFAULTS,
)
_GEMMA4 = Family(
    tied_by_default=True,
    sliding="by-layer-type",
    traits={"norms_outputs": True, "qk_norm": "head", "norms_values": True, "scales_layers": True},
    known={"use_bidirectional_attention": "vision"},
    has_local_rotary=True,
)
_COHERE = Family(
    tied_by_default=True,
    traits={"norm": "layer", "is_parallel": True, "interleaves_rotary": True},
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={**_EPS_5, "logit_scale": 0.0625},
)
_LFM2 = Family(
    theta=1_000_000.0,
    tied_by_default=True,
    biases={},
    traits={"qk_norm": "head", "renames": _LFM2_NAMES},
    keys={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    recurrent="conv",
)
_DEEPSEEK = Family(biases={}, keys=_DEEPSEEK_KEYS, known={"attention_bias": False}, experts="deepseek", is_latent=True)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(biases=_ALL_BIASES),
    "mistral": Family(sliding="all", biases={}, defaults={"sliding_window": 4096}),
    "qwen2": Family(sliding="by-layer-type", biases={}, traits={"qkv_bias": True}, defaults=_NO_WINDOWS),
    "qwen3": Family(sliding="by-layer-type", traits={"qk_norm": "head"}, defaults={**_NO_WINDOWS, "head_dim": 128}),
    "qwen2_5_vl_text": Family(
        theta=1_000_000.0,
        sliding="by-layer-type",
        biases={},
        traits={"qkv_bias": True},
        defaults={**_EPS_5, **_NO_WINDOWS, "max_window_layers": 80},
    ),
    "qwen3_vl_text": Family(theta=500_000.0, traits={"qk_norm": "head"}, defaults={"head_dim": 128}),
    "qwen3_vl_moe_text": Family(
        theta=500_000.0, traits={"qk_norm": "head"}, defaults={"moe_intermediate_size": 1408}, experts="qwen"
    ),
    "smollm3": Family(
        theta=2_000_000.0,
        tied_by_default=True,
        sliding="by-layer-type",
        biases=_ALL_BIASES,
        defaults={"use_sliding_window": False},
    ),
    "phi3": Family(
        sliding="all",
        biases={},
        traits={"has_fused_qkv": True, "has_fused_mlp": True},
        defaults={**_EPS_5, "original_max_position_embeddings": 4096},
    ),
    "olmo2": Family(traits={"qk_norm": "projection", "norms_inputs": False, "norms_outputs": True}, defaults=_EPS_5),
    "qwen2_moe": Family(
        sliding="by-layer-type",
        biases={},
        traits={"qkv_bias": True},
        defaults={**_NO_WINDOWS, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        experts="qwen",
        normalizes_chosen=False,
    ),
    "qwen3_moe": Family(
        sliding="all",
        traits={"qk_norm": "head"},
        defaults={**_NO_WINDOWS, "moe_intermediate_size": 768},
        experts="qwen",
        normalizes_chosen=False,
    ),
    "qwen3_next": replace(_QWEN_HYBRID, experts="qwen", defaults={**_QWEN_HYBRID_DEFAULTS, **_QWEN_SMALL_EXPERTS}),
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe_text": replace(
        _QWEN_HYBRID, experts="qwen", defaults={**_QWEN_HYBRID_DEFAULTS, **_QWEN_SMALL_EXPERTS, "intermediate_size": 0}
    ),
    "mixtral": Family(theta=1_000_000.0, sliding="all", biases={}, experts="mixtral", defaults=_EPS_5),
    "gpt_oss": Family(
        theta=150_000.0,
        sliding="by-layer-type",
        full_every=(2,),
        traits={"has_sinks": True},
        experts="gpt-oss",
        defaults={**_EPS_5, "head_dim": 64, "attention_bias": True, "sliding_window": 128}
        | {"rope_parameters": _GPT_OSS_ROPE},
    ),
    "bamba": Family(
        recurrent="mamba",
        biases=_ALL_BIASES,
        traits={"renames": _BAMBA_NAMES},
        defaults={**_EPS_5, "partial_rotary_factor": 0.5},
    ),
    "granitemoehybrid": Family(
        recurrent="mamba",
        experts="granite",
        traits={"has_fused_mlp": True, "renames": _GRANITE_NAMES},
        defaults={"shared_intermediate_size": 1024},
    ),
    "gemma2": Family(
        tied_by_default=True,
        sliding="by-layer-type",
        full_every=(2,),
        traits=_GEMMA,
        defaults={**_GEMMA_DEFAULTS, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096},
    ),
    "gemma3_text": Family(
        theta=1_000_000.0,
        tied_by_default=True,
        sliding="by-layer-type",
        full_every=("sliding_window_pattern", 6),
        traits={**_GEMMA, "qk_norm": "head"},
        defaults={**_GEMMA_DEFAULTS, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        known={"use_bidirectional_attention": False},
        has_local_rotary=True,
    ),
    "gemma4_text": replace(
        _GEMMA4,
        keys={"num_experts_per_tok": "top_k_experts"},
        defaults={**_GEMMA4_DEFAULTS, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144},
        experts="gemma4",
    ),
    "gemma4_unified_text": replace(_GEMMA4, defaults={**_GEMMA4_DEFAULTS, "sliding_window": 1024}),
    "ministral3": Family(
        sliding="all",
        biases={},
        defaults={**_EPS_5, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _MINISTRAL_ROPE},
    ),
    "olmo3": Family(
        theta=500_000.0,
        sliding="by-layer-type",
        full_every=(4,),
        traits={"qk_norm": "projection", **_NORMS_AFTER},
        defaults={**_EPS_5, "sliding_window": 4096},
        has_local_rotary=True,
    ),
    "granite": Family(biases=_ALL_BIASES),
    "seed_oss": Family(
        biases={"qkv_bias": "attention_bias", "output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"},
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "ernie4_5": Family(
        theta=500_000.0,
        tied_by_default=True,
        biases=_USE_BIAS,
        traits={"interleaves_rotary": True},
        defaults={**_EPS_5, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "exaone4": Family(
        sliding="by-layer-type",
        full_every=("sliding_window_pattern", 4),
        biases={},
        traits={"qk_norm": "head", **_NORMS_AFTER},
        defaults={**_EPS_5, "sliding_window": 4096, "num_key_value_heads": 32},
        rotates="windows",
    ),
    "cohere": replace(_COHERE, theta=500_000.0, known={"use_qk_norm": False}),
    "cohere2": replace(
        _COHERE,
        sliding="by-layer-type",
        full_every=("sliding_window_pattern", 4),
        defaults={**_COHERE.defaults, "sliding_window": 4096},
        rotates="windows",
    ),
    "glm": Family(biases={"qkv_bias": "attention_bias"}, traits=_GLM, defaults=_GLM_DEFAULTS),
    "glm4": Family(
        biases={"qkv_bias": "attention_bias"},
        traits={**_GLM, "norms_outputs": True, "renames": _GLM4_NAMES},
        defaults=_GLM_DEFAULTS,
    ),
    "hunyuan_v1_dense": Family(traits={"qk_norm": "rotated head", "renames": _HUNYUAN_NAMES}, defaults=_EPS_5),
    "arcee": Family(
        biases=_ALL_BIASES,
        traits={"is_gated": False},
        defaults={**_EPS_5, "hidden_act": "relu2"},
        activations=PLAIN_ACTIVATIONS,
    ),
    "apertus": Family(
        theta=12_000_000.0,
        traits={"is_gated": False, "qk_norm": "head", "renames": _APERTUS_NAMES},
        defaults={**_EPS_5, "hidden_act": "xielu", "rope_parameters": _APERTUS_ROPE},
        activations=("xielu",),
    ),
    "nemotron": Family(
        biases=_ALL_BIASES,
        traits={**_LAYER_NORM, "norm_offset": 1.0, "is_gated": False},
        keys={"rms_norm_eps": "norm_eps"},
        defaults={**_EPS_5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        activations=PLAIN_ACTIVATIONS,
    ),
    "stablelm": Family(
        biases={"qkv_bias": "use_qkv_bias"},
        traits=_LAYER_NORM,
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults={**_EPS_5, "partial_rotary_factor": 0.25},
        known={"use_parallel_residual": False, "qk_layernorm": False},
    ),
    "starcoder2": Family(
        tied_by_default=True,
        sliding="all",
        biases=_USE_BIAS,
        traits={**_LAYER_NORM, "is_gated": False, "renames": _STARCODER_NAMES},
        keys={"rms_norm_eps": "norm_epsilon"},
        defaults={"use_bias": True, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, "num_key_value_heads": 2},
        activations=PLAIN_ACTIVATIONS,
    ),
    "lfm2": replace(
        _LFM2,
        defaults={**_LFM2_DEFAULTS, "intermediate_size": 12288, "block_auto_adjust_ff_dim": True}
        | {"block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
    ),
    "lfm2_moe": replace(
        _LFM2,
        defaults={**_LFM2_DEFAULTS, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1792},
        experts="lfm2",
    ),
    "glm4_moe": Family(
        biases={"qkv_bias": "attention_bias"},
        keys=_DEEPSEEK_KEYS,
        defaults={**_EPS_5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "num_dense_layers": 1}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
        | {"n_shared_experts": 1},
        experts="deepseek",
    ),
    "dots1": Family(
        sliding="by-layer-type",
        traits={"qk_norm": "head"},
        keys=_DEEPSEEK_KEYS,
        defaults={"sliding_window": 4096, "max_window_layers": 62, "moe_intermediate_size": 1408},
        experts="deepseek",
        normalizes_chosen=False,
    ),
    "deepseek_v2": replace(
        _DEEPSEEK,
        defaults={**_LATENT, "num_experts": 64, "n_shared_experts": 2, "topk_method": "greedy"}
        | {"moe_intermediate_size": 1407},
        known={"attention_bias": False, "mlp_bias": False, "rope_interleave": True},
        experts="deepseek2",
    ),
    "deepseek_v3": replace(
        _DEEPSEEK,
        defaults={**_LATENT, "num_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_dense_layers": 3}
        | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048},
    ),
    "glm4_moe_lite": replace(
        _DEEPSEEK,
        keys={"num_experts": "n_routed_experts"},
        defaults={**_LATENT, **_EPS_5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
        | {"num_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "num_dense_layers": 1}
        | {"routed_scaling_factor": 1.8, "moe_intermediate_size": 1536},
    ),
    "minimax_m2": Family(
        theta=5_000_000.0,
        biases={},
        traits={"qk_norm": "projection"},
        defaults={"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
        experts="minimax",
    ),
    "ernie4_5_moe": Family(
        theta=500_000.0,
        tied_by_default=True,
        biases={},
        traits={"interleaves_rotary": True},
        keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
        | {"n_shared_experts": "moe_num_shared_experts", "num_dense_layers": "moe_layer_start_index"}
        | {"decoder_sparse_step": "moe_layer_interval"},
        defaults={**_EPS_5, "num_key_value_heads": 4, "moe_intermediate_size": 1536, "num_experts": 64}
        | {"num_experts_per_tok": 6, "n_shared_experts": 2, "num_dense_layers": 1}
        | {"moe_layer_end_index": 27},
        known={"use_bias": False, "moe_norm_min": 1e-12},
        experts="ernie",
    ),
    "nemotron_h": Family(
        biases={},
        traits={"is_gated": False, "renames": _NEMOTRON_H_NAMES},
        keys=_NEMOTRON_H_KEYS,
        defaults=_NEMOTRON_H_DEFAULTS,
        known={"mlp_bias": False, "moe_latent_size": None, "sliding_window": None}
        | {"mamba_hidden_act": "silu", "tie_word_embeddings": False},
        activations=PLAIN_ACTIVATIONS,
        experts="nemotron",
        recurrent="mamba",
        has_one_part=True,
    ),
    "falcon_h1": Family(
        biases=_ALL_BIASES,
        traits={"renames": _BAMBA_NAMES},
        defaults=_FALCON_DEFAULTS,
        known={"projectors_bias": False, "mamba_proj_bias": False},
        recurrent="mamba",
        is_doubled=True,
    ),
}


def renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Gives the name in a checkpoint of what our decoder calls so."""
    for ours, theirs in renames:
        name = name.replace(ours, theirs)
    return name
