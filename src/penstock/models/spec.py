"""What a decoder is made of, read from the model's own config. No torch: the planner reads it too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, log
from typing import Any, Literal

from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.models.families import EXPERT_NAMES, FAMILIES, Family
from penstock.models.layer_specs import (
    ConvSpec,
    DeltaSpec,
    ExpertsSpec,
    LatentSpec,
    LayerInputsSpec,
    MambaSpec,
    RecurrentSpec,
    SigmoidRouting,
)
from penstock.models.unlike_layers import gemma4_config, gemma4_layers

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "factors", "proportional")
LOCAL_THETA = {"olmo3": 500_000.0}  # of layers with a window, where a config names none
RECURRENT_KINDS = ("linear_attention", "mamba", "conv")
# Of mixtures that choose by scores.
SCORE_EPS = {"lfm2": 1e-6, "nemotron": 1e-20, "deepseek": 1e-20, "deepseek2": 0.0, "minimax": 0.0, "ernie": 0.0}
NORMS_BESIDE = 3  # of an MLP beside experts: of what each gives, and of what the experts read
NUM_XIELU = 4  # numbers of an activation that is learnt
# Where a config names none.
ROTARY_SECTIONS = {
    "qwen2_5_vl_text": (16, 24, 24),
    "qwen3_vl_text": (24, 20, 20),
    "qwen3_vl_moe_text": (24, 20, 20),
    "qwen3_5_text": (11, 11, 10),
    "qwen3_5_moe_text": (11, 11, 10),
}
# Where a part of a head is rotated if the config says so; other classes of transformers do not look.
PARTLY_ROTATED = frozenset(
    (
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "phi3", "bamba", "glm", "glm4", "nemotron", "stablelm"),
        *("glm4_moe", "minimax_m2"),
    )
)
IN_TURNS = frozenset(ROTARY_SECTIONS) - {"qwen2_5_vl_text"}  # whose axes take turns


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    type: str
    theta: float
    num_dims: int  # of a head that are rotated
    parameters: Mapping[str, Any] = field(default_factory=dict)
    original_context: int | None = None  # longrope: past this prompt length the long factors hold
    sections: tuple[int, ...] = ()  # frequencies of each position axis; none: one axis
    is_interleaved: bool = False  # axes take turns instead of following each other

    def variant(self, prompt_tokens: int) -> str:
        """Which table a prompt of that length needs. It is fixed at admission, for prompt and answer alike."""
        is_long = self.type == "longrope" and self.original_context and prompt_tokens > self.original_context
        return "long" if is_long else "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Queries grow with the logarithm of how many original contexts lie before them."""

    beta: float
    original_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    num_kv_heads: int
    head_size: int
    window: int | None  # a token sees itself and the window - 1 tokens before it; None: all
    rotary: str | None  # key into DecoderSpec.rotaries; None: no position encoding
    has_experts: bool = False
    is_recurrent: bool = False  # carries state
    has_attention: bool = True
    has_mlp: bool = True  # or experts
    keys_of: int | None = None  # the layer before it whose keys and values it attends to; None: its own
    keys_are_values: bool = False  # before norms: one projection gives both
    mlp_factor: int = 1  # how many times as wide as the model says its MLP is
    has_mlp_beside: bool = False  # beside experts; what both give is added
    sees_spans: bool = True  # whether images see themselves

    @property
    def keeps_keys(self) -> bool:
        return self.has_attention and self.keys_of is None

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def has_dense_mlp(self) -> bool:
        return self.has_mlp and (self.has_mlp_beside or not self.has_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float
    max_context: int
    layers: tuple[LayerSpec, ...]
    rotaries: Mapping[str, RotarySpec]
    activation: str
    has_tied_embeddings: bool
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "rotated head", "projection"] | None = None
    norm: Literal["rms", "layer"] = "rms"
    has_norm_biases: bool = False
    is_parallel: bool = False  # attention and MLP read the same, and what both give is added
    is_gated: bool = True  # MLPs multiply what they activate
    interleaves_rotary: bool = False  # in the checkpoint: rotated pairs lie side by side
    query_scale: QueryScale | None = None  # by position
    norms_inputs: bool = True
    norms_outputs: bool = False
    norm_offset: float = 0.0  # gemma stores norm weights less one
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    has_fused_qkv: bool = False  # in the checkpoint: one matrix
    has_fused_mlp: bool = False
    has_sinks: bool = False  # a logit per head that takes a share of attention and gives nothing
    experts: ExpertsSpec | None = None  # of the layers that have them
    has_output_gate: bool = False  # queries come with a gate for what is attended
    recurrent: RecurrentSpec | None = None  # of the layers that are
    residual_scale: float = 1.0  # of what a layer adds
    logit_scale: float = 1.0
    attention_input_scale: float = 1.0
    attention_output_scale: float = 1.0
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # of what is activated, and of what an MLP gives
    norms_values: bool = False  # by head, without weights
    scales_layers: bool = False  # by a number of each, after it
    layer_inputs: LayerInputsSpec | None = None
    latent: LatentSpec | None = None  # None: heads have keys and values of their own
    renames: tuple[tuple[str, str], ...] = ()  # (our part of a name, the checkpoint's)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(index for index, layer in enumerate(self.layers) if layer.is_recurrent)

    @property
    def num_attention_layers(self) -> int:
        return sum(layer.has_attention for layer in self.layers)

    @property
    def keeping_layers(self) -> tuple[LayerSpec, ...]:
        """Those that have keys and values of their own in the pages."""
        return tuple(layer for layer in self.layers if layer.keeps_keys)

    @property
    def kv_values_per_token(self) -> int:
        return sum((2 if self.latent is None else 1) * layer.kv_rows for layer in self.keeping_layers)

    @property
    def widest_layer(self) -> LayerSpec:
        """Finds the layer whose queries, keys and values are the most; in most models all are alike."""
        return max(self.layers, key=lambda layer: self.num_heads * layer.head_size + 2 * layer.kv_rows)

    @property
    def num_kv_heads(self) -> int:
        return self.widest_layer.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.widest_layer.head_size

    @property
    def num_mixed(self) -> int:
        """Counts the layers in which tokens see each other."""
        return sum(layer.has_attention or layer.is_recurrent for layer in self.layers)

    def attention_rows(self, layer: LayerSpec) -> tuple[int, int, int]:
        """Counts the rows of a layer's projections to queries, keys and values."""
        kv_rows = layer.kv_rows if layer.keys_of is None else 0
        v_rows = 0 if layer.keys_are_values else kv_rows
        return self.num_heads * layer.head_size * (2 if self.has_output_gate else 1), kv_rows, v_rows

    def num_attended(self, layer: LayerSpec) -> int:
        """Counts the values of a token that all heads give together."""
        return self.num_heads * (layer.head_size if self.latent is None else self.latent.value_size)

    @property
    def q_rows(self) -> int:
        return self.attention_rows(self.widest_layer)[0]

    @property
    def qkv_rows(self) -> int:
        return max(sum(self.attention_rows(layer)) for layer in self.layers)

    def _attention_parameters(self, layer: LayerSpec) -> int:
        if self.latent is not None:
            return self.latent.num_parameters(self.hidden_size, self.num_heads)
        heads, rows = self.num_heads * layer.head_size, sum(self.attention_rows(layer))
        attention = rows * (self.hidden_size + self.qkv_bias) + self.hidden_size * (heads + self.output_bias)
        attention += self.num_heads * self.has_sinks
        if self.qk_norm in ("head", "rotated head"):
            attention += (1 + layer.keeps_keys) * layer.head_size
        elif self.qk_norm == "projection":
            attention += heads + layer.kv_rows
        return attention

    @property
    def num_parameters(self) -> int:
        sparse = self.experts.num_parameters(self.hidden_size) if self.experts else 0
        norm = self.hidden_size * (1 + self.has_norm_biases)
        num_mlps = sum(layer.has_mlp for layer in self.layers)
        num_norms = self.num_layers if self.is_parallel else self.num_mixed + num_mlps
        norms = num_norms * norm * (self.norms_inputs + self.norms_outputs)
        norms += sum(NORMS_BESIDE * norm for layer in self.layers if layer.has_mlp_beside)
        of_recurrence = self.recurrent.num_parameters(self.hidden_size) if self.recurrent else 0
        mlps = sum(self._mlp_parameters(layer) + sparse * layer.has_experts for layer in self.layers)
        mixers = sum(self._attention_parameters(layer) for layer in self.layers if layer.has_attention)
        mixers += len(self.recurrent_layers) * of_recurrence
        others = norm + self.num_layers * self.scales_layers
        if self.layer_inputs is not None:
            num_looked_up = self.layer_inputs.num_looked_up(self.num_layers)
            others += self.layer_inputs.num_parameters(self.hidden_size, self.num_layers) - num_looked_up
        return mixers + norms + mlps + others + self.num_embedded

    def _mlp_parameters(self, layer: LayerSpec) -> int:
        if not layer.has_dense_mlp:
            return 0
        inner = self.intermediate_size * layer.mlp_factor
        rows = (1 + self.is_gated) * inner
        mlp = (rows + inner) * self.hidden_size + (rows + self.hidden_size) * self.mlp_bias
        return mlp + NUM_XIELU * (self.activation == "xielu")

    @property
    def num_embedded(self) -> int:
        """Counts the parameters of tables that tokens are looked up in, and of the head."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)
        return embeddings + (self.layer_inputs.num_looked_up(self.num_layers) if self.layer_inputs else 0)

    @property
    def num_passed(self) -> int:
        """Counts the parameters that each token is multiplied with."""
        experts = self.experts and replace(self.experts, num_experts=self.experts.num_active)
        return replace(self, experts=experts).num_parameters - self.num_embedded

    def layer_parameters(self, index: int) -> int:
        """Counts those of a layer's matrices and biases, but for norms."""
        layer, count = self.layers[index], 0
        if layer.has_attention:
            count += self._attention_parameters(layer)
        if layer.is_recurrent and self.recurrent is not None:
            count += self.recurrent.num_parameters(self.hidden_size)
        if layer.has_experts and self.experts is not None:
            count += self.experts.num_parameters(self.hidden_size)
        if self.layer_inputs is not None:
            count += 2 * self.hidden_size * self.layer_inputs.width
        return count + self._mlp_parameters(layer)

    @property
    def attention_growth(self) -> tuple[tuple[float, float], ...]:
        """Estimates what each position before a token adds to its cost, as a share of that of the first.

        A share for each width of window, and up to which position it grows.
        """
        widths: Counter[float] = Counter()
        for layer in self.layers:
            widths[layer.window or inf] += layer.head_size if layer.has_attention else 0
        return tuple((2 * width * self.num_heads / self.num_passed, reach) for reach, width in widths.items() if width)

    @property
    def widest_mlp(self) -> int:
        """Intermediate values of a token in the layer that has most; all tokens may choose one expert."""
        of_experts = max(self.experts.intermediate_size, self.experts.shared_size) if self.experts else 0
        dense = (self.intermediate_size * layer.mlp_factor for layer in self.layers if layer.has_dense_mlp)
        return max(of_experts, *dense, 0)

    def rotary_variant(self, prompt_tokens: int) -> str:
        variants = {rotary.variant(prompt_tokens) for rotary in self.rotaries.values()}
        return "long" if "long" in variants else "default"

    @property
    def depends_on_prompt_length(self) -> bool:
        return any(rotary.original_context for rotary in self.rotaries.values())


def is_supported(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in FAMILIES


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    model_type = config.get("model_type")
    if not is_supported(config):
        raise UnsupportedModel(
            f"The architecture {model_type!r} has no native decoder; native ones are {', '.join(sorted(FAMILIES))}."
        )
    family = FAMILIES[str(model_type)]
    named = {ours: config[theirs] for ours, theirs in family.keys.items() if theirs in config}
    config = {**family.defaults, **config, **named}
    if config.get("rope_parameters") is None:
        config["rope_parameters"] = family.defaults.get("rope_parameters")
    if model_type == "nemotron_h":
        config |= _nemotron_layers(config)
    elif model_type == "glm4_moe_lite" and (kinds := config.get("mlp_layer_types")):
        config |= {"num_dense_layers": 0, "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind == "dense"]}
    elif model_type in ("smollm3", "qwen2_moe") and not config.get("layer_types"):
        config["layer_types"] = _windowed_layers(model_type, config)
    for key, value in family.known.items():
        if config.get(key) not in (None, value):
            raise UnsupportedModel(
                f"{model_type} has no native form with {key} = {config[key]!r}, only with {value!r}."
            )
    try:
        return _decoder_spec(str(model_type), family, config)
    except KeyError as error:
        raise InvalidModelFile(f"config.json of a {model_type} model lacks {error.args[0]!r}.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidModelFile(
            f"config.json of this {model_type} model has a value of the wrong kind: {error}."
        ) from None


def _decoder_spec(model_type: str, family: Family, config: Mapping[str, Any]) -> DecoderSpec:
    is_gemma, is_gemma4 = model_type.startswith("gemma"), model_type.startswith("gemma4")
    if is_gemma4:
        config = {**config, **gemma4_config(config)}
    num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    latent = _latent(config) if family.is_latent else None
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads) if latent is None else 1
    head_size = int(config.get("head_dim") or hidden_size // num_heads) if latent is None else latent.kept_size
    if num_heads % num_kv_heads or min(num_layers, num_heads, hidden_size, head_size) < 1:
        raise ValueError(f"{num_heads} heads of {head_size} over {num_kv_heads} key-value heads")
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    # Recurrent layers beside MLPs take the MLPs' activation; their native form has one.
    is_hybrid = family.recurrent in ("delta", "mamba") and not family.has_one_part
    if activation not in (activations := ("silu",) if is_hybrid else family.activations):
        raise UnsupportedModel(f"The activation {activation!r} is not one of {', '.join(activations)}.")
    by_layer = _heads(config, num_layers, num_kv_heads, head_size)
    if is_gemma4:
        by_layer = [heads | more for heads, more in zip(by_layer, gemma4_layers(config, by_layer), strict=True)]
    layers = _layers(model_type, family, config, by_layer)
    rotated = _rotated_sizes(layers, head_size) if latent is None else {"global": latent.rotated_size}
    tied = config.get("tie_word_embeddings")
    values: dict[str, Any] = {
        "family": model_type,
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(config["intermediate_size"]),
        "num_heads": num_heads,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_context": int(config["max_position_embeddings"]),
        "layers": layers,
        "rotaries": _rotaries(model_type, family, config, rotated),
        "latent": latent,
        "activation": activation,
        "has_tied_embeddings": family.tied_by_default if tied is None else bool(tied),
        "attention_scale": 1.0
        if is_gemma4
        else float(config["query_pre_attn_scalar"] if is_gemma else head_size) ** -0.5,
        "query_scale": _query_scale(config) if model_type == "ministral3" else None,
        "logit_scale": float(config.get("logit_scale") or 1.0) if model_type.startswith("cohere") else 1.0,
        **{bias: bool(config.get(key)) for bias, key in family.biases.items()},
        "embedding_scale": hidden_size**0.5 if is_gemma else None,
        "attention_softcap": config.get("attn_logit_softcapping") if model_type == "gemma2" else None,
        "logit_softcap": config.get("final_logit_softcapping") if is_gemma else None,
        "experts": _experts(family, config),
        "layer_inputs": _layer_inputs(config) if model_type == "gemma4_text" else None,
        "recurrent": _recurrent(model_type, family, config) if any(layer.is_recurrent for layer in layers) else None,
    }
    if model_type == "glm4_moe" and config.get("use_qk_norm"):
        values["qk_norm"] = "head"
    if model_type.startswith("granite"):
        values |= _granite_scales(config)
    if latent is not None:
        values["attention_scale"] = latent.query_size**-0.5 * _latent_scale(_rope_parameters(config))
        if values["rotaries"]["global"].num_dims != latent.rotated_size:
            raise UnsupportedModel("Compressed keys whose rotated part is rotated in part have no native form.")
    if model_type == "falcon_h1":
        values |= _falcon_scales(config, values["attention_scale"])
    if model_type == "lfm2":
        values["intermediate_size"] = _lfm2_width(config)
    return DecoderSpec(**(values | dict(family.traits)))


def _latent(config: Mapping[str, Any]) -> LatentSpec:
    names = {"rank": "kv_lora_rank", "plain_size": "qk_nope_head_dim", "rotated_size": "qk_rope_head_dim"}
    sizes = {ours: int(config[theirs]) for ours, theirs in {**names, "value_size": "v_head_dim"}.items()}
    query_rank = config["q_lora_rank"] and int(config["q_lora_rank"])
    if min(sizes.values()) < 1 or sizes["rotated_size"] % 2:
        raise ValueError(f"compressed keys of the sizes {sizes}")
    return LatentSpec(**sizes, query_rank=query_rank, is_interleaved=bool(config.get("rope_interleave", True)))


def _latent_scale(parameters: Mapping[str, Any]) -> float:
    """What scores are multiplied with where rotary positions are scaled."""
    factor, weight = float(parameters.get("factor") or 1.0), float(parameters.get("mscale_all_dim") or 0.0)
    is_plain = str(parameters.get("rope_type") or parameters.get("type") or "default") == "default"
    return 1.0 if is_plain or factor <= 1 else (0.1 * weight * log(factor) + 1.0) ** 2


def _query_scale(config: Mapping[str, Any]) -> QueryScale | None:
    parameters = _rope_parameters(config)
    beta = parameters.get("llama_4_scaling_beta")
    if beta is None:
        return None
    return QueryScale(beta=float(beta), original_context=int(parameters["original_max_position_embeddings"]))


def _nemotron_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """What each layer is, in either spelling; and of its Mamba 2, what other families say in their configs."""
    names = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    pattern = config.get("hybrid_override_pattern")
    given = config.get("layers_block_type") or config.get("layer_types") or [names[one] for one in pattern or "ME*-"]
    kinds = [{"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind) for kind in given]
    if unknown := set(kinds) - set(names.values()):
        raise UnsupportedModel(f"Layers of the kind {', '.join(sorted(unknown))} have no native form.")
    return {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "mamba_d_ssm": config["mamba_n_heads"] * config["mamba_d_head"],
        # What transformers clamps to, whatever time_step_limit says.
        "time_step_limit": (config["time_step_min"], float("inf")),
    }


def _windowed_layers(model_type: str, config: Mapping[str, Any]) -> list[str]:
    """Windows are where no positions are, or in every other of the first layers."""
    layers, last = range(int(config["num_hidden_layers"])), int(config.get("max_window_layers") or 0)
    if model_type == "smollm3":
        has_window = [not _has_rotary(model_type, config, index) for index in layers]
    else:
        has_window = [index % 2 == 0 and index < last for index in layers]
    return ["sliding_attention" if flag else "full_attention" for flag in has_window]


def _falcon_scales(config: Mapping[str, Any], attention_scale: float) -> dict[str, Any]:
    """Keys are scaled with the scores; the rest is scaled where it stands."""
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    return {
        "embedding_scale": float(config["embedding_multiplier"]),
        "logit_scale": float(config["lm_head_multiplier"]),
        "attention_scale": attention_scale * float(config["key_multiplier"]),
        "attention_input_scale": float(config["attention_in_multiplier"]),
        "attention_output_scale": float(config["attention_out_multiplier"]),
        "mlp_scales": (float(gate), float(down)),
    }


def _lfm2_width(config: Mapping[str, Any]) -> int:
    width = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    if (factor := config["block_ffn_dim_multiplier"]) is None:
        return width
    multiple = int(config["block_multiple_of"])
    return -(-int(factor * width) // multiple) * multiple


def _granite_scales(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its multipliers, and in hybrids the width of what is the only feed-forward part where there are no experts."""
    return {
        "intermediate_size": int(config.get("shared_intermediate_size") or config["intermediate_size"]),
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)),
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "logit_scale": 1 / float(config.get("logits_scaling", 1.0)),
    }


def _layer_inputs(config: Mapping[str, Any]) -> LayerInputsSpec | None:
    if not (width := config["hidden_size_per_layer_input"]):
        return None
    return LayerInputsSpec(
        width=int(width), vocab_size=int(config["vocab_size_per_layer_input"]), padding=int(config["pad_token_id"] or 0)
    )


def _heads(config: Mapping[str, Any], num_layers: int, num_kv_heads: int, head_size: int) -> list[dict[str, Any]]:
    """The heads of each layer: as the config says of all, unless it says it of one."""
    own = {int(place): dict(values) for place, values in (config.get("per_layer_config") or {}).items()}
    names = {"num_kv_heads": "num_key_value_heads", "head_size": "head_dim"}
    if unknown := {name for values in own.values() for name in values} - set(names.values()):
        raise UnsupportedModel(f"Layers with {', '.join(sorted(unknown))} of their own have no native form.")
    same = {"num_key_value_heads": num_kv_heads, "head_dim": head_size}
    by_layer = [{**same, **own.get(index, {})} for index in range(num_layers)]
    return [{ours: int(layer[theirs]) for ours, theirs in names.items()} for layer in by_layer]


def _layers(
    model_type: str, family: Family, config: Mapping[str, Any], by_layer: list[dict[str, Any]]
) -> tuple[LayerSpec, ...]:
    num_layers = len(by_layer)
    has_windows = family.sliding != "none" and config.get("use_sliding_window") is not False
    window = config.get("sliding_window") if has_windows else None
    kinds = ["sliding_attention" if family.sliding == "all" else "full_attention"] * num_layers
    if family.recurrent or family.sliding == "by-layer-type":
        kinds = _layer_types(family, config, num_layers)
    rotaries = {"sliding_attention": "local"} if family.has_local_rotary else {}
    kinds = kinds[:num_layers]
    if window == 0 and "sliding_attention" in kinds:
        raise UnsupportedModel("Windows of 0 tokens have no native form.")
    rotates_all = family.rotates == "all" or (family.rotates == "windows" and not window)
    return tuple(
        LayerSpec(
            **by_layer[index],
            window=int(window) if window and kind == "sliding_attention" else None,
            rotary=rotaries.get(kind, "global")
            if (rotates_all or kind == "sliding_attention") and _has_rotary(model_type, config, index)
            else None,
            has_experts=kind == "moe" if family.has_one_part else _has_experts(family, config, index),
            is_recurrent=family.is_doubled or (family.recurrent is not None and kind in RECURRENT_KINDS),
            has_attention=family.is_doubled or not (family.recurrent and kind in (*RECURRENT_KINDS, "moe", "mlp")),
            has_mlp=not family.has_one_part or kind in ("moe", "mlp"),
        )
        for index, kind in enumerate(kinds)
    )


def _has_rotary(model_type: str, config: Mapping[str, Any], layer: int) -> bool:
    if model_type == "granitemoehybrid":
        return config.get("position_embedding_type") == "rope"
    if model_type == "nemotron_h":
        return False
    if model_type == "smollm3":
        given = config.get("no_rope_layers")
        return bool(given[layer]) if given else (layer + 1) % int(config.get("no_rope_layer_interval") or 4) != 0
    return True


def _experts(family: Family, config: Mapping[str, Any]) -> ExpertsSpec | None:
    if family.experts is None:
        return None
    count = config["num_experts"] if config.get("num_local_experts") is None else config["num_local_experts"]
    if not count:
        return None
    is_clamped, shared_size = family.experts == "gpt-oss", int(config.get("n_shared_experts") or 0)
    shared_size *= int(config.get("moe_intermediate_size") or 0)
    return ExpertsSpec(
        num_experts=int(count),
        num_active=int(config["num_experts_per_tok"]),
        intermediate_size=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        normalizes_chosen=family.experts != "deepseek2"
        and bool(config.get("norm_topk_prob", family.normalizes_chosen)),
        names=EXPERT_NAMES[family.experts],
        has_biases=is_clamped,
        clamp=float(config.get("swiglu_limit", 7.0)) if is_clamped else None,
        clamp_alpha=float(config.get("swiglu_alpha", 1.702)),
        shared_size=int(
            config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size") or shared_size
        ),
        has_shared_gate=family.experts in ("qwen", "mixtral"),
        is_gated=bool(family.traits.get("is_gated", True)),
        sigmoid=_sigmoid(family, config) if family.experts in SCORE_EPS else None,
        norms_routed=family.experts == "gemma4",
    )


def _sigmoid(family: Family, config: Mapping[str, Any]) -> SigmoidRouting:
    by_softmax, has_groups = family.experts in ("ernie", "deepseek2"), config.get("topk_method") != "greedy"
    return SigmoidRouting(
        has_bias=family.experts != "deepseek2" and bool(config.get("use_expert_bias", True)),
        num_groups=int((has_groups and config.get("n_group")) or 1),
        num_active_groups=int(config.get("topk_group") or 1),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        eps=SCORE_EPS[str(family.experts)],
        is_softmax=by_softmax,
        num_best=1 if family.experts == "deepseek2" else 2,
    )


def _recurrent(model_type: str, family: Family, config: Mapping[str, Any]) -> RecurrentSpec | None:
    if int(config.get("conv_L_cache") or 2) < 2:
        raise UnsupportedModel("Convolutions over one token alone have no native form.")
    if family.recurrent == "delta":
        key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
        if value_heads % key_heads:
            raise ValueError(f"{value_heads} value heads over {key_heads} key heads")
        return DeltaSpec(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_size=int(config["linear_key_head_dim"]),
            value_size=int(config["linear_value_head_dim"]),
            conv_width=int(config["linear_conv_kernel_dim"]),
            is_grouped=model_type == "qwen3_next",
        )
    if family.recurrent == "conv":
        width, channels = int(config["conv_L_cache"]), int(config["hidden_size"])
        return ConvSpec(num_channels=channels, conv_width=width, has_bias=bool(config.get("conv_bias")))
    return _mamba(config) if family.recurrent == "mamba" else None


def _mamba(config: Mapping[str, Any]) -> MambaSpec:
    heads, groups = int(config["mamba_n_heads"]), int(config["mamba_n_groups"])
    inner = int(config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * int(config["hidden_size"]))
    head_size = config.get("mamba_d_head", "auto")
    head_size = inner // heads if head_size == "auto" else int(head_size)
    if heads % groups or heads * head_size != inner:
        raise ValueError(f"{heads} heads of {head_size} in {groups} groups for {inner} channels")
    limits = config.get("time_step_limit") or (0.0, float("inf"))
    # JSON has no infinity; configs spell it as an object.
    low, high = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in limits)
    return MambaSpec(
        num_heads=heads,
        head_size=head_size,
        num_groups=groups,
        state_size=int(config["mamba_d_state"]),
        conv_width=int(config["mamba_d_conv"]),
        has_conv_bias=bool(config.get("mamba_conv_bias", True)),
        has_bias=bool(config.get("mamba_proj_bias", False)),
        time_step_limits=(low, high),
        has_norm=bool(config.get("mamba_rms_norm", True)),
        norms_before_gate=bool(config.get("mamba_norm_before_gate", False)),
        input_scale=float(config.get("ssm_in_multiplier") or 1.0),
        section_scales=tuple(float(scale) for scale in config.get("ssm_multipliers") or ()),
        output_scale=float(config.get("ssm_out_multiplier") or 1.0),
    )


def _has_experts(family: Family, config: Mapping[str, Any], layer: int) -> bool:
    if family.experts is None or 0 in (config.get("num_local_experts"), config.get("num_experts")):
        return False
    last = config.get("moe_layer_end_index")
    is_dense = layer in (config.get("mlp_only_layers") or ()) or layer < int(config.get("num_dense_layers") or 0)
    is_dense = is_dense or (last not in (None, -1) and layer > int(last))
    return not is_dense and (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _layer_types(family: Family, config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Given by name, by their period, by the places of the attention layers, or by the first that slides."""
    if family.is_doubled:
        return ["hybrid"] * num_layers
    if given := config.get("layer_types"):
        if len(given) < num_layers:
            raise ValueError(f"{len(given)} layer_types for {num_layers} layers")
        return list(given)
    if family.full_every:
        said = (one if isinstance(one, int) else config.get(one) for one in family.full_every)
        interval = int(next(filter(None, said)))
        is_full = [(index + 1) % interval == 0 for index in range(num_layers)]
    elif family.recurrent == "mamba":
        is_full = [index in (config.get("attn_layer_indices") or ()) for index in range(num_layers)]
    elif family.recurrent == "conv":
        is_full = [index in (config.get("full_attn_idxs") or range(num_layers)) for index in range(num_layers)]
    else:
        is_full = [index < int(config.get("max_window_layers") or 0) for index in range(num_layers)]
    other = {"delta": "linear_attention", "mamba": "mamba", "conv": "conv", None: "sliding_attention"}[family.recurrent]
    return ["full_attention" if flag else other for flag in is_full]


def _rotated_sizes(layers: tuple[LayerSpec, ...], head_size: int) -> dict[str, int]:
    """The size of the heads that each table turns."""
    own = {layer.rotary: layer.head_size for layer in layers if layer.rotary}
    if any(own[layer.rotary] != layer.head_size for layer in layers if layer.rotary):
        raise ValueError("layers of one kind have heads of several sizes")
    return {"global": head_size, "local": head_size, **own}


def _rotaries(
    model_type: str, family: Family, config: Mapping[str, Any], head_sizes: Mapping[str, int]
) -> dict[str, RotarySpec]:
    parameters, theta = _rope_parameters(config), float(config.get("rope_theta") or family.theta)
    if not family.has_local_rotary:
        parameters = parameters.get("full_attention", parameters)
        return {"global": _rotary(model_type, parameters, theta, config, head_sizes["global"])}
    is_nested = "full_attention" in parameters or "sliding_attention" in parameters
    if is_nested:  # what is said beside the tables is of a single one
        config = {**config, "original_max_position_embeddings": None}
    if config.get("rope_parameters") and not is_nested and model_type == "olmo3":
        raise UnsupportedModel("olmo3 has no native form with rope_parameters that do not tell the types of layers.")
    if is_nested and any(isinstance(one, Mapping) and one.get("truncate") is False for one in parameters.values()):
        raise UnsupportedModel("Yarn by type of layer is truncated by transformers even where a config says no.")
    full = (parameters.get("full_attention") or {}) if is_nested else parameters
    local = (parameters.get("sliding_attention") or {}) if is_nested else {}
    local_theta = float(config.get("rope_local_base_freq") or LOCAL_THETA.get(model_type, 10_000.0))
    return {
        "global": _rotary(model_type, full, theta, config, head_sizes["global"]),
        "local": _rotary(model_type, local, local_theta, config, head_sizes["local"]),
    }


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`, which may be nested."""
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _rotary(
    model_type: str, parameters: Mapping[str, Any], theta: float, config: Mapping[str, Any], head_size: int
) -> RotarySpec:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind == "mrope":  # an older name for several axes without a scaling
        kind = "default"
    if model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"
    theta = float(parameters.get("rope_theta") or theta)
    if model_type == "hunyuan_v1_dense" and kind == "dynamic" and parameters.get("alpha"):
        kind, theta = "default", theta * float(parameters["alpha"]) ** (head_size / (head_size - 2))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"The rotary scaling {kind!r} has no native form; native ones are {', '.join(ROPE_TYPES)}."
        )
    share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    share = float(share or (config.get("rotary_dim") or head_size) / head_size)
    if kind == "default" and model_type not in PARTLY_ROTATED:
        share = 1.0
    num_dims = head_size if kind == "proportional" else int(head_size * share)
    is_paired = FAMILIES[model_type].traits.get("interleaves_rotary") or num_dims == head_size
    if num_dims % 2 and is_paired:
        raise UnsupportedModel(f"Heads of which {num_dims} values are rotated, an odd number, have no native form.")
    max_context = int(config["max_position_embeddings"])
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    values = {**parameters, "max_context": max_context, "original_context": int(original or max_context)}
    return RotarySpec(
        type=kind,
        theta=theta,
        num_dims=num_dims,
        parameters=values,
        original_context=values["original_context"] if kind == "longrope" else None,
        sections=tuple(int(size) for size in parameters.get("mrope_section") or ROTARY_SECTIONS.get(model_type, ())),
        is_interleaved=bool(parameters.get("mrope_interleaved", model_type in IN_TURNS)),
    )
