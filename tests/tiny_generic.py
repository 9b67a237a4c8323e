"""Tiny configs of causal architectures that have no native decoder, and of known troublemakers among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tiny_models import CONFIGS as NATIVE
from tiny_models import VOCABULARY, save_tokenizer
from transformers import PretrainedConfig, PreTrainedModel

_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDTH = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 1024}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
_MAMBA1 = {"num_hidden_layers": 3, "hidden_size": 64, "state_size": 8, "time_step_rank": 8, "conv_kernel": 4}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _config(class_name: str, **values) -> PretrainedConfig:
    return getattr(transformers, class_name)(**(_IDS | values))


def _hybrid(class_name: str, **values) -> PretrainedConfig:
    return _config(class_name, **(_WIDTH | _HEADS | values))


# The causal architectures that a model lane must show; native ones among them run through transformers here.
MUST_SHOW: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": NATIVE["llama"],
    "qwen3": NATIVE["qwen3"],
    "gemma3": NATIVE["gemma3"],
    "gpt-oss": lambda: _hybrid(
        "GptOssConfig", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=13
    ),
    "mamba": lambda: _config("MambaConfig", **_MAMBA1),
    "mamba2": lambda: _config(
        "Mamba2Config",
        num_hidden_layers=3,
        hidden_size=64,
        state_size=16,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=16,
    ),
    "falcon-h1": lambda: _hybrid("FalconH1Config", head_dim=16, mamba_d_ssm=128, mamba_expand=2, **_MAMBA2),
    "bamba": lambda: _hybrid("BambaConfig", attn_layer_indices=[1, 3], mamba_expand=2, **_MAMBA2),
    "jamba": lambda: _hybrid(
        "JambaConfig",
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "lfm2": lambda: _hybrid("Lfm2Config", layer_types=["conv", "conv", "full_attention", "conv"], block_ff_dim=96),
    "granite-moe-hybrid": lambda: _hybrid(
        "GraniteMoeHybridConfig",
        layer_types=["mamba", "attention", "mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        mamba_expand=2,
        **_MAMBA2,
    ),
    "qwen3-next": lambda: _hybrid("Qwen3NextConfig", shared_expert_intermediate_size=32, **_EXPERTS, **_LINEAR),
    "qwen3.5": lambda: _hybrid("Qwen3_5TextConfig", **_LINEAR),
}

# Wrong when read in chunks without care, or unlike the rest in some way.
TROUBLE: dict[str, Callable[[], PretrainedConfig]] = {
    "falcon-mamba": lambda: _config("FalconMambaConfig", **_MAMBA1),
    "minimax": lambda: _hybrid(
        "MiniMaxConfig",
        head_dim=16,
        num_local_experts=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        block_size=16,
    ),
    "recurrent-gemma": lambda: _hybrid(
        "RecurrentGemmaConfig", num_key_value_heads=1, lru_width=64, attention_window_size=16, head_dim=16
    ),
    "gpt2": lambda: _config("GPT2Config", n_embd=64, n_layer=3, n_head=4, n_positions=1024),
    "bloom": lambda: _config("BloomConfig", hidden_size=64, n_layer=3, n_head=4),
    "rwkv": lambda: _config("RwkvConfig", hidden_size=64, attention_hidden_size=64, num_hidden_layers=3),
    "llama-dynamic": lambda: NATIVE["llama"]().__class__(
        **(
            _IDS
            | _WIDTH
            | _HEADS
            | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}}
        )
    ),
    "llama4": lambda: _hybrid(
        "Llama4TextConfig",
        head_dim=16,
        num_local_experts=2,
        attention_chunk_size=16,
        intermediate_size_mlp=96,
    ),
}


def causal_model(config: PretrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, large enough that attention is far from uniform and states matter."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.15)
            else:
                parameter.add_(noise * 0.1)
    return model.to(dtype)


def save_causal_model(config: PretrainedConfig, folder: Path, **values) -> PreTrainedModel:
    """A folder as users have them: config, safetensors, tokenizer."""
    model = causal_model(config, **values)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model
