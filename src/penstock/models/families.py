"""The native families: how each `model_type` differs from the plain llama decoder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.models.layer_specs import ExpertNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model_type differs from the plain llama decoder."""

    theta: float = 10_000.0
    tied_by_default: bool = False
    sliding: Literal["none", "all", "by-layer-type"] = "none"
    biases: tuple[Literal["attention", "mlp"], ...] = ("attention",)  # which its class asks the config for
    traits: Mapping[str, Any] = field(default_factory=dict)
    experts: str | None = None  # key into EXPERT_NAMES
    normalizes_chosen: bool = True  # what a config without norm_topk_prob means
    recurrent: Literal["delta", "mamba"] | None = None
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
}
_QWEN_HYBRID = {"qk_norm": "head", "norm_offset": 1.0, "has_output_gate": True}
_QWEN_INTERVAL = ("full_attention_interval", 4)
_BAMBA_NAMES = (
    ("post_attention_layernorm", "pre_ff_layernorm"),
    (".mlp.", ".feed_forward."),
    ("model.norm.", "model.final_layernorm."),
)
_GRANITE_NAMES = (("mlp.gate_up_proj", "shared_mlp.input_linear"), ("mlp.down_proj", "shared_mlp.output_linear"))
_GEMMA = {"norms_outputs": True, "norm_offset": 1.0}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(biases=("attention", "mlp")),
    "mistral": Family(sliding="all", biases=()),
    "qwen2": Family(sliding="by-layer-type", biases=(), traits={"qkv_bias": True}),
    "qwen3": Family(sliding="by-layer-type", traits={"qk_norm": "head"}),
    "qwen2_5_vl_text": Family(theta=1_000_000.0, sliding="by-layer-type", biases=(), traits={"qkv_bias": True}),
    "qwen3_vl_text": Family(theta=5_000_000.0, traits={"qk_norm": "head"}),
    "qwen3_vl_moe_text": Family(theta=500_000.0, traits={"qk_norm": "head"}, experts="qwen"),
    "smollm3": Family(
        theta=2_000_000.0,
        tied_by_default=True,
        sliding="by-layer-type",
        full_every=(1,),
        biases=("attention", "mlp"),
    ),
    "phi3": Family(sliding="all", biases=(), traits={"has_fused_qkv": True, "has_fused_mlp": True}),
    "olmo2": Family(traits={"qk_norm": "projection", "norms_inputs": False, "norms_outputs": True}),
    "qwen2_moe": Family(
        sliding="by-layer-type",
        full_every=(2,),
        biases=(),
        traits={"qkv_bias": True},
        experts="qwen",
        normalizes_chosen=False,
    ),
    "qwen3_moe": Family(sliding="all", traits={"qk_norm": "head"}, experts="qwen", normalizes_chosen=False),
    "qwen3_next": Family(traits=_QWEN_HYBRID, experts="qwen", recurrent="delta", full_every=_QWEN_INTERVAL),
    "qwen3_5_text": Family(traits=_QWEN_HYBRID, recurrent="delta", full_every=_QWEN_INTERVAL),
    "qwen3_5_moe_text": Family(traits=_QWEN_HYBRID, experts="qwen", recurrent="delta", full_every=_QWEN_INTERVAL),
    "mixtral": Family(theta=1_000_000.0, sliding="all", biases=(), experts="mixtral"),
    "gpt_oss": Family(
        theta=150_000.0, sliding="by-layer-type", full_every=(2,), traits={"has_sinks": True}, experts="gpt-oss"
    ),
    "bamba": Family(recurrent="mamba", biases=("attention", "mlp"), traits={"renames": _BAMBA_NAMES}),
    "granitemoehybrid": Family(
        recurrent="mamba",
        experts="granite",
        tied_by_default=True,
        traits={"has_fused_mlp": True, "renames": _GRANITE_NAMES},
    ),
    "gemma2": Family(tied_by_default=True, sliding="by-layer-type", full_every=(2,), traits=_GEMMA),
    "gemma3_text": Family(
        theta=1_000_000.0,
        tied_by_default=True,
        sliding="by-layer-type",
        full_every=("sliding_window_pattern", "_sliding_window_pattern", 6),
        traits={**_GEMMA, "qk_norm": "head"},
    ),
}
