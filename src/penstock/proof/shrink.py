"""A small random copy of a model for the self-check: every kind of layer stays, every limit moves into the prompt."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock.models.generic_spec import HEADS as CAUSAL_HEADS
from penstock.models.generic_spec import HIDDEN, KV_HEADS
from penstock.proof.comparison import exact_limit, largest_difference
from penstock.proof.forward import ordinary_tokens

SMALL_ENOUGH = 4_000_000  # parameters: below this, sizes stay as they are
LARGEST_COPY = 60_000_000
LEAST_HEADS = 4
MAX_VOCABULARY = 256
MAX_EXPERTS = 8
MAX_HIDDEN = 128  # where heads have a size of their own
MAX_INTERMEDIATE = 128
# Of random weights, over the square root of their width: large ones show what a chunk lost, small ones round less.
GAINS = (1.0, 0.6, 0.35)
# Of the weights of norms, lowered last: where queries and keys are normed and not scaled, only these round less.
NORM_GAINS = (1.0, 0.5)
ROUNDING_SHARE = 0.1  # of what the comparison allows; more would leave it no room
ONE_ROUNDING = 2.0**-23
NUM_PROBED = 3
PROBE_TOKENS = 61
FIRST_LATE_ROW = 8  # past the reach of short convolutions
LEAST_MEMORY = 1e-2  # of a changed first token in late rows: a hundred times what the comparison allows
WINDOW = 13  # tokens; every longer window, chunk, state block or choice of keys becomes about this long
ORIGINAL_CONTEXT = 24  # of rotary scalings
# Configs spell these in many ways; what a config does not have is left alone.
HEADS = (
    *(*CAUSAL_HEADS, "encoder_attention_heads", "decoder_attention_heads"),
    *("mamba_n_heads", "mamba_num_heads", "linear_num_key_heads"),
)
WIDTHS = (*HIDDEN, *HEADS, "linear_num_value_heads", "lru_width", "mamba_d_ssm", "word_embed_proj_dim")
AT_LEAST_ONE = ("n_groups", "mamba_n_groups", "mamba_ngroups")
INTERMEDIATE = (
    *("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "block_ff_dim", "intermediate_size_mlp"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
)
TIES_WIDTH_TO_STATE = ("expand", "mamba_expand", "mamba_d_ssm", "lru_width")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LIMITS = (
    *("sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "local_attention_window"),
    *("chunk_size", "mamba_chunk_size", "block_size", "sliding_window_size", "index_topk"),
    *("local_radius", "attention_window"),
)
EVEN = ("attention_window",)
# Of a decoder alone; its config may also describe an encoder, and a cache may be made for that one's depth.
DEPTHS = (
    *("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers"),
    *("encoder_layers", "num_encoder_layers"),
)
ENCODER_DEPTHS = ("encoder_layers", "num_layers", "num_hidden_layers")
DECODER_DEPTHS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
VISION_DEPTHS = ("num_hidden_layers", "depth", "num_layers")
VOCABULARIES = ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input")
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def shrunken_models(model_class: Callable[[Any], Any], config: Any, device: torch.device) -> Iterator[Any]:
    """Small copies with random weights in float32, the smallest first; later ones are for configs that resist."""
    try:
        is_large = _num_parameters(model_class, config) > SMALL_ENOUGH
    except Exception:
        return  # a class that is not made from its config alone
    for shrink in (_shrink_freely, _shrink_evenly, _shrink_heads, _shrink_tables) if is_large else (lambda text: None,):
        small = copy.deepcopy(config)
        small._attn_implementation = None
        parts = _parts(small)
        for part in parts:
            _shrink_part(part, shrink)
        if hasattr(parts[-1], "cross_attention_hidden_size"):
            parts[-1].cross_attention_hidden_size = parts[0].hidden_size
        if shrink in (_shrink_freely, _shrink_evenly) and hasattr(small, "vision_config"):
            _shrink_widths(small.vision_config)
        if any(getattr(part, "attn_logit_softcapping", None) for part in parts):
            small._attn_implementation = "eager"  # some releases hand softcaps to a kernel that leaves them out
        try:
            _shrink_depths(model_class, small, parts)
            if _num_parameters(model_class, small) > LARGEST_COPY:
                continue
            model = _telling_model(model_class, small, device)
        except Exception:
            continue  # a config resists in ways of its own; the next copy is larger
        yield model


def _shrink_part(part: Any, shrink: Callable[[Any], None]) -> None:
    """Layers with settings of their own are shrunk by the rule of the others."""
    own_settings = _own_settings(part)
    if own_settings:
        part.per_layer_config = None  # while it is set, a setting that differs by layer cannot be read
    layers = {index: copy.copy(part) for index in own_settings}
    for index, own in own_settings.items():
        for name, value in own.items():
            setattr(layers[index], name, value)
    for text in (part, *layers.values()):
        shrink(text)
        scale_limits(text)
    if layers:
        part.per_layer_config = {i: {name: getattr(layers[i], name) for name in own_settings[i]} for i in layers}


def _own_settings(part: Any) -> dict[int, dict[str, Any]]:
    """Lists by layer what differs from the rest of the config; most configs have none."""
    return {int(index): own for index, own in (part.to_dict().get("per_layer_config") or {}).items()}


def _parts(config: Any) -> list[Any]:
    """The configs that describe language: of the encoder and the decoder where they have their own."""
    own = [part for name in ("encoder", "decoder") if hasattr(part := getattr(config, name, None), "to_dict")]
    if own:
        return own
    return [config if config.is_encoder_decoder else config.get_text_config(decoder=True)]


def scale_limits(text: Any) -> None:
    """Windows, state blocks and rotary limits that a short prompt would never reach are brought into it."""
    for name in LIMITS:
        _lower(text, (name,), WINDOW - 1 if name in EVEN else WINDOW if "window" in name else WINDOW + 3)
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = ORIGINAL_CONTEXT
        if rope.get("rope_type") == "dynamic":
            text.max_position_embeddings = ORIGINAL_CONTEXT
    if isinstance(getattr(text, "original_max_position_embeddings", None), int):
        text.original_max_position_embeddings = ORIGINAL_CONTEXT


def _num_parameters(model_class: Callable[[Any], Any], config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())


def _shrink_freely(text: Any) -> None:
    _shrink_evenly(text)
    is_free = isinstance(getattr(text, "head_dim", None), int) and not any(
        hasattr(text, x) for x in TIES_WIDTH_TO_STATE
    )
    if is_free:
        _lower(text, HIDDEN, MAX_HIDDEN)
    _lower(text, INTERMEDIATE, MAX_INTERMEDIATE)


def _shrink_evenly(text: Any) -> None:
    _shrink_tables(text)
    _shrink_widths(text)


def _shrink_heads(text: Any) -> None:
    """Fewer heads of the same size, for a number of heads that hardly anything divides."""
    _shrink_tables(text)
    heads = max((value for name in _named(text, HEADS) if type(value := getattr(text, name)) is int), default=1)
    _change(text, HIDDEN, lambda value: value // heads * min(heads, LEAST_HEADS))
    _lower(text, (*HEADS, "linear_num_value_heads", *KV_HEADS), LEAST_HEADS)
    if heads == 1:  # nothing ties the width of a model without heads
        _lower(text, (*HIDDEN, "attention_hidden_size"), MAX_HIDDEN)
    _lower(text, INTERMEDIATE, MAX_INTERMEDIATE)


def _shrink_widths(text: Any) -> None:
    """One divisor for all widths, so that heads times head size still gives the width."""
    heads = [value for name in _named(text, HEADS) if type(value := getattr(text, name)) is int]
    divisor = 1
    while heads and all(value % (4 * divisor) == 0 and value // (2 * divisor) >= LEAST_HEADS for value in heads):
        divisor *= 2
    _change(text, AT_LEAST_ONE, lambda value: max(1, value // divisor))
    # Of one head alone it does not show how heads lie beside each other.
    _change(text, KV_HEADS, lambda value: max(min(value, 2), value // divisor))
    _change(text, (*WIDTHS, *INTERMEDIATE), lambda value: value // divisor if value % divisor == 0 else value)


def _named(text: Any, names: tuple[str, ...]) -> list[str]:
    """The sizes that the config has, each once: a name may stand for another of them."""
    own = getattr(text, "attribute_map", {})
    found = dict.fromkeys(own.get(name, name) for name in names)
    return [name for name in found if type(getattr(text, name, None)) in (int, list)]


def _shrink_tables(text: Any) -> None:
    if text.vocab_size > MAX_VOCABULARY:
        _lower(text, VOCABULARIES, MAX_VOCABULARY)
        for index, name in enumerate(TOKEN_IDS):
            if getattr(text, name, None) is not None:
                setattr(text, name, index)
    num_chosen = getattr(text, "num_experts_per_tok", None) or 1
    _lower(text, EXPERTS, max(MAX_EXPERTS, 2 * num_chosen))


def _lower(text: Any, names: tuple[str, ...], most: int) -> None:
    _change(text, names, lambda value: min(value, most))


def _change(text: Any, names: tuple[str, ...], change: Callable[[int], int]) -> None:
    """Changes sizes, of which some are given for every layer."""
    for name in _named(text, names):
        value = getattr(text, name)
        if type(value) is int:
            setattr(text, name, change(value))
        elif all(type(one) is int for one in value):
            setattr(text, name, [change(one) for one in value])


def _shrink_depths(model_class: Callable[[Any], Any], config: Any, parts: list[Any]) -> None:
    if config.is_encoder_decoder:
        _shrink_depth(model_class, config, parts[0], ENCODER_DEPTHS, lambda model: model.get_encoder())
        _shrink_depth(model_class, config, parts[-1], DECODER_DEPTHS, lambda model: model.get_decoder())
        return
    _shrink_depth(model_class, config, parts[0], DEPTHS, lambda model: model)
    if vision := getattr(config, "vision_config", None):  # text does not reach it
        _lower(vision, VISION_DEPTHS, 1)


def _shrink_depth(
    model_class: Callable[[Any], Any], config: Any, part: Any, names: tuple[str, ...], stack_of: Callable[[Any], Any]
) -> None:
    """The shortest run of first layers that has every kind, kinds being told apart by what the layers are made of."""
    depth_name = next((name for name in names if isinstance(getattr(part, name, None), int)), None)
    if depth_name is None:
        return
    depth = getattr(part, depth_name)
    if num_shared := getattr(part, "num_kv_shared_layers", None) or 0:
        kept = _kept_beside_shared(part, depth, num_shared)
        part.num_kv_shared_layers = sum(index >= depth - num_shared for index in kept)
    else:
        with torch.device("meta"):
            layers = _layers(stack_of(model_class(copy.deepcopy(config))), depth)
        kinds = [_kind(layer) for layer in layers]
        if len(kinds) != depth or depth < 3:
            return
        kept = list(range(max(2, max(kinds.index(kind) for kind in set(kinds)) + 1)))
    same = [name for name in DEPTHS if not config.is_encoder_decoder and part.to_dict().get(name) == depth]
    _keep_layers(part, same or [depth_name], depth, kept)


def _kept_beside_shared(part: Any, depth: int, num_shared: int) -> list[int]:
    """The last layers take the keys of earlier ones: the first of each kind among those, and among these.

    Kinds are told apart by what the config lists, because a layer that hands on its keys is no kind of its own.
    """
    listed, own = _listed_by_layer(part, depth), _own_settings(part)
    kinds = [
        (index >= depth - num_shared, *(str(values[index]) for values in listed.values()), str(own.get(index)))
        for index in range(depth)
    ]
    return sorted({kinds.index(kind) for kind in kinds})


def _listed_by_layer(part: Any, depth: int) -> dict[str, list[Any]]:
    return {name: value for name, value in vars(part).items() if isinstance(value, list) and len(value) == depth}


def _keep_layers(part: Any, depth_names: list[str], depth: int, kept: list[int]) -> None:
    own = _own_settings(part)
    for name, values in _listed_by_layer(part, depth).items():
        setattr(part, name, [values[index] for index in kept])
    for name in depth_names:
        setattr(part, name, len(kept))
    if own:
        part.per_layer_config = {place: own[index] for place, index in enumerate(kept) if index in own}


def _layers(model: Any, depth: int) -> list[Any]:
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == depth]
    return list(lists[0]) if lists else []


def _kind(layer: Any) -> tuple[Any, ...]:
    """Classes, plain settings and shapes of all its modules; what merely numbers a layer is left out."""
    facts: list[Any] = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, bool, type(None)))
            and not key.startswith("_")
            and "idx" not in key
            and key != "layer_id"
        }
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        facts.append((name, type(module).__name__, str(sorted(plain.items())), str(shapes)))
    return tuple(facts)


@torch.no_grad()
def _telling_model(model_class: Callable[[Any], Any], config: Any, device: torch.device) -> Any:
    """The copy with the largest weights through which one rounding of the input does not grow past what is allowed.

    Only the plain forward over whole prompts is asked, so a mistake of chunks cannot hide in the choice.
    """
    model: Any = None
    for norm_gain, gain in itertools.product(NORM_GAINS, GAINS):
        model = _random_model(model_class, config, gain, norm_gain).to(device)
        if _rounding_share(model) <= ROUNDING_SHARE:
            break
    return model


def _rounding_share(model: Any) -> float:
    """Measures which share of the allowed difference one rounding of every input makes, in two of three prompts."""
    shares: list[float] = []
    generator = torch.Generator().manual_seed(2)

    def rounded(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        steps = torch.randint(-1, 2, output.shape, generator=generator).to(output.device)
        return output * (1 + ONE_ROUNDING * steps)

    for ids in _probes(model):
        plain = _output(model, ids)
        handle = _stack(model).get_input_embeddings().register_forward_hook(rounded)
        try:
            shares.append(largest_difference(_output(model, ids), plain) / exact_limit(plain))
        finally:
            handle.remove()
    return sorted(shares)[NUM_PROBED - 2]


@torch.no_grad()
def remembers(model: Any) -> bool:
    """Whether late rows show that the first token was another: if they do not, a lost state would not show either."""
    effects: list[float] = []
    for ids in _probes(model):
        other = ids.clone()
        other[0, 0] = ids[0, 1]
        late = slice(FIRST_LATE_ROW, None)
        effects.append(largest_difference(_output(model, ids)[late], _output(model, other)[late]))
    return sorted(effects)[NUM_PROBED - 2] >= LEAST_MEMORY


def _probes(model: Any) -> list[torch.Tensor]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return [ordinary_tokens(model, vocabulary, PROBE_TOKENS, seed=seed) for seed in range(NUM_PROBED)]


def _stack(model: Any) -> Any:
    return model.get_encoder() if model.config.is_encoder_decoder else model


def _output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Computes the part whose prompts are cut: the states of an encoder, the logits of everything else."""
    output = _stack(model)(input_ids=ids)
    return (output.last_hidden_state if model.config.is_encoder_decoder else output.logits)[0].float()


@torch.no_grad()
def _random_model(model_class: Callable[[Any], Any], config: Any, gain: float, norm_gain: float = 1.0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(copy.deepcopy(config)).float().eval()
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue  # a table of sines
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(noise * gain * max(0.1, parameter.shape[-1] ** -0.5))
            else:
                parameter.mul_(norm_gain).add_(noise * 0.05)
    return model
