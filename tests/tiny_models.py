"""Tiny random models of every native family, made with transformers: the reference that the decoder is held to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 199

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, theta: float = 10_000.0, **values) -> dict:
    return {"rope_type": kind, "rope_theta": theta, **values}


def _config(class_name: str, **values) -> PretrainedConfig:
    return getattr(transformers, class_name)(**(_BASE | values))


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=128)
_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
_LONGROPE = _rope("longrope", short_factor=[1.0 + 0.1 * i for i in range(8)], long_factor=[2.0 + i for i in range(8)])
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 13}
_GEMMA4 = {"head_dim": 24, "global_head_dim": 40, "sliding_window": 13}
_MINISTRAL = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
_BY_LAYER = {"full_attention": _YARN, "sliding_attention": _rope("default")}
_PARTIAL = _rope("default", partial_rotary_factor=0.5)
_MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.8,
}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 32,
}

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24}
_GRANITE = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_local_experts": 4,
    "shared_intermediate_size": 48,
    **_MULTIPLIERS,
}

_LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_SCALED = _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
_NEMOTRON_H = {
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "full_attention"],
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.7,
}
_FALCON_H1 = {
    "mamba_d_ssm": 128,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.5, 0.8, 1.1, 1.4, 0.9],
    "mlp_multipliers": [0.7, 1.2],
}

# What a name stands for: a family, and the trait of it that is tried.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: _config("LlamaConfig"),
    "llama-mha-tied-bias": lambda: _config(
        "LlamaConfig", num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama-mqa-linear": lambda: _config(
        "LlamaConfig", num_key_value_heads=1, rope_parameters=_rope("linear", factor=2.0)
    ),
    "llama-llama3": lambda: _config("LlamaConfig", rope_parameters=_LLAMA3),
    "llama-yarn": lambda: _config("LlamaConfig", rope_parameters=_YARN),
    "mistral": lambda: _config("MistralConfig", sliding_window=None, head_dim=24),
    "mistral-sliding": lambda: _config("MistralConfig", sliding_window=9),
    "qwen2": lambda: _config("Qwen2Config"),
    "qwen2-mixed-windows": lambda: _config("Qwen2Config", **_WINDOWS),
    "qwen3": lambda: _config("Qwen3Config", head_dim=32),
    "qwen3-yarn-mixed-windows": lambda: _config("Qwen3Config", head_dim=16, rope_parameters=_YARN, **_WINDOWS),
    "qwen3-moe": lambda: _config("Qwen3MoeConfig", **_EXPERTS, head_dim=16, mlp_only_layers=[1]),
    "qwen3-moe-normalized": lambda: _config(
        "Qwen3MoeConfig", **_EXPERTS, head_dim=16, norm_topk_prob=True, decoder_sparse_step=2
    ),
    "mixtral": lambda: _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=21),
    "gpt-oss": lambda: _config(
        "GptOssConfig",
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=17,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=256, truncate=False),
    ),
    "qwen3-next": lambda: _config("Qwen3NextConfig", **_EXPERTS, **_DELTA, shared_expert_intermediate_size=56),
    "qwen3-5": lambda: _config("Qwen3_5TextConfig", **_DELTA),
    "qwen3-5-moe": lambda: _config("Qwen3_5MoeTextConfig", **_EXPERTS, **_DELTA, shared_expert_intermediate_size=24),
    "bamba": lambda: _config("BambaConfig", **_MAMBA, mamba_n_groups=2, attn_layer_indices=[1]),
    "granite-hybrid": lambda: _config("GraniteMoeHybridConfig", **_MAMBA, **_GRANITE, num_experts_per_tok=2),
    "granite-hybrid-dense": lambda: _config(
        "GraniteMoeHybridConfig", **_MAMBA, **_GRANITE | {"num_local_experts": 0}, position_embedding_type="rope"
    ),
    "smollm3": lambda: _config("SmolLM3Config"),
    "phi3": lambda: _config("Phi3Config", sliding_window=31),
    "phi3-longrope": lambda: _config("Phi3Config", rope_parameters=_LONGROPE, original_max_position_embeddings=96),
    "phi3-partial-rotary": lambda: _config(
        "Phi3Config", num_key_value_heads=4, rope_parameters=_rope("default", partial_rotary_factor=0.5)
    ),
    "olmo2": lambda: _config("Olmo2Config"),
    "ministral3": lambda: _config(
        "Ministral3Config", head_dim=24, rope_parameters=_MINISTRAL | {"original_max_position_embeddings": 32}
    ),
    "olmo3": lambda: _config("Olmo3Config", sliding_window=13, rope_parameters=_BY_LAYER),
    "granite": lambda: _config("GraniteConfig", **_MULTIPLIERS, attention_bias=True, mlp_bias=True),
    "seed-oss": lambda: _config("SeedOssConfig", head_dim=24),
    "seed-oss-biases": lambda: _config(
        "SeedOssConfig", attention_bias=False, attention_out_bias=True, mlp_bias=True, head_dim=16
    ),
    "ernie4-5": lambda: _config("Ernie4_5Config", head_dim=24),
    "ernie4-5-bias": lambda: _config("Ernie4_5Config", head_dim=16, use_bias=True, tie_word_embeddings=False),
    "exaone4": lambda: _config("Exaone4Config", sliding_window=13, head_dim=24),
    "exaone4-without-windows": lambda: _config(
        "Exaone4Config", sliding_window=None, layer_types=["full_attention"] * 4
    ),
    "cohere": lambda: _config("CohereConfig", attention_bias=True, logit_scale=0.3),
    "cohere2": lambda: _config("Cohere2Config", sliding_window=13, logit_scale=0.3),
    "glm": lambda: _config("GlmConfig", head_dim=24),
    "glm4": lambda: _config("Glm4Config", head_dim=24),
    "hunyuan-dense": lambda: _config("HunYuanDenseV1Config", head_dim=24),
    "hunyuan-dense-alpha": lambda: _config(
        "HunYuanDenseV1Config",
        head_dim=16,
        attention_bias=True,
        rope_parameters=_rope("dynamic", alpha=50.0, factor=1.0),
    ),
    "arcee": lambda: _config("ArceeConfig", head_dim=24, rope_parameters=_YARN),
    "apertus": lambda: _config("ApertusConfig", rope_parameters=_LLAMA3),
    "nemotron": lambda: _config("NemotronConfig", head_dim=24, rope_parameters=_PARTIAL, mlp_bias=True),
    "stablelm": lambda: _config("StableLmConfig", use_qkv_bias=True, rope_parameters=_PARTIAL),
    "starcoder2": lambda: _config("Starcoder2Config", sliding_window=13),
    "lfm2": lambda: _config("Lfm2Config", **_LFM2, block_multiple_of=32),
    "lfm2-bias": lambda: _config(
        "Lfm2Config", **_LFM2 | {"conv_L_cache": 4}, conv_bias=True, block_auto_adjust_ff_dim=False
    ),
    "lfm2-moe": lambda: _config(
        "Lfm2MoeConfig",
        **_LFM2,
        **_EXPERTS,
        num_dense_layers=1,
        routed_scaling_factor=1.7,
        rope_parameters=_rope("default"),
    ),
    "glm4-moe": lambda: _config(
        "Glm4MoeConfig",
        **_DEEPSEEK,
        head_dim=24,
        use_qk_norm=True,
        attention_bias=True,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=2,
    ),
    "glm4-moe-air": lambda: _config("Glm4MoeConfig", **_DEEPSEEK, norm_topk_prob=False, tie_word_embeddings=True),
    "dots1": lambda: _config("Dots1Config", **_DEEPSEEK, head_dim=24, sliding_window=13, max_window_layers=2),
    "deepseek-v2": lambda: _config(
        "DeepseekV2Config", **_DEEPSEEK, **_LATENT, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek-v2-lite": lambda: _config(
        "DeepseekV2Config",
        **_DEEPSEEK,
        **_LATENT | {"q_lora_rank": None},
        first_k_dense_replace=1,
        rope_parameters=_SCALED,
    ),
    "deepseek-v3": lambda: _config(
        "DeepseekV3Config", **_DEEPSEEK, **_LATENT, n_group=4, topk_group=2, rope_parameters=_SCALED
    ),
    "glm4-moe-lite": lambda: _config("Glm4MoeLiteConfig", **_DEEPSEEK, **_LATENT),
    "minimax-m2": lambda: _config(
        "MiniMaxM2Config", head_dim=24, num_local_experts=8, num_experts_per_tok=3, intermediate_size=40, rotary_dim=16
    ),
    "ernie4-5-moe": lambda: _config(
        "Ernie4_5_MoeConfig",
        head_dim=24,
        moe_num_experts=8,
        moe_k=3,
        moe_intermediate_size=40,
        moe_layer_interval=2,
        moe_layer_end_index=2,
    ),
    "nemotron-h": lambda: _config("NemotronHConfig", **_NEMOTRON_H),
    "nemotron-h-biases": lambda: _config(
        "NemotronHConfig", **_NEMOTRON_H, use_bias=True, n_group=4, topk_group=2, norm_topk_prob=False
    ),
    "falcon-h1": lambda: _config("FalconH1Config", **_MAMBA, **_FALCON_H1, mamba_n_groups=2),
    "falcon-h1-norm": lambda: _config(
        "FalconH1Config", **_MAMBA, **_FALCON_H1, mamba_rms_norm=True, attention_bias=True, mlp_bias=True
    ),
    "falcon-h1-norm-after-gate": lambda: _config(
        "FalconH1Config", **_MAMBA, **_FALCON_H1, mamba_n_groups=4, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "gemma2": lambda: _config("Gemma2Config", **_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": lambda: _config("Gemma3TextConfig", **_GEMMA, num_hidden_layers=7, final_logit_softcapping=4.0),
    # As E2B and E4B are: layers have inputs of their own, and the last ones keys of earlier ones.
    "gemma4-e": lambda: _config(
        "Gemma4TextConfig",
        **_GEMMA4,
        num_hidden_layers=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    # As 31B is: keys are values where heads are large and few.
    "gemma4-dense": lambda: _config(
        "Gemma4TextConfig",
        **_GEMMA4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        attention_bias=True,
        final_logit_softcapping=4.0,
    ),
    # As 26B-A4B is: experts beside an MLP.
    "gemma4-moe": lambda: _config(
        "Gemma4TextConfig",
        **_GEMMA4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=40,
    ),
    "gemma4-unified": lambda: _config("Gemma4UnifiedTextConfig", **_GEMMA4, num_hidden_layers=6, attention_k_eq_v=True),
    "gemma3-linear": lambda: _config(
        "Gemma3TextConfig",
        **_GEMMA,
        rope_parameters={
            "full_attention": _rope("linear", 1_000_000.0, factor=8.0),
            "sliding_attention": _rope("default"),
        },
    ),
}


_LATER_RECURRENT = {
    "lfm2",
    "lfm2-bias",
    "lfm2-moe",
    "nemotron-h",
    "nemotron-h-biases",
    "falcon-h1",
    "falcon-h1-norm",
    "falcon-h1-norm-after-gate",
}
RECURRENT = {
    "qwen3-next",
    "qwen3-5",
    "qwen3-5-moe",
    "bamba",
    "granite-hybrid",
    "granite-hybrid-dense",
    *_LATER_RECURRENT,
}

# Whose attention is that of others: what is left to try for every family is short.
LATER = {
    *_LATER_RECURRENT,
    "glm4-moe",
    "glm4-moe-air",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "glm4-moe-lite",
    "dots1",
    "minimax-m2",
    "ernie4-5-moe",
    "gemma4-dense",
    "gemma4-unified",
    "ministral3",
    "olmo3",
    "granite",
    "seed-oss",
    "seed-oss-biases",
    "ernie4-5",
    "ernie4-5-bias",
    "exaone4",
    "exaone4-without-windows",
    "cohere",
    "cohere2",
    "glm",
    "glm4",
    "hunyuan-dense",
    "hunyuan-dense-alpha",
    "arcee",
    "apertus",
    "nemotron",
    "stablelm",
    "starcoder2",
}


# What checkpoints keep without training it.
OF_BUFFERS = ("expert_bias", "correction_bias", "layer_scalar")


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, large enough that attention is far from uniform and norms are far from one.

    Recurrent heads remember from ten tokens to thousands, so that a state that is lost shows long after.
    """
    return random_model(CONFIGS[name](), seed=seed).to(dtype)


def random_model(config: PretrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        scores = [named for named in model.named_buffers() if named[0].endswith(OF_BUFFERS)]
        for parameter_name, parameter in [*model.named_parameters(), *scores]:
            if "norm" in parameter_name or parameter_name.endswith("layer_scalar"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter_name.endswith("dt_bias"):
                parameter.copy_(torch.linspace(-8, -2, len(parameter)))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    return model


def save_tiny_model(name: str, folder: Path, **values) -> PreTrainedModel:
    """A folder as users have them: config, safetensors, tokenizer."""
    model = tiny_model(name, **values)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def put_experts_in_mxfp4(folder: Path) -> None:
    """Gives a saved gpt-oss experts as they are published: random codes and scales."""
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 125, groups, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": whole}
    (folder / "config.json").write_text(json.dumps(config))


def save_tokenizer(folder: Path) -> None:
    """Token i is the word `w<i>`: texts and ids are easily told from each other."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] of the whole prompt in one call."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def prompt(num_tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (num_tokens,), generator=generator).tolist()
