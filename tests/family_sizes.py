"""The sizes of a small decoder of every native family, as its config must say them."""

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_d_conv": 4}
MORE = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 56},
    "qwen3_moe": EXPERTS,
    "qwen3_vl_moe_text": EXPERTS,
    "qwen3_next": EXPERTS | DELTA | {"shared_expert_intermediate_size": 56},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": EXPERTS | DELTA,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 21},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 17},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "dots1": {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
        "pad_token_id": 0,
    },
    "gemma4_unified_text": {
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 13, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 13, "sliding_window_pattern": 2},
}
