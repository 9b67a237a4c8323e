"""The architectures that are read from GGUF: which Hugging Face model each is, and how its converter names tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Names of a layer's parts: the file's, then Hugging Face's. A stem keeps its `.weight` or `.bias`; a name that is given
# with one, or without any, stands for that tensor alone. `{}`: a tensor for each expert. Two names: it is cut in two.
_QKVO = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_ATTENTION = {"attn_norm": "input_layernorm", **_QKVO}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = _ATTENTION | _MLP
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {ours: theirs for ours, theirs in _PLAIN.items() if not ours.endswith("norm")} | _QK_NORMS | _POST_NORMS
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}


def _experts(router: str, experts: str, gate: str, up: str, down: str) -> dict[str, str]:
    return {
        "ffn_gate_inp": router,
        "ffn_gate_exps": f"{experts}.{{}}.{gate}",
        "ffn_up_exps": f"{experts}.{{}}.{up}",
        "ffn_gate_up_exps": f"{experts}.{{}}.{gate} {experts}.{{}}.{up}",
        "ffn_down_exps": f"{experts}.{{}}.{down}",
    }


_QWEN_EXPERTS = _experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_QWEN_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = _ATTENTION | _experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NEXT_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older converters: as Hugging Face has it
    "ssm_ba": "linear_attn.in_proj_ba",
}
_QWEN_HYBRID = _ATTENTION | _QK_NORMS | _DELTA | {"post_attention_norm": "post_attention_layernorm"}


def _mamba(prefix: str) -> dict[str, str]:
    return {
        "ssm_in": f"{prefix}.in_proj",
        "ssm_conv1d": f"{prefix}.conv1d",
        "ssm_dt.bias": f"{prefix}.dt_bias",
        "ssm_a": f"{prefix}.A_log",
        "ssm_d": f"{prefix}.D",
        "ssm_norm": f"{prefix}.norm",
        "ssm_out": f"{prefix}.out_proj",
    }


_GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
_GRANITE_HYBRID = {
    **_ATTENTION,
    **_mamba("mamba"),
    **_GRANITE_EXPERTS,
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}{end}": "shared_mlp.input_linear" for part in ("gate", "up") for end in ("", "_shexp")},
    **{f"ffn_down{end}": "shared_mlp.output_linear" for end in ("", "_shexp")},
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **_QKVO,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_NEMOTRON_H = {
    "attn_norm": "norm",
    **{ours: theirs.replace("self_attn", "mixer") for ours, theirs in _QKVO.items()},
    **_mamba("mixer"),
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_GPT_OSS = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_GEMMA4 = {
    **_PLAIN,
    **_QK_NORMS,
    **_POST_NORMS,
    "ffn_norm": "pre_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GLM4 = {
    **_ATTENTION,
    **_FUSED_MLP,
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_HUNYUAN = {**_PLAIN, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_STARCODER = {**_ATTENTION, "ffn_norm": _MLP["ffn_norm"], "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NORM_OUTSIDE = {**_OUTSIDE, "output_norm.bias": "model.norm.bias"}
_LFM2_OUTSIDE = {**_OUTSIDE, "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
_GEMMA4_OUTSIDE = {
    **_OUTSIDE,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_NEMOTRON_OUTSIDE = {**_OUTSIDE, "token_embd": "model.embeddings", "output_norm": "model.norm_f"}

QKV_STEMS = frozenset({"attn_q", "attn_k", "attn_v"})
_OUTPUT_STEMS = frozenset({"attn_output"})
_MLP_STEMS = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
_NORM_STEMS = frozenset({"attn_norm", "ffn_norm"})
_ATTENTION_BIAS = {"attention_bias": QKV_STEMS | _OUTPUT_STEMS}
_ALL_BIASES = {**_ATTENTION_BIAS, "mlp_bias": _MLP_STEMS}
_MAMBA_BIASES = {
    "mamba_conv_bias": frozenset({"ssm_conv1d"}),
    "mamba_proj_bias": frozenset({"ssm_in", "ssm_out"}),
}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What llama.cpp's converter did to a family's tensors, and so what has to be undone."""

    model_type: str
    class_name: str
    block_names: Mapping[str, str] = field(default_factory=lambda: _PLAIN)
    outside_names: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    interleaves_rotary_rows: bool = False  # q and k rows hold rotary pairs side by side
    rotates: bool = True  # queries and keys as metadata of all families say it
    has_unlike_layers: bool = False  # whose heads and widths differ: the config says those of the first, and then more
    norm_offset: float = 0.0  # added to every norm weight, but for those of recurrent layers
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


def _qwen_hybrid(model_type: str, class_name: str, names: Mapping[str, str], **values: Any) -> Architecture:
    return Architecture(
        model_type=model_type,
        class_name=class_name,
        block_names=_QWEN_HYBRID | dict(names),
        norm_offset=1.0,
        kinds={"ssm_a": "linear_attention"},
        other_kind="full_attention",
        reads=frozenset({"rope.dimension_sections", "nextn_predict_layers"}),
        **values,
    )


def _nemotron_h(**values: Any) -> Architecture:
    return Architecture(
        model_type="nemotron_h",
        class_name="NemotronHForCausalLM",
        block_names=_NEMOTRON_H,
        outside_names=_NEMOTRON_OUTSIDE,
        interleaves_rotary_rows=True,
        rotates=False,
        fixed={"hidden_act": "relu2"},
        biases={"mamba_conv_bias": _MAMBA_BIASES["mamba_conv_bias"]},
        biased=frozenset({"ssm_dt", "exp_probs_b"}),
        kinds={"ssm_a": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe"},
        other_kind="mlp",
        **values,
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        interleaves_rotary_rows=True,
        biases=_ALL_BIASES,
        with_window={"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        interleaves_rotary_rows=True,
        fixed={**_NO_WINDOW, "no_rope_layer_interval": 4},
        biases=_ALL_BIASES,
    ),
    "qwen2": Architecture(
        model_type="qwen2", class_name="Qwen2ForCausalLM", fixed=_NO_WINDOW, biases={}, biased=QKV_STEMS
    ),
    "qwen2vl": Architecture(
        model_type="qwen2_5_vl_text",
        class_name="Qwen2_5_VLTextModel",
        fixed=_NO_WINDOW,
        biases={},
        biased=QKV_STEMS,
        reads=_SECTIONS,
    ),
    "qwen3vl": Architecture(
        model_type="qwen3_vl_text",
        class_name="Qwen3VLTextModel",
        block_names=_PLAIN | _QK_NORMS,
        reads=_SECTIONS,
    ),
    "qwen3": Architecture(
        model_type="qwen3", class_name="Qwen3ForCausalLM", block_names=_PLAIN | _QK_NORMS, fixed=_NO_WINDOW
    ),
    "phi3": Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        block_names={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            **_FUSED_MLP,
        },
        fixed={**_SILU, "attention_bias": False},
        biases={},
        names_window=True,
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        block_names=_NORMS_AFTER,
        full_every=4,
        with_window={"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]},
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        block_names=_PLAIN | _QK_NORMS | _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
        norm_offset=1.0,
        fixed={**_GEMMA, "attn_logit_softcapping": None},
        full_every=6,
        names_window=True,
        numbers=_SOFTCAPS,
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        block_names=_PLAIN | _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
        norm_offset=1.0,
        fixed=_GEMMA,
        full_every=2,
        names_window=True,
        numbers={**_SOFTCAPS, "attn_logit_softcapping": "attn_logit_softcapping"},
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        class_name="Gemma4ForCausalLM",
        block_names=_GEMMA4,
        outside_names=_GEMMA4_OUTSIDE,
        rotates=False,
        has_unlike_layers=True,
        fixed=_GEMMA,
        numbers=_SOFTCAPS,
        reads=frozenset({"expert_count"}),
    ),
    "mistral3": Architecture(
        model_type="mistral",
        class_name="MistralForCausalLM",
        interleaves_rotary_rows=True,
        biases={},
        names_window=True,
        reads=frozenset({"attention.temperature_scale"}),
    ),
    "granite": Architecture(
        model_type="granite",
        class_name="GraniteForCausalLM",
        interleaves_rotary_rows=True,
        biases=_ALL_BIASES,
        numbers=_GRANITE_SCALES,
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        class_name="SeedOssForCausalLM",
        block_names={**_PLAIN, "post_attention_norm": "post_attention_layernorm"},
        biases={"attention_bias": QKV_STEMS, "attention_out_bias": _OUTPUT_STEMS, "mlp_bias": _MLP_STEMS},
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5",
        class_name="Ernie4_5ForCausalLM",
        biases={"use_bias": QKV_STEMS | _OUTPUT_STEMS | _MLP_STEMS},
    ),
    "exaone4": Architecture(
        model_type="exaone4",
        class_name="Exaone4ForCausalLM",
        block_names=_NORMS_AFTER,
        biases={},
        full_every=4,
        names_window=True,
    ),
    "command-r": Architecture(model_type="cohere", class_name="CohereForCausalLM", numbers=_LOGIT_SCALE),
    "cohere2": Architecture(
        model_type="cohere2",
        class_name="Cohere2ForCausalLM",
        biases={},
        full_every=4,
        names_window=True,
        numbers=_LOGIT_SCALE,
    ),
    "glm4": Architecture(
        model_type="glm4",
        class_name="Glm4ForCausalLM",
        block_names=_GLM4,
        biases={"attention_bias": QKV_STEMS},
        reads=frozenset({"nextn_predict_layers"}),
    ),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense", class_name="HunYuanDenseV1ForCausalLM", block_names=_HUNYUAN
    ),
    "arcee": Architecture(
        model_type="arcee",
        class_name="ArceeForCausalLM",
        interleaves_rotary_rows=True,
        fixed={"hidden_act": "relu2"},
        biases={**_ATTENTION_BIAS, "mlp_bias": frozenset({"ffn_up", "ffn_down"})},
    ),
    "stablelm": Architecture(
        model_type="stablelm",
        class_name="StableLmForCausalLM",
        outside_names=_LAYER_NORM_OUTSIDE,
        biases={"use_qkv_bias": QKV_STEMS},
        biased=_NORM_STEMS,
        needs={"use_parallel_residual": False},
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        class_name="Starcoder2ForCausalLM",
        outside_names=_LAYER_NORM_OUTSIDE,
        block_names=_STARCODER,
        fixed={"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        biases={"use_bias": QKV_STEMS | _OUTPUT_STEMS | {"ffn_up", "ffn_down"}},
        biased=_NORM_STEMS,
    ),
    "nemotron": Architecture(
        model_type="nemotron",
        class_name="NemotronForCausalLM",
        outside_names=_LAYER_NORM_OUTSIDE,
        norm_offset=1.0,
        fixed={"hidden_act": "relu2"},
        biases={**_ATTENTION_BIAS, "mlp_bias": frozenset({"ffn_up", "ffn_down"})},
        biased=_NORM_STEMS,
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        block_names=_PLAIN | _QWEN_EXPERTS | _QWEN_SHARED,
        fixed={**_NO_WINDOW, "norm_topk_prob": False},
        biases={},
        biased=QKV_STEMS,
        integers={**_MIXTURE, **_SHARED_SIZE},
        gating=1,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        block_names=_PLAIN | _QK_NORMS | _QWEN_EXPERTS,
        fixed={**_NO_WINDOW, "norm_topk_prob": True},
        integers=_MIXTURE,
        gating=1,
    ),
    "qwen3vlmoe": Architecture(
        model_type="qwen3_vl_moe_text",
        class_name="Qwen3VLMoeTextModel",
        block_names=_PLAIN | _QK_NORMS | _QWEN_EXPERTS,
        fixed={**_SILU, "norm_topk_prob": True},
        integers=_MIXTURE,
        gating=1,
        reads=_SECTIONS,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        block_names=_GPT_OSS,
        alternates_experts=True,
        biases={},
        biased=QKV_STEMS | _OUTPUT_STEMS | {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
        full_every=2,
        names_window=True,
        integers={**_LOCAL_MIXTURE, "intermediate_size": "expert_feed_forward_length"},
        gating=3,
    ),
    "qwen3next": _qwen_hybrid(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _QWEN_EXPERTS | _QWEN_SHARED | _NEXT_DELTA,
        biases={},
        biased=frozenset({"ssm_dt"}),
        fixed={**_SILU, "norm_topk_prob": True},
        integers={**_DELTA_SIZES, **_MIXTURE, **_SHARED_SIZE},
        gating=1,
    ),
    "qwen35": _qwen_hybrid(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        {ours: theirs for ours, theirs in _MLP.items() if ours != "ffn_norm"},
        tiles_value_heads=True,
        biases={},
        biased=frozenset({"ssm_dt"}),
        integers=_DELTA_SIZES,
    ),
    "qwen35moe": _qwen_hybrid(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _QWEN_EXPERTS | _QWEN_SHARED,
        tiles_value_heads=True,
        biases={},
        biased=frozenset({"ssm_dt"}),
        integers={**_DELTA_SIZES, **_MIXTURE, **_SHARED_SIZE},
        gating=1,
    ),
    "granitemoe": Architecture(
        model_type="granitemoehybrid",
        class_name="GraniteMoeHybridForCausalLM",
        block_names=_GRANITE_HYBRID,
        interleaves_rotary_rows=True,
        fixed={**_SILU, "position_embedding_type": "rope"},
        integers=_LOCAL_MIXTURE,
        numbers=_GRANITE_SCALES,
        gating=1,
        other_kind="attention",
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        class_name="GraniteMoeHybridForCausalLM",
        block_names=_GRANITE_HYBRID,
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
        model_type="lfm2",
        class_name="Lfm2ForCausalLM",
        block_names=_LFM2,
        outside_names=_LFM2_OUTSIDE,
        biases={},
        fixed={"block_auto_adjust_ff_dim": False},
        integers=_CONV_SIZE,
        kinds={"shortconv.conv": "conv"},
        other_kind="full_attention",
        needs={"attention.sliding_window": 0},
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        class_name="Lfm2MoeForCausalLM",
        block_names={
            **_LFM2,
            **_experts("feed_forward.gate", "feed_forward.experts", "w1", "w3", "w2"),
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        outside_names=_LFM2_OUTSIDE,
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
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    block_names={**_MIXTRAL, "ffn_norm": "post_attention_layernorm"},
    interleaves_rotary_rows=True,
    biases={},
    names_window=True,
    integers=_LOCAL_MIXTURE,
    gating=1,
)  # what `llama` is with experts
