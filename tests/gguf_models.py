"""Tiny models of every architecture that is read from GGUF, and a writer that lays them out as the converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file
from stored_blocks import sane_blocks
from tiny_models import _DELTA, _EXPERTS, _GEMMA4, _MAMBA, _MULTIPLIERS, _PARTIAL, CONFIGS, _config, _rope
from transformers import PretrainedConfig

Made = Callable[[], PretrainedConfig]
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_MINISTRAL = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
_TILED = {**_DELTA, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 16}
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 17}
_QWEN35 = {"rope_parameters": _rope("default", partial_rotary_factor=0.25, mrope_section=[2, 1, 1])}
_HYBRID = {"layer_types": ["mamba", "attention", "mamba", "mamba"], **_MULTIPLIERS, **_MAMBA}
_LFM2 = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_NEMOTRON = {
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
    "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
}

# An architecture's models differ in their heads, in whether the head is tied, in odd sizes, and in biases.
CASES: dict[str, tuple[str, Made]] = {
    "llama": ("llama", lambda: _config("LlamaConfig", tie_word_embeddings=True)),
    "llama, biases": (
        "llama",
        lambda: _config("LlamaConfig", num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    ),
    "smollm3": ("smollm3", lambda: _config("SmolLM3Config", num_hidden_layers=5)),
    "qwen2": ("qwen2", lambda: _config("Qwen2Config", num_key_value_heads=1)),
    "qwen3": ("qwen3", lambda: _config("Qwen3Config", head_dim=24, tie_word_embeddings=True)),
    "olmo2": ("olmo2", lambda: _config("Olmo2Config")),
    "gemma2": ("gemma2", lambda: _config("Gemma2Config", head_dim=24, query_pre_attn_scalar=24, sliding_window=13)),
    "gemma4": ("gemma4", CONFIGS["gemma4-e"]),
    "gemma4, keys are values": (
        "gemma4",
        lambda: _config(
            "Gemma4TextConfig",
            **_GEMMA4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            final_logit_softcapping=4.0,
        ),
    ),
    "gemma4, experts": ("gemma4", CONFIGS["gemma4-moe"]),
    "mixtral": ("llama", lambda: _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2)),
    "mixtral, wide heads": (
        "llama",
        lambda: _config(
            "MixtralConfig", num_local_experts=3, num_experts_per_tok=1, head_dim=24, num_key_value_heads=4
        ),
    ),
    "mistral3": ("mistral3", lambda: _config("Ministral3Config", head_dim=24, rope_parameters=_MINISTRAL)),
    "mistral3, tied": (
        "mistral3",
        lambda: _config(
            "Ministral3Config", head_dim=16, num_key_value_heads=1, rope_parameters=_MINISTRAL, tie_word_embeddings=True
        ),
    ),
    "granite": ("granite", lambda: _config("GraniteConfig", **_MULTIPLIERS)),
    "granite, biases": (
        "granite",
        lambda: _config("GraniteConfig", **_MULTIPLIERS, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    ),
    "seed_oss": ("seed_oss", lambda: _config("SeedOssConfig", head_dim=24)),
    "seed_oss, biases": (
        "seed_oss",
        lambda: _config("SeedOssConfig", head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True),
    ),
    "ernie4_5": ("ernie4_5", lambda: _config("Ernie4_5Config", head_dim=24)),
    "ernie4_5, biases": (
        "ernie4_5",
        lambda: _config("Ernie4_5Config", head_dim=16, use_bias=True, tie_word_embeddings=False, num_key_value_heads=1),
    ),
    "exaone4": ("exaone4", lambda: _config("Exaone4Config", sliding_window=13, head_dim=24)),
    "exaone4, no windows": (
        "exaone4",
        lambda: _config(
            "Exaone4Config", sliding_window=None, layer_types=["full_attention"] * 4, num_key_value_heads=1
        ),
    ),
    "command-r": ("command-r", lambda: _config("CohereConfig", logit_scale=0.3, num_key_value_heads=1)),
    "cohere2": ("cohere2", lambda: _config("Cohere2Config", sliding_window=13, logit_scale=0.3, rotary_pct=1.0)),
    "glm4": ("glm4", lambda: _config("Glm4Config", head_dim=24)),
    "glm4, no biases": (
        "glm4",
        lambda: _config("Glm4Config", head_dim=16, attention_bias=False, num_key_value_heads=4),
    ),
    "hunyuan-dense": ("hunyuan-dense", lambda: _config("HunYuanDenseV1Config", head_dim=24)),
    "hunyuan-dense, biases": (
        "hunyuan-dense",
        lambda: _config("HunYuanDenseV1Config", head_dim=16, attention_bias=True, tie_word_embeddings=True),
    ),
    "arcee": ("arcee", lambda: _config("ArceeConfig", head_dim=24, rope_parameters=_YARN)),
    "nemotron": ("nemotron", lambda: _config("NemotronConfig", rope_parameters=_PARTIAL, mlp_bias=True)),
    "stablelm": ("stablelm", lambda: _config("StableLmConfig", use_qkv_bias=True, rope_parameters=_PARTIAL)),
    "stablelm, no biases": (
        "stablelm",
        lambda: _config("StableLmConfig", rope_parameters=_PARTIAL, num_key_value_heads=4, tie_word_embeddings=True),
    ),
    "starcoder2": ("starcoder2", lambda: _config("Starcoder2Config", num_key_value_heads=1)),
    "starcoder2, no biases": (
        "starcoder2",
        lambda: _config("Starcoder2Config", use_bias=False, num_key_value_heads=4, tie_word_embeddings=False),
    ),
    "qwen2moe": ("qwen2moe", lambda: _config("Qwen2MoeConfig", **_EXPERTS, shared_expert_intermediate_size=56)),
    "qwen3moe": ("qwen3moe", lambda: _config("Qwen3MoeConfig", **_EXPERTS, head_dim=24, norm_topk_prob=True)),
    "qwen3moe, tied": (
        "qwen3moe",
        lambda: _config(
            "Qwen3MoeConfig",
            **_EXPERTS | {"num_experts": 5, "num_experts_per_tok": 3},
            head_dim=32,
            num_key_value_heads=1,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            attention_bias=True,
        ),
    ),
    "gpt-oss": ("gpt-oss", lambda: _config("GptOssConfig", **_GPT_OSS, intermediate_size=96)),
    "gpt-oss, yarn": (
        "gpt-oss",
        lambda: _config(
            "GptOssConfig",
            **_GPT_OSS | {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32},
            num_key_value_heads=1,
            intermediate_size=64,
            num_hidden_layers=5,
            rope_parameters=_YARN | {"truncate": False},
        ),
    ),
    "qwen3next": (
        "qwen3next",
        lambda: _config(
            "Qwen3NextConfig", **_EXPERTS, **_DELTA, norm_topk_prob=True, shared_expert_intermediate_size=56
        ),
    ),
    "qwen3next, three of a key": (
        "qwen3next",
        lambda: _config(
            "Qwen3NextConfig",
            **_EXPERTS,
            **_TILED,
            norm_topk_prob=True,
            shared_expert_intermediate_size=24,
            num_hidden_layers=5,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
    ),
    "qwen35": ("qwen35", lambda: _config("Qwen3_5TextConfig", **_DELTA, **_QWEN35)),
    "qwen35, three of a key": (
        "qwen35",
        lambda: _config("Qwen3_5TextConfig", **_TILED, **_QWEN35, num_hidden_layers=6, tie_word_embeddings=True),
    ),
    "qwen35, one of a key": (
        "qwen35",
        lambda: _config(
            "Qwen3_5TextConfig", **_DELTA | {"linear_num_value_heads": 2}, **_QWEN35, num_key_value_heads=4
        ),
    ),
    "qwen35moe": (
        "qwen35moe",
        lambda: _config("Qwen3_5MoeTextConfig", **_EXPERTS, **_DELTA, **_QWEN35, shared_expert_intermediate_size=24),
    ),
    "qwen35moe, three of a key": (
        "qwen35moe",
        lambda: _config(
            "Qwen3_5MoeTextConfig",
            **_EXPERTS | {"num_experts": 5},
            **_TILED,
            **_QWEN35,
            shared_expert_intermediate_size=40,
            tie_word_embeddings=True,
            num_key_value_heads=1,
        ),
    ),
    "granitehybrid": (
        "granitehybrid",
        lambda: _config(
            "GraniteMoeHybridConfig", **_HYBRID, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48
        ),
    ),
    "granitehybrid, dense": (
        "granitehybrid",
        lambda: _config(
            "GraniteMoeHybridConfig",
            **_HYBRID,
            num_local_experts=0,
            num_experts_per_tok=0,
            intermediate_size=72,
            shared_intermediate_size=72,
            mamba_n_groups=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            attention_bias=True,
        ),
    ),
    "granitemoe": (
        "granitemoe",
        lambda: _config(
            "GraniteMoeHybridConfig",
            **_HYBRID | {"layer_types": ["attention"] * 4},
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            position_embedding_type="rope",
        ),
    ),
    "lfm2": ("lfm2", lambda: _config("Lfm2Config", **_LFM2, conv_L_cache=3, block_multiple_of=32)),
    "lfm2, untied": (
        "lfm2",
        lambda: _config(
            "Lfm2Config",
            **_LFM2,
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        ),
    ),
    "lfm2moe": (
        "lfm2moe",
        lambda: _config(
            "Lfm2MoeConfig", **_LFM2, **_EXPERTS, conv_L_cache=3, num_dense_layers=1, rope_parameters=_rope("default")
        ),
    ),
    "lfm2moe, all experts": (
        "lfm2moe",
        lambda: _config(
            "Lfm2MoeConfig",
            **_LFM2,
            **_EXPERTS | {"num_experts": 5},
            conv_L_cache=4,
            num_dense_layers=0,
            rope_parameters=_rope("default"),
            num_key_value_heads=4,
        ),
    ),
    "nemotron_h_moe": ("nemotron_h_moe", lambda: _config("NemotronHConfig", **_NEMOTRON)),
    "nemotron_h_moe, groups": (
        "nemotron_h_moe",
        lambda: _config(
            "NemotronHConfig",
            **_NEMOTRON | {"n_groups": 4, "head_dim": 16},
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            num_key_value_heads=1,
        ),
    ),
    "nemotron_h": (
        "nemotron_h",
        lambda: _config("NemotronHConfig", **_NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]}),
    ),
}


# --- writing ------------------------------------------------------------------------------------------------

INTERLEAVED = {"llama", "smollm3", "mistral3", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe"}
INTERLEAVED |= {"arcee"}
NORMS_PLUS_ONE = {"gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"}
ALWAYS_F32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight", "shortconv.conv.weight")


def write_gguf(
    folder: Path,
    architecture: str,
    path: Path,
    quant: Quant | Callable[[str], Quant] = Quant.F32,
    *,
    tensors_of_part: int = 0,
    **metadata: Any,
) -> Path:
    """Converts a folder of transformers; of `metadata` None leaves a key out.

    Where types are chosen by name, matrices are random blocks.
    """
    values = json.loads((folder / "config.json").read_text())
    config = SimpleNamespace(**{"num_hidden_layers": len(values.get("layers_block_type", []))} | values)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_of_part)
    for key, value in (metadata_of(config, architecture) | metadata).items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, config.vocab_size)
    for name, values in converted(folder, config, architecture):
        is_plain = values.ndim == 1 or name.endswith("_norm.weight") or not name.endswith(".weight")
        wanted = quant if isinstance(quant, Quant) else quant(name)
        kind = Quant.F32 if is_plain or name.endswith(ALWAYS_F32) else wanted
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Quant.F16
        if isinstance(quant, Quant) or kind in (Quant.F32, Quant.F16):
            blocks = gguf.quants.quantize(values, kind)
        else:
            blocks = sane_blocks(kind, values.size // values.shape[-1], values.shape[-1], seed=len(name))
        writer.add_tensor(name, blocks.reshape(*values.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add: Any = kinds.get(type(value), writer.add_array)
    add(key, value)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(f"t{index}" for index in range(vocab_size - 1)), "t1t2"])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["t1 t2"])
    writer.add_eos_token_id(2)


def metadata_of(config: SimpleNamespace, architecture: str) -> dict[str, Any]:
    """What a config becomes, by the names after the architecture's."""
    values = vars(config)
    kinds = ["mamba" if kind == "linear_attention" else kind for kind in values.get("layer_types") or []]
    head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    rope = values.get("rope_parameters") or {}
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": values.get("intermediate_size"),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        "expert_count": values.get("num_local_experts") or values.get("num_experts"),
        "expert_used_count": values.get("num_experts_per_tok"),
        "expert_feed_forward_length": values.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": values.get("shared_expert_intermediate_size"),
    }
    layer_eps = values.get("layer_norm_eps") or values.get("layer_norm_epsilon") or values.get("norm_epsilon")
    found["attention.layer_norm_epsilon"] = layer_eps
    found["attention.layer_norm_rms_epsilon"] = values.get("rms_norm_eps") or values.get("norm_eps")
    if values.get("head_dim") and not architecture.startswith("granite"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        found |= {f"rope.scaling.yarn_{key}": rope[key] for key in ("beta_fast", "beta_slow") if key in rope}
    if (share := rope.get("partial_rotary_factor")) or architecture in INTERLEAVED:
        found["rope.dimension_count"] = int(head_dim * (share or 1.0))
    return {key: value for key, value in (found | _special(values, architecture, kinds)).items() if value is not None}


def _special(values: dict[str, Any], architecture: str, kinds: list[str]) -> dict[str, Any]:
    rope, window = values.get("rope_parameters") or {}, values.get("sliding_window")
    scales = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    delta = {
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    }
    if architecture == "gemma4":
        return _gemma4(values)
    if architecture in ("gemma2", "exaone4", "cohere2", "gpt-oss") and window:
        found: dict[str, Any] = {"attention.sliding_window": window}
        if architecture == "exaone4":
            found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
        if architecture == "gemma2":
            found |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope.freq_base": None}
        if architecture == "cohere2":
            found |= {"logit_scale": values["logit_scale"], "rope.scaling.type": "none"}
        return found | ({"expert_feed_forward_length": values["intermediate_size"]} if "gpt" in architecture else {})
    if architecture == "command-r":
        return {"logit_scale": values["logit_scale"], "rope.scaling.type": "none"}
    if architecture == "mistral3":
        return {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    if architecture == "stablelm":
        return {"use_parallel_residual": False, "rope.freq_base": None}
    if architecture == "nemotron":
        return {"attention.layer_norm_epsilon": values["norm_eps"], "rope.scaling.type": "none"}
    if architecture.startswith(("qwen3next", "qwen35")):
        inner = values["linear_value_head_dim"] * values["linear_num_value_heads"]
        found = {key: values[word] for key, word in delta.items()} | {"ssm.inner_size": inner}
        found |= {"full_attention_interval": 4, "rope.dimension_count": values["head_dim"] // 4}
        return found | ({"rope.dimension_sections": [2, 1, 1, 0]} if "35" in architecture else {})
    if architecture.startswith("lfm2"):
        heads = [0 if kind in ("conv", "mamba") else values["num_key_value_heads"] for kind in kinds]
        found = {"shortconv.l_cache": values["conv_L_cache"], "attention.head_count_kv": heads}
        if architecture == "lfm2moe":
            return found | {"leading_dense_block_count": values["num_dense_layers"], "expert_gating_func": 2}
        return found | {"feed_forward_length": _lfm2_width(values)}
    found = {key: values[word] for key, word in scales.items()} if "granite" in architecture else {}
    if architecture in ("granitemoe", "granitehybrid"):
        found["expert_shared_feed_forward_length"] = values["shared_intermediate_size"]
        found["expert_used_count"] = values["num_experts_per_tok"] or None
    if architecture == "granitehybrid":
        found |= _mamba(values, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
        found["attention.head_count_kv"] = [0 if kind == "mamba" else values["num_key_value_heads"] for kind in kinds]
        found |= {"rope.scaling.finetuned": False, "context_length": 1 << 20}
    if architecture.startswith("nemotron_h"):
        found |= {"rope.freq_base": None, "context_length": 1 << 20}
        found["rope.dimension_count"] = values["hidden_size"] // values["num_attention_heads"]
        found |= _mamba(values, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
        found |= _nemotron_h(values, architecture)
    return found


def _gemma4(values: dict[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in values["layer_types"]]
    full = next(iter(values["per_layer_config"].values()))
    kv_heads, width = values["num_key_value_heads"], values["intermediate_size"]
    found: dict[str, Any] = {
        "attention.sliding_window": values["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": (shared := values["num_kv_shared_layers"]),
        "embedding_length_per_layer_input": values["hidden_size_per_layer_input"],
        "attention.key_length_swa": values["head_dim"],
        "attention.value_length_swa": values["head_dim"],
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": values["head_dim"],
        "expert_used_count": values["top_k_experts"],
        "final_logit_softcapping": values["final_logit_softcapping"],
    }
    found |= {f"attention.{part}_length": full["head_dim"] for part in ("key", "value")}
    if full_heads := full.get("num_key_value_heads"):
        found["attention.head_count_kv"] = [kv_heads if is_local else full_heads for is_local in slides]
    if values["use_double_wide_mlp"]:
        count = len(slides)
        found["feed_forward_length"] = [width * (2 if index >= count - shared else 1) for index in range(count)]
    return found


def _mamba(values: dict[str, Any], heads: str, head: str, state: str, groups: str, conv: str) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": values[conv],
        "ssm.state_size": values[state],
        "ssm.group_count": values[groups],
        "ssm.inner_size": values[heads] * values[head],
        "ssm.time_step_rank": values[heads],
    }


def _nemotron_h(values: dict[str, Any], architecture: str) -> dict[str, Any]:
    kinds = values.get("layers_block_type") or values["layer_types"]
    is_sparse = architecture == "nemotron_h_moe"
    inner, kind = (values["moe_intermediate_size"], "moe") if is_sparse else (values["intermediate_size"], "mlp")
    found: dict[str, Any] = {
        "feed_forward_length": [inner if one == kind else 0 for one in kinds],
        "attention.head_count_kv": [
            values["num_key_value_heads"] if one in ("attention", "full_attention") else 0 for one in kinds
        ],
    }
    if not is_sparse:
        names = ("count", "used_count", "feed_forward_length", "shared_feed_forward_length")
        return found | dict.fromkeys(f"expert_{name}" for name in names)
    return found | {
        "expert_count": values["n_routed_experts"],
        "expert_shared_feed_forward_length": values["moe_shared_expert_intermediate_size"],
        "expert_shared_count": values["n_shared_experts"],
        "expert_weights_norm": values["norm_topk_prob"],
        "expert_weights_scale": float(values["routed_scaling_factor"]),
        "expert_group_count": values["n_group"],
        "expert_group_used_count": values["topk_group"],
    }


def _lfm2_width(values: dict[str, Any]) -> int:
    if not values["block_auto_adjust_ff_dim"]:
        return values["intermediate_size"]
    multiple = values["block_multiple_of"]
    return -(-int(values["block_ffn_dim_multiplier"] * int(2 * values["intermediate_size"] / 3)) // multiple) * multiple


def converted(folder: Path, config: SimpleNamespace, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a folder as the converter names them and lays them out."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if architecture == "gemma4":
        head_dim = next(iter(config.per_layer_config.values()))["head_dim"]
        num_rotated = int(head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
        factors = [1.0] * num_rotated + [1e30] * (head_dim // 2 - num_rotated)
        yield "rope_freqs.weight", np.array(factors, dtype=np.float32)
    for name, values in _joined_experts(load_file(folder / "model.safetensors")).items():
        for new_name, part in _laid_out(name, values.float(), config, architecture):
            if new_name.startswith("blk."):
                yield new_name, part.contiguous().numpy()
                continue
            stem, _, suffix = new_name.rpartition(".")
            if suffix not in ("weight", "bias"):
                stem, suffix = new_name, ""
            theirs = names.get_name(stem)
            assert theirs is not None, new_name
            yield theirs + (f".{suffix}" if suffix else ""), part.contiguous().numpy()


def _joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            found[name] = values
            continue
        stem = f"{match[1]}.{match[3]}.weight"
        if match[3] in ("w1", "w2", "w3"):
            stem = stem.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        stem = stem.replace("backbone.", "model.").replace("mixer", "mlp")
        found.setdefault(stem, {})[int(match[2])] = values
    return {
        name: torch.stack([one for _, one in sorted(values.items())]) if isinstance(values, dict) else values
        for name, values in found.items()
    }


def _laid_out(name: str, values: torch.Tensor, config: Any, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    stem = name.rsplit(".", 1)[0]
    if architecture in INTERLEAVED and stem.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + 1
    if architecture in ("qwen35", "qwen35moe") and "linear_attn." in name:
        values = _tiled(name, values, config)
    if architecture == "qwen3next" and name.endswith("in_proj_qkvz.weight"):
        yield from _taken_apart(name, values, config)
    elif name.endswith("A_log"):
        values = -values.exp()
        yield name, values if "linear_attn" in name else values[:, None]
    elif name.endswith(".D"):
        yield name, values[:, None]
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt.bias" if "mixer" in name else ".dt_proj.bias"), values
    elif "conv1d.weight" in name or "conv.conv.weight" in name:
        yield name, values[:, 0]
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.mamba_n_groups if "mamba" in name else config.n_groups
        yield name, values.view(groups, -1)
    elif name.endswith("expert_bias"):
        yield f"{name}.bias", values
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("_bias", ".bias"), values
    elif name.endswith("sinks"):
        yield f"{name}.weight", values
    elif name.endswith(("router.scale", "router.per_expert_scale")):
        kind = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        yield f"blk.{name.split('.')[2]}.{kind}.scale", values
    elif architecture == "gemma4" and (".experts." in name or name.endswith("layer_scalar")):
        yield f"{name}.weight", values
    elif architecture == "gpt-oss" and ".experts." in name:
        yield from _gpt_oss(name, values)
    elif name.endswith("mlp.experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), values.chunk(2, dim=-2), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
    elif name.endswith("mlp.experts.down_proj"):
        yield f"{name}.weight", values
    elif "input_linear" in name:
        yield from _granite(stem, values, has_experts=bool(config.num_local_experts))
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        yield f"{stem.removesuffix('shared_mlp.output_linear')}mlp.down_proj.weight", values
    else:
        yield name, values


def _gpt_oss(name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    is_bias = name.endswith("_bias")
    stem, suffix = name.removesuffix("_bias"), "bias" if is_bias else "weight"
    values = values if is_bias else values.transpose(1, 2)
    if "gate_up" not in name:
        yield f"{stem}.{suffix}", values
        return
    for index, part in enumerate(("gate", "up")):
        yield f"{stem.replace('gate_up', part)}.{suffix}", values[:, index::2]


def _granite(stem: str, values: torch.Tensor, has_experts: bool) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = stem.rsplit(".", 2)[0]
    kind = "mlp.experts" if "block_sparse_moe" in stem else "mlp.shared_expert" if has_experts else "mlp"
    for part, half in zip(("gate", "up"), values.chunk(2, dim=-2), strict=True):
        yield f"{prefix}.{kind}.{part}_proj.weight", half


def _tiled(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Value heads that lie together by key head come by turns."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    axis = 1 if "out_proj" in name else 0
    before = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    if name.endswith("norm.weight"):
        return values
    first, last = values.split([before, values.shape[axis] - before], dim=axis)
    tiled = last.unflatten(axis, (keys, heads // keys, -1)).transpose(axis, axis + 1).flatten(axis, axis + 2)
    return torch.cat([first, tiled], dim=axis)


def _taken_apart(name: str, values: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    keys, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // keys * config.linear_value_head_dim
    q, k, v, z = values.unflatten(0, (keys, -1)).split([key, key, value, value], dim=1)
    yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    yield name.replace("in_proj_qkvz", "in_proj_z"), z.flatten(0, 1)
