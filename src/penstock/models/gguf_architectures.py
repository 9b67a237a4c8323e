"""The architectures that are read from GGUF: which Hugging Face model each is, and how its converter names tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock.models.families import EXPERT_NAMES, FAMILIES, Family

# What converters call the parts of a layer, and what our decoder does: families say what their checkpoints call those.
# A stem keeps its `.weight` or `.bias`; a name that is given with one, or without any, stands for that tensor alone.
# `{}`: a tensor for each expert. Two names: it is cut in two.
_ATTENTION = {part: f"self_attn.{part[-1]}_proj" for part in ("attn_q", "attn_k", "attn_v")}
_GATED_MLP = ("gate_proj", "up_proj", "down_proj")


def _state_names(place: str) -> dict[str, str]:
    parts = {"ssm_conv1d": "conv1d", "ssm_dt.bias": "dt_bias", "ssm_a": "A_log", "ssm_norm": "norm"}
    return {stem: f"{place}.{part}" for stem, part in {**parts, "ssm_out": "out_proj"}.items()}


_RECURRENT: Mapping[str, Mapping[str, str]] = {
    "delta": {
        **_state_names("linear_attn"),
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
    },
    "mamba": {**_state_names("mamba"), "ssm_in": "mamba.in_proj", "ssm_d": "mamba.D"},
    "conv": {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_NEXT_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older converters: as Hugging Face has it
    "ssm_ba": "linear_attn.in_proj_ba",
}
_GEMMA4 = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_MLP_NORM_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output_norm.bias": "model.norm.bias",
    "token_embd_norm": "model.norm",  # LFM2's converter calls it so
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

QKV_STEMS = frozenset({"attn_q", "attn_k", "attn_v"})
_OUTPUT_STEMS = frozenset({"attn_output"})
_MLP_STEMS = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
_NORM_STEMS = frozenset({"attn_norm", "ffn_norm"})
_ATTENTION_BIAS = {"attention_bias": QKV_STEMS | _OUTPUT_STEMS}
_ALL_BIASES = {**_ATTENTION_BIAS, "mlp_bias": _MLP_STEMS}
_MAMBA_BIASES = {"mamba_conv_bias": frozenset({"ssm_conv1d"}), "mamba_proj_bias": frozenset({"ssm_in", "ssm_out"})}
_SILU = {"hidden_act": "silu"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
_NO_WINDOW = {**_SILU, "use_sliding_window": False}
# Config entries that are whole numbers in the metadata.
_NUM_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_MIXTURE = {**_NUM_EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"}
_LOCAL_MIXTURE = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_SHARED_SIZE = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_DELTA_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_MAMBA_SIZES = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
}
_CONV_SIZE = {"conv_L_cache": "shortconv.l_cache"}
# And those that are fractions, where they are given.
_GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_SECTIONS = frozenset({"rope.dimension_sections"})
_LOGIT_SCALE = {"logit_scale": "logit_scale"}
_SOFTCAPS = {"final_logit_softcapping": "final_logit_softcapping"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What llama.cpp's converter did to a family's tensors, and so what has to be undone."""

    model_type: str = ""  # as a file calls it, unless given
    named_class: str = ""  # of the library, where it is not called after the type
    own_names: Mapping[str, str] = field(default_factory=dict)  # of parts of layers, beside those of its family
    interleaves_rotary_rows: bool = False  # q and k rows hold rotary pairs side by side
    rotates: bool = True  # queries and keys as metadata of all families say it
    has_unlike_layers: bool = False  # whose heads and widths differ: the config says those of the first, and then more
    alternates_experts: bool = False  # Hugging Face's experts: gate and up by turns, inputs before outputs
    tiles_value_heads: bool = False  # the value heads of recurrent layers: those of a key head lie apart
    fixed: Mapping[str, Any] = field(default_factory=lambda: _SILU)  # config entries the family always has
    biases: Mapping[str, frozenset[str]] = field(default_factory=lambda: _ATTENTION_BIAS)  # its config's words for them
    biased: frozenset[str] = frozenset()  # what has a bias always, without a word in the config
    full_every: int | None = None  # of its layers with a sliding window, which ones see everything
    names_window: bool = False  # in its config, also where there is none
    with_window: Mapping[str, Any] = field(default_factory=dict)  # config entries where the file has one
    integers: Mapping[str, str] = field(default_factory=dict)  # config entries, and the metadata that has to say them
    numbers: Mapping[str, str] = field(default_factory=dict)  # the same; None where the file does not say
    gating: int | None = None  # the only expert_gating_func that its router has, where a file says
    reads: frozenset[str] = frozenset()  # more metadata that changes the numbers, and that is not left out
    needs: Mapping[str, Any] = field(default_factory=dict)  # metadata that has to be so, and is read no further
    kinds: Mapping[str, str] = field(default_factory=dict)  # a tensor that only one kind of layer has, and layer_types'
    other_kind: str = ""  # of layers, where `kinds` finds none
    is_sparse: bool = False  # all layers have experts, and none has an MLP

    @property
    def class_name(self) -> str:
        return self.named_class or "".join(map(str.capitalize, self.model_type.split("_"))) + "ForCausalLM"

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Finds the names of a layer's parts in our decoder."""
        traits = self.family.traits
        found = {"attn_output": "self_attn.o_proj"}
        found |= {"attn_qkv": "self_attn.qkv_proj"} if traits.get("has_fused_qkv") else _ATTENTION
        if traits.get("norms_inputs", True):
            inside = "pre_feedforward_layernorm" if traits.get("norms_outputs") else "post_attention_layernorm"
            found |= {"attn_norm": "input_layernorm", "ffn_norm": inside}
        if traits.get("norms_outputs"):
            found |= _MLP_NORM_AFTER_ATTENTION | {"post_ffw_norm": "post_feedforward_layernorm"}
        if "qk_norm" in traits:
            found |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
        if traits.get("has_sinks"):
            found["attn_sinks.weight"] = "self_attn.sinks"
        if self.family.recurrent is not None:
            found |= _RECURRENT[self.family.recurrent]
        if not self.is_sparse:
            fused = ("gate_up_proj", "down_proj")
            found |= self._mlp_names("", "mlp", fused if traits.get("has_fused_mlp") else _GATED_MLP)
        return {**found, **self._expert_names(), **self.own_names}

    def _mlp_names(self, end: str, place: str, parts: Sequence[str]) -> dict[str, str]:
        """`parts`: down last; where there are two, the first is up, with the gate where there is one."""
        stems = (f"ffn_gate{end}", f"ffn_up{end}")[not self.family.traits.get("is_gated", True) :]
        first = parts[-1 - len(stems) : -1] if len(parts) > 2 else [parts[0]] * len(stems)
        pairs = zip((*stems, f"ffn_down{end}"), (*first, parts[-1]), strict=True)
        return {stem: f"{place}.{part}" for stem, part in pairs}

    def _expert_names(self) -> dict[str, str]:
        if self.family.experts is None:
            return {}
        names = EXPERT_NAMES[self.family.experts]
        found = {"ffn_gate_inp": names.router}
        if "exp_probs_b" in self.biased:
            found["exp_probs_b.bias"] = names.score_bias
        if "shared_expert_intermediate_size" in self.integers or self.family.experts == "granite":
            found |= self._mlp_names("_shexp", names.shared, names.shared_parts)
        if self.family.experts == "qwen":
            found["ffn_gate_inp_shexp"] = names.shared_gate
        if names.layout != "one by one":
            for stem in ("gate", "up", "down"):
                stored = f"{names.experts}.{names.down if stem == 'down' else names.gate}"
                found[f"ffn_{stem}_exps.weight"] = stored
                if f"ffn_{stem}_exps" in self.biased:
                    found[f"ffn_{stem}_exps.bias"] = f"{stored}_bias"
            return found
        of_each = self._mlp_names("_exps", f"{names.experts}.{{}}", (names.gate, names.up, names.down))
        if "ffn_gate_exps" in of_each:
            of_each["ffn_gate_up_exps"] = f"{of_each['ffn_gate_exps']} {of_each['ffn_up_exps']}"
        return found | of_each


def _qwen_hybrid(**values: Any) -> Architecture:
    return Architecture(
        own_names=_MLP_NORM_AFTER_ATTENTION | values.pop("own_names", {}),
        biases={},
        biased=frozenset({"ssm_dt"}),
        kinds={"ssm_a": "linear_attention"},
        other_kind="full_attention",
        reads=frozenset({"rope.dimension_sections", "nextn_predict_layers"}),
        **values,
    )


def _nemotron_h(**values: Any) -> Architecture:
    return Architecture(
        model_type="nemotron_h",
        interleaves_rotary_rows=True,
        rotates=False,
        fixed={"hidden_act": "relu2"},
        biases={"mamba_conv_bias": _MAMBA_BIASES["mamba_conv_bias"]},
        biased=frozenset({"ssm_dt", "exp_probs_b"}),
        kinds={"ssm_a": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe"},
        other_kind="mlp",
        **values,
    )


_LISTED: Mapping[str, Architecture] = {
    "llama": Architecture(
        interleaves_rotary_rows=True,
        biases=_ALL_BIASES,
        with_window={"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    ),
    "smollm3": Architecture(
        named_class="SmolLM3ForCausalLM",
        interleaves_rotary_rows=True,
        fixed={**_NO_WINDOW, "no_rope_layer_interval": 4},
        biases=_ALL_BIASES,
    ),
    "qwen2": Architecture(fixed=_NO_WINDOW, biases={}, biased=QKV_STEMS),
    "qwen2vl": Architecture(
        model_type="qwen2_5_vl_text",
        named_class="Qwen2_5_VLTextModel",
        fixed=_NO_WINDOW,
        biases={},
        biased=QKV_STEMS,
        reads=_SECTIONS,
    ),
    "qwen3vl": Architecture(model_type="qwen3_vl_text", named_class="Qwen3VLTextModel", reads=_SECTIONS),
    "qwen3": Architecture(fixed=_NO_WINDOW),
    "phi3": Architecture(fixed={**_SILU, "attention_bias": False}, biases={}, names_window=True),
    "olmo2": Architecture(full_every=4, with_window={"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}),
    "gemma3": Architecture(
        model_type="gemma3_text",
        named_class="Gemma3ForCausalLM",
        fixed={**_GEMMA, "attn_logit_softcapping": None},
        full_every=6,
        names_window=True,
        numbers=_SOFTCAPS,
    ),
    "gemma2": Architecture(
        fixed=_GEMMA,
        full_every=2,
        names_window=True,
        numbers={**_SOFTCAPS, "attn_logit_softcapping": "attn_logit_softcapping"},
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        named_class="Gemma4ForCausalLM",
        own_names=_GEMMA4,
        rotates=False,
        has_unlike_layers=True,
        fixed=_GEMMA,
        numbers=_SOFTCAPS,
        reads=frozenset({"expert_count"}),
    ),
    "mistral3": Architecture(
        model_type="mistral",
        interleaves_rotary_rows=True,
        biases={},
        names_window=True,
        reads=frozenset({"attention.temperature_scale"}),
    ),
    "granite": Architecture(interleaves_rotary_rows=True, biases=_ALL_BIASES, numbers=_GRANITE_SCALES),
    "seed_oss": Architecture(
        own_names=_MLP_NORM_AFTER_ATTENTION,
        biases={"attention_bias": QKV_STEMS, "attention_out_bias": _OUTPUT_STEMS, "mlp_bias": _MLP_STEMS},
    ),
    "ernie4_5": Architecture(
        named_class="Ernie4_5ForCausalLM", biases={"use_bias": QKV_STEMS | _OUTPUT_STEMS | _MLP_STEMS}
    ),
    "exaone4": Architecture(biases={}, full_every=4, names_window=True),
    "command-r": Architecture(model_type="cohere", numbers=_LOGIT_SCALE),
    "cohere2": Architecture(biases={}, full_every=4, names_window=True, numbers=_LOGIT_SCALE),
    "glm4": Architecture(biases={"attention_bias": QKV_STEMS}, reads=frozenset({"nextn_predict_layers"})),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense", named_class="HunYuanDenseV1ForCausalLM"),
    "arcee": Architecture(
        interleaves_rotary_rows=True,
        fixed={"hidden_act": "relu2"},
        biases={**_ATTENTION_BIAS, "mlp_bias": frozenset({"ffn_up", "ffn_down"})},
    ),
    "stablelm": Architecture(
        named_class="StableLmForCausalLM",
        biases={"use_qkv_bias": QKV_STEMS},
        biased=_NORM_STEMS,
        needs={"use_parallel_residual": False},
    ),
    "starcoder2": Architecture(
        fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        biases={"use_bias": QKV_STEMS | _OUTPUT_STEMS | {"ffn_up", "ffn_down"}},
        biased=_NORM_STEMS,
    ),
    "nemotron": Architecture(
        fixed={"hidden_act": "relu2"},
        biases={**_ATTENTION_BIAS, "mlp_bias": frozenset({"ffn_up", "ffn_down"})},
        biased=_NORM_STEMS,
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        fixed={**_NO_WINDOW, "norm_topk_prob": False},
        biases={},
        biased=QKV_STEMS,
        integers={**_MIXTURE, **_SHARED_SIZE},
        gating=1,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", fixed={**_NO_WINDOW, "norm_topk_prob": True}, integers=_MIXTURE, gating=1
    ),
    "qwen3vlmoe": Architecture(
        model_type="qwen3_vl_moe_text",
        named_class="Qwen3VLMoeTextModel",
        fixed={**_SILU, "norm_topk_prob": True},
        integers=_MIXTURE,
        gating=1,
        reads=_SECTIONS,
    ),
    "gpt-oss": Architecture(
        own_names=_MLP_NORM_AFTER_ATTENTION,
        alternates_experts=True,
        is_sparse=True,
        biases={},
        biased=QKV_STEMS | _OUTPUT_STEMS | {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
        full_every=2,
        names_window=True,
        integers={**_LOCAL_MIXTURE, "intermediate_size": "expert_feed_forward_length"},
        gating=3,
    ),
    "qwen3next": _qwen_hybrid(
        model_type="qwen3_next",
        own_names=_NEXT_DELTA,
        is_sparse=True,
        fixed={**_SILU, "norm_topk_prob": True},
        integers={**_DELTA_SIZES, **_MIXTURE, **_SHARED_SIZE},
        gating=1,
    ),
    "qwen35": _qwen_hybrid(
        model_type="qwen3_5_text",
        named_class="Qwen3_5ForCausalLM",
        tiles_value_heads=True,
        integers=_DELTA_SIZES,
    ),
    "qwen35moe": _qwen_hybrid(
        model_type="qwen3_5_moe_text",
        named_class="Qwen3_5MoeForCausalLM",
        is_sparse=True,
        tiles_value_heads=True,
        integers={**_DELTA_SIZES, **_MIXTURE, **_SHARED_SIZE},
        gating=1,
    ),
    "granitemoe": Architecture(
        model_type="granitemoehybrid",
        named_class="GraniteMoeHybridForCausalLM",
        interleaves_rotary_rows=True,
        fixed={**_SILU, "position_embedding_type": "rope"},
        integers=_LOCAL_MIXTURE,
        numbers=_GRANITE_SCALES,
        gating=1,
        other_kind="attention",
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        named_class="GraniteMoeHybridForCausalLM",
        interleaves_rotary_rows=True,
        biases={**_ATTENTION_BIAS, **_MAMBA_BIASES},
        biased=frozenset({"ssm_dt"}),
        integers=_MAMBA_SIZES,
        numbers=_GRANITE_SCALES,
        reads=frozenset({"expert_count"}),
        gating=1,
        kinds={"ssm_a": "mamba"},
        other_kind="attention",
    ),
    "lfm2": Architecture(
        biases={},
        fixed={"block_auto_adjust_ff_dim": False},
        integers=_CONV_SIZE,
        kinds={"shortconv.conv": "conv"},
        other_kind="full_attention",
        needs={"attention.sliding_window": 0},
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        biases={},
        biased=frozenset({"exp_probs_b"}),
        fixed={"norm_topk_prob": True, "use_expert_bias": True},
        integers={**_CONV_SIZE, **_MIXTURE},
        numbers={"routed_scaling_factor": "expert_weights_scale"},
        gating=2,
        kinds={"shortconv.conv": "conv"},
        other_kind="full_attention",
        needs={"attention.sliding_window": 0},
    ),
    "nemotron_h": _nemotron_h(integers=_MAMBA_SIZES),
    "nemotron_h_moe": _nemotron_h(
        integers={**_MAMBA_SIZES, **_MIXTURE, **_SHARED_SIZE, "n_group": "expert_group_count"},
        numbers={"routed_scaling_factor": "expert_weights_scale"},
        gating=2,
        reads=frozenset({"nextn_predict_layers"}),
    ),
}
ARCHITECTURES = {
    name: one if one.model_type else replace(one, model_type=name.replace("-", "_")) for name, one in _LISTED.items()
}
MIXTRAL = Architecture(
    model_type="mixtral",
    is_sparse=True,
    interleaves_rotary_rows=True,
    biases={},
    names_window=True,
    integers=_LOCAL_MIXTURE,
    gating=1,
)  # what `llama` is with experts
