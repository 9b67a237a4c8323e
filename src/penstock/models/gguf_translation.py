"""What a GGUF file means in Hugging Face terms: names and layouts of its tensors, and its config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from penstock.errors import InvalidModelFile, UnsupportedModel, brief
from penstock.models.gguf import GgufFile, GgufTensor

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTSIDE_BLOCKS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROTARY_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


_BIASES = {
    "attention": frozenset({"attn_q", "attn_k", "attn_v", "attn_output"}),
    "mlp": frozenset({"ffn_gate", "ffn_up", "ffn_down"}),
}
_SILU = {"hidden_act": "silu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """What llama.cpp's converter did to a family's tensors, and so what has to be undone."""

    model_type: str
    class_name: str
    block_names: Mapping[str, str] = field(default_factory=lambda: _ATTENTION | _MLP)
    interleaves_rotary_rows: bool = False  # q and k rows hold rotary pairs side by side
    norm_offset: float = 0.0  # added to every norm weight
    fixed: Mapping[str, Any] = field(default_factory=lambda: _SILU)  # config entries the family always has
    biases: tuple[str, ...] = ("attention",)  # which of _BIASES its config has a word for
    biased: frozenset[str] = frozenset()  # what has a bias always, without a word in the config
    full_every: int | None = None  # of its layers with a sliding window, which ones see everything
    names_window: bool = False  # in its config, also where there is none
    with_window: Mapping[str, Any] = field(default_factory=dict)  # config entries where the file has one


ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        interleaves_rotary_rows=True,
        biases=("attention", "mlp"),
        with_window={"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    ),
    "smollm3": _Architecture(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        interleaves_rotary_rows=True,
        fixed={**_SILU, "no_rope_layer_interval": 4, "use_sliding_window": False},
        biases=("attention", "mlp"),
    ),
    "qwen2": _Architecture(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        fixed={**_SILU, "use_sliding_window": False},
        biases=(),
        biased=frozenset({"attn_q", "attn_k", "attn_v"}),
    ),
    "qwen3": _Architecture(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        block_names=_ATTENTION | _MLP | _QK_NORMS,
        fixed={**_SILU, "use_sliding_window": False},
    ),
    "phi3": _Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        block_names={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        fixed={**_SILU, "attention_bias": False},
        biases=(),
        names_window=True,
    ),
    "olmo2": _Architecture(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        block_names={
            **{ours: theirs for ours, theirs in (_ATTENTION | _MLP).items() if not ours.endswith("norm")},
            **_QK_NORMS,
            **_POST_NORMS,
        },
        full_every=4,
        with_window={"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]},
    ),
    "gemma3": _Architecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        block_names=_ATTENTION | _MLP | _QK_NORMS | _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
        norm_offset=1.0,
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None},
        full_every=6,
        names_window=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTensor:
    """A tensor under its Hugging Face name, and what turns the stored values into Hugging Face's."""

    stored: GgufTensor
    interleaved_heads: int | None  # None: rows are in Hugging Face order
    subtract: float


def architecture(gguf: GgufFile) -> tuple[str, _Architecture]:
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise InvalidModelFile(
            f"{gguf.path} does not say its general.architecture ({brief(name)}); convert the model again."
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{gguf.path} holds the architecture {brief(name)}; GGUF is read for {', '.join(ARCHITECTURES)}, "
            "so use the model's safetensors folder instead."
        )
    return name, ARCHITECTURES[name]


def hf_tensor_name(gguf_name: str, architecture_name: str) -> str | None:
    """The Hugging Face name of a stored tensor; None for one that Hugging Face models do not have."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name):
        layer, stem, suffix = match.groups()
        theirs = ARCHITECTURES[architecture_name].block_names.get(stem)
        return theirs and f"model.layers.{int(layer)}.{theirs}.{suffix}"
    stem, _, suffix = gguf_name.rpartition(".")
    theirs = _OUTSIDE_BLOCKS.get(stem)
    return f"{theirs}.{suffix}" if theirs and suffix == "weight" else None


def hf_tensors(gguf: GgufFile) -> dict[str, HfTensor]:
    """Every weight under its Hugging Face name; a tensor that would be left out refuses the model."""
    name, family = architecture(gguf)
    keys = _Keys(gguf, name)
    heads = {"attn_q": keys.integer("attention.head_count")}
    heads["attn_k"] = keys.integer("attention.head_count_kv", heads["attn_q"])
    found: dict[str, HfTensor] = {}
    for stored in gguf.tensors.values():
        theirs = hf_tensor_name(stored.name, name)
        if theirs is None:
            if stored.name in _ROTARY_TENSORS:
                continue
            raise UnsupportedModel(
                f"{gguf.path} holds tensor {stored.name!r}, which {name} models do not have; "
                "use the model's safetensors folder instead."
            )
        stem = stored.name.split(".")[-2]
        num_heads = heads.get(stem) if family.interleaves_rotary_rows else None
        if num_heads and stored.shape[0] % (2 * num_heads):
            raise InvalidModelFile(
                f"{gguf.path}: {stored.shape[0]} rows of {stored.name!r} do not divide into {num_heads} even "
                "heads; convert the model again."
            )
        is_norm = stem.endswith("norm")
        found[theirs] = HfTensor(
            stored=stored, interleaved_heads=num_heads, subtract=family.norm_offset if is_norm else 0.0
        )
    return found


# --- the config ---------------------------------------------------------------------------------------------


class _Keys:
    """Typed reads of one architecture's metadata; a missing or odd value is refused by name."""

    def __init__(self, gguf: GgufFile, prefix: str) -> None:
        self._metadata = gguf.metadata
        self._path = gguf.path
        self._prefix = prefix

    def raw(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def refuse(self, key: str, value: object, wanted: str) -> InvalidModelFile:
        shown = "missing" if value is None else brief(value)
        return InvalidModelFile(
            f"{self._path}: {self._prefix}.{key} is {shown}, not {wanted}; convert the model again."
        )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.refuse(key, value, "one whole number above 0 for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.refuse(key, value, "a number above 0")
        return _shortest_float32(value)

    def optional_number(self, key: str) -> float | None:
        """None when the key is absent or 0, which is how converters say `none`."""
        return self.number(key) if self.raw(key) not in (None, 0) else None


def _shortest_float32(value: float) -> float:
    """1e-05 rather than the 9.999999747378752e-06 that it became in 32 bits."""
    return float(str(np.float32(value)))


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """The config.json that the stored model would have."""
    name, family = architecture(gguf)
    keys = _Keys(gguf, name)
    _refuse_variants(gguf, keys, name)
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        shape = None if embedding is None else embedding.shape
        raise InvalidModelFile(
            f"{gguf.path}: token_embd.weight has shape {shape}, not rows of {hidden_size}; convert the model again."
        )
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": _num_layers(gguf, keys),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **family.fixed,
        **_biases(gguf, name, family),
        **_token_ids(gguf),
    }
    config |= _rotary_entries(gguf, keys, head_dim, config["max_position_embeddings"])
    config |= _window_entries(keys, family, config["num_hidden_layers"])
    if name == "smollm3":
        config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    if name == "gemma3":
        config |= _gemma3_entries(keys, config)
    hf_tensors(gguf)  # refuses tensors without a place
    return config


def _refuse_variants(gguf: GgufFile, keys: _Keys, name: str) -> None:
    """Things that would change the numbers and that these families' plain form does not have."""
    if gguf.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModel(
            f"{gguf.path} is one of {brief(gguf.metadata['split.count'])} parts; "
            "join them with `llama-gguf-split --merge` and pass the whole file."
        )
    plain = {
        "expert_count": (None, 0),
        "attention.causal": (None, True),
        "attention.scale": (None, 0),
        "attention.clamp_kqv": (None, 0),
        "attention.value_length": (None, keys.raw("attention.key_length")),
        "logit_scale": (None, 0, 1),
        "residual_scale": (None, 0, 1),
        "embedding_scale": (None, 0, 1),
        "attn_logit_softcapping": (None, 0),
    }
    for key, allowed in plain.items():
        if keys.raw(key) not in allowed:
            raise UnsupportedModel(
                f"{gguf.path}: {name}.{key} is {brief(keys.raw(key))}, a variant of {name} that is not run from "
                "GGUF; use the model's safetensors folder instead."
            )


def _num_layers(gguf: GgufFile, keys: _Keys) -> int:
    num_layers = keys.integer("block_count")
    present = {name.split(".")[1] for name in gguf.tensors if name.startswith("blk.")}
    if len(present) != num_layers:
        raise InvalidModelFile(
            f"{gguf.path} declares {num_layers} layers and holds tensors of {len(present)}; convert the model again."
        )
    return num_layers


def _biases(gguf: GgufFile, name: str, family: _Architecture) -> dict[str, bool]:
    stems = {tensor.split(".")[2] for tensor in gguf.tensors if tensor.startswith("blk.") and tensor.endswith(".bias")}
    allowed = [family.biased]
    for part in family.biases:
        allowed += [biased | _BIASES[part] for biased in allowed]
    if stems not in allowed:
        raise UnsupportedModel(
            f"{gguf.path} has biases on {sorted(stems) or 'nothing'}, which Hugging Face's {name} models "
            "cannot have; use the model's safetensors folder instead."
        )
    return {f"{part}_bias": _BIASES[part] <= stems for part in family.biases}


def _token_ids(gguf: GgufFile) -> dict[str, int | None]:
    """None where the file has none: a config class's own default would be another model's id."""
    stored = {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    found = {name: gguf.metadata.get(key) for name, key in stored.items()}
    return {name: value if type(value) is int else None for name, value in found.items()}


def _rotary_entries(gguf: GgufFile, keys: _Keys, head_dim: int, max_positions: int) -> dict[str, Any]:
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise InvalidModelFile(
            f"{gguf.path}: {rotary_dim} rotary dimensions do not fit heads of {head_dim}; convert the model again."
        )
    entries: dict[str, Any] = {} if rotary_dim == head_dim else {"partial_rotary_factor": rotary_dim / head_dim}
    kind = keys.raw("rope.scaling.type", "linear")  # llama.cpp's default, which without a factor scales nothing
    factor = keys.optional_number("rope.scaling.factor") or keys.optional_number("rope.scale_linear")
    if "rope_factors_long.weight" in gguf.tensors:
        original = keys.integer("rope.scaling.original_context_length", max_positions)
        entries["original_max_position_embeddings"] = original
        entries["rope_scaling"] = _longrope(gguf, keys, rotary_dim, max_positions, original)
    elif "rope_freqs.weight" in gguf.tensors:
        factors = _rotary_factors(gguf, "rope_freqs.weight", rotary_dim)
        if kind not in ("none", "linear") or factor not in (None, 1):
            raise _unsupported_scaling(gguf, f"{brief(kind)} beside rope_freqs.weight")
        if any(item != 1.0 for item in factors):
            entries["rope_scaling"] = {"rope_type": "factors", "factors": factors}
    elif kind == "yarn" and factor:
        entries["rope_scaling"] = _yarn(keys, factor)
    elif kind == "linear":
        if factor not in (None, 1):
            entries["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise _unsupported_scaling(gguf, brief(kind))
    return entries


def _unsupported_scaling(gguf: GgufFile, kind: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{gguf.path} uses rotary scaling {kind}; linear, yarn, longrope and llama3 are read from GGUF, "
        "so use the model's safetensors folder instead."
    )


def _yarn(keys: _Keys, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    stored = {
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    for theirs, ours in stored.items():
        if (value := keys.optional_number(f"rope.scaling.{ours}")) is not None:
            scaling[theirs] = value
    return scaling


def _longrope(gguf: GgufFile, keys: _Keys, rotary_dim: int, max_positions: int, original: int) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": _rotary_factors(gguf, "rope_factors_long.weight", rotary_dim),
        "short_factor": _rotary_factors(gguf, "rope_factors_short.weight", rotary_dim),
        "original_max_position_embeddings": original,
    }
    stored = keys.optional_number("rope.scaling.attn_factor")
    usual = sqrt(1 + log(max_positions / original) / log(original)) if max_positions > original > 1 else 1.0
    if stored is not None and abs(stored - usual) > 1e-5:
        scaling["attention_factor"] = stored
    return scaling


def _rotary_factors(gguf: GgufFile, name: str, rotary_dim: int) -> list[float]:
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.shape != (rotary_dim // 2,) or tensor.quant_type != GGMLQuantizationType.F32:
        found = "missing" if tensor is None else f"{tensor.quant_type.name} of shape {tensor.shape}"
        raise InvalidModelFile(
            f"{gguf.path}: {name} is {found}, not F32 of shape ({rotary_dim // 2},); convert the model again."
        )
    try:
        with gguf.path.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            values = np.frombuffer(file.read(tensor.num_bytes), dtype="<f4")
    except (OSError, ValueError) as error:
        raise InvalidModelFile(f"{gguf.path}: {name} cannot be read ({error}); download it again.") from error
    if len(values) != rotary_dim // 2 or not np.all(np.isfinite(values) & (values > 0)):
        raise InvalidModelFile(f"{gguf.path}: {name} holds values that are no factors; download it again.")
    return [_shortest_float32(value) for value in values]


def _window_entries(keys: _Keys, family: _Architecture, num_layers: int) -> dict[str, Any]:
    """Sliding windows: one rule for all layers, or a pattern where every n-th layer sees everything."""
    window = keys.raw("attention.sliding_window")
    window = None if window in (None, 0) else keys.integer("attention.sliding_window")
    if not family.names_window and not (window and family.with_window):
        return {}
    entries = {**family.with_window, "sliding_window": window}
    if family.full_every:
        full = _full_layers(keys, num_layers, family.full_every) if window else [True] * num_layers
        entries["layer_types"] = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    return entries


def _full_layers(keys: _Keys, num_layers: int, default_period: int) -> list[bool]:
    pattern = keys.raw("attention.sliding_window_pattern", default_period)
    if isinstance(pattern, list) and len(pattern) == num_layers:
        return [not slides for slides in pattern]
    if isinstance(pattern, list):
        raise keys.refuse("attention.sliding_window_pattern", pattern, f"one entry for each of {num_layers} layers")
    period = keys.integer("attention.sliding_window_pattern", default_period)
    return [(layer + 1) % period == 0 for layer in range(num_layers)]


def _gemma3_entries(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    # Only the 27B model, told by its 62 layers, scales queries by the hidden size per head.
    is_27b = config["num_hidden_layers"] == 62
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": keys.optional_number("final_logit_softcapping"),
    }
