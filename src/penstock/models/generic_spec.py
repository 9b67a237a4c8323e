"""What any causal model costs, read from its config alone, whatever names it uses. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from penstock.errors import InvalidModelFile
from penstock.models.files import ModelFiles
from penstock.models.safetensors import read_safetensors_header
from penstock.models.stored_names import BESIDE_WEIGHTS, DRAFTING, HEAD, decoder_prefix

# Recurrent models name no limit; this is what their pool is sized for when --context is not given.
CONTEXT_WITHOUT_LIMIT = 2**17
STATE_BYTES = 4  # recurrent states are kept in float32
HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "block_ff_dim")
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
WITHOUT_KEYS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericSpec:
    """The sizes behind the memory model. The engine replaces the estimates by what it measures on the loaded model."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of all that a token passes in one layer
    num_layers: int
    num_kv_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_context: int
    state_bytes: int  # of one sequence's recurrent states, whatever its length
    own_kv_values: int  # per token, in the model's own cache: each layer has its sizes, some take another's keys
    is_even: bool  # all layers have heads of the same number and size, as pages need

    @property
    def depends_on_prompt_length(self) -> bool:
        return False

    def rotary_variant(self, prompt_tokens: int) -> str:
        return "default"

    @property
    def largest_matrix(self) -> int:
        return self.hidden_size * max(2 * self.intermediate_size, self.num_heads * self.head_size)


def generic_spec(config: Mapping[str, Any]) -> GenericSpec:
    family = str(config.get("model_type"))
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    try:
        text = text or config
        listed = text.get("layers_block_type") or text.get("layer_types")
        return _generic_spec(family, {"num_hidden_layers": len(listed), **text} if listed else text)
    except (TypeError, ValueError, ZeroDivisionError, LookupError) as error:
        raise InvalidModelFile(
            f"config.json of this {family} model lacks a size or has one of the wrong kind: {error}."
        ) from None


def _generic_spec(family: str, text: Mapping[str, Any]) -> GenericSpec:
    hidden, num_layers = _required(text, HIDDEN), _required(text, LAYERS)
    kinds = _layer_kinds(text, num_layers)
    num_kv_layers = sum(kind not in WITHOUT_KEYS for kind in kinds)
    num_heads = _first(text, HEADS) or 1
    sizes = [_kv_sizes(_layer(text, index, kind), hidden, num_heads) for index, kind in enumerate(kinds)]
    num_keeping = num_layers - (_first(text, ("num_kv_shared_layers",)) or 0)
    kept = [size for size, kind in zip(sizes[:num_keeping], kinds, strict=False) if kind not in WITHOUT_KEYS]
    num_kv_heads, head_size = max(sizes, key=prod)
    return GenericSpec(
        family=family,
        vocab_size=_required(text, ("vocab_size",)),
        hidden_size=hidden,
        intermediate_size=_intermediate(text, hidden),
        num_layers=num_layers,
        num_kv_layers=num_kv_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_context=_first(text, CONTEXTS) or CONTEXT_WITHOUT_LIMIT,
        state_bytes=(num_layers - num_kv_layers) * _state_bytes(text, hidden),
        own_kv_values=sum(2 * heads * size for heads, size in kept),
        is_even=len(set(sizes)) == 1,
    )


def _first(text: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first that is given; of sizes that are listed layer by layer, the largest."""
    sizes = (max(value, default=None) if isinstance(value := text.get(name), list) else value for name in names)
    return next((int(size) for size in sizes if isinstance(size, int)), None)


def _layer(text: Mapping[str, Any], index: int, kind: str) -> dict[str, Any]:
    """The config as one layer has it: lists by layer, names for layers that see everything, settings of its own."""
    layer = {name: text[name][index] for name in KV_HEADS if isinstance(text.get(name), list)}
    if kind == "full_attention":
        has_own_heads = text.get("num_global_key_value_heads") and text.get("attention_k_eq_v", True)
        layer |= {"num_key_value_heads": text["num_global_key_value_heads"]} if has_own_heads else {}
        layer |= {"head_dim": text["global_head_dim"]} if text.get("global_head_dim") else {}
    own = {int(place): values for place, values in (text.get("per_layer_config") or {}).items()}
    return {**text, **layer, **own.get(index, {})}


def _kv_sizes(layer: Mapping[str, Any], hidden: int, num_heads: int) -> tuple[int, int]:
    """Reads (heads with keys, their size) of one layer; keys may be longer than values, and of two parts."""
    num_heads = _first(layer, HEADS) or num_heads
    if plain := _first(layer, ("qk_nope_head_dim",)):
        return num_heads, max(plain + int(layer["qk_rope_head_dim"]), int(layer.get("v_head_dim") or 0))
    return _first(layer, KV_HEADS) or num_heads, int(layer.get("head_dim") or hidden // num_heads)


def _required(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    if (value := _first(text, names)) is None or value < 1:
        raise ValueError(f"there is no {names[0]}")
    return value


def _layer_kinds(text: Mapping[str, Any], num_layers: int) -> list[str]:
    """Given by name, by the places of the attention layers, or by their period; a model without heads is recurrent."""
    named = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(named, list) and len(named) == num_layers:
        return [str(kind) for kind in named]
    if isinstance(places := text.get("attn_layer_indices"), list):
        return ["attention" if index in places else "mamba" for index in range(num_layers)]
    if isinstance(period := text.get("attn_layer_period"), int) and period > 0:
        offset = int(text.get("attn_layer_offset") or 0)
        return ["attention" if index % period == offset else "mamba" for index in range(num_layers)]
    has_state = any(name in text for name in ("state_size", "conv_kernel", "attention_hidden_size"))
    return ["mamba" if has_state and "num_attention_heads" not in text else "attention"] * num_layers


def _intermediate(text: Mapping[str, Any], hidden: int) -> int:
    """A mixture's token passes the experts that it is given to, and the shared one."""
    dense = _first(text, INTERMEDIATE) or int(text.get("expand", 4)) * hidden
    num_chosen = _first(text, ("num_experts_per_tok", "moe_topk")) or 0
    expert = _first(text, ("moe_intermediate_size",)) or dense
    shared = _first(text, ("shared_expert_intermediate_size", "shared_intermediate_size")) or 0
    return max(dense, num_chosen * expert + shared)


def _state_bytes(text: Mapping[str, Any], hidden: int) -> int:
    """Counts the bytes of one recurrent layer: its state matrix and the last inputs of its convolution."""
    if "linear_num_value_heads" in text:
        heads, key, value = (
            int(text[name]) for name in ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        )
        key_heads = int(text.get("linear_num_key_heads") or heads)
        convolved = 2 * key_heads * key + heads * value
        return STATE_BYTES * (heads * key * value + convolved * int(text.get("linear_conv_kernel_dim") or 4))
    expand = text.get("mamba_expand") or text.get("expand") or 2
    inner = int(text.get("mamba_d_ssm") or float(expand) * hidden)
    state = _first(text, ("mamba_d_state", "state_size", "ssm_state_size")) or 0
    kernel = _first(text, ("mamba_d_conv", "conv_kernel", "conv_L_cache", "conv1d_width")) or 4
    return STATE_BYTES * inner * (state + kernel)


# --- parameters ---------------------------------------------------------------------------------------------


def num_stored_parameters(files: ModelFiles) -> int | None:
    """Counted in the headers of the weight files; None where no weights are there."""
    if files.gguf is not None:
        ggufs = [files.gguf] if files.tower is None else [files.gguf, files.tower.gguf]
        return sum(prod(tensor.shape) for gguf in ggufs for tensor in gguf.tensors.values())
    paths = files.weight_files or tuple(sorted(files.folder.glob("*.safetensors")) if files.folder else ())
    sizes = {name: prod(one.shape) for path in paths for name, one in read_safetensors_header(path).items()}
    if files.why_text_only and sizes:
        prefix = decoder_prefix(sizes, files.folder)
        sizes = {name: size for name, size in sizes.items() if name.startswith(prefix) or name.endswith(HEAD)}
    read = (name for name in sizes if not name.startswith(DRAFTING) and not name.endswith(BESIDE_WEIGHTS))
    return sum(sizes[name] for name in read) or None


def estimated_parameters(spec: GenericSpec) -> int:
    """Estimates parameters of a config without weights: embeddings, and in each layer attention and a gated MLP."""
    attention = spec.hidden_size * spec.head_size * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    return 2 * spec.vocab_size * spec.hidden_size + spec.num_layers * layer
