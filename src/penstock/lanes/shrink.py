"""A small random copy of a model for the self-check: every kind of layer stays, every limit moves into the prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock.lanes.comparison import exact_limit, largest_difference
from penstock.lanes.forward_check import ordinary_tokens

SMALL_ENOUGH = 4_000_000  # parameters: below this, sizes stay as they are
LARGEST_COPY = 60_000_000
LEAST_HEADS = 4
MOST_VOCABULARY = 256
MOST_EXPERTS = 8
MOST_HIDDEN = 128  # where heads have a size of their own
MOST_INTERMEDIATE = 128
# Of random weights, over the square root of their width: large ones show what a chunk lost, small ones round less.
GAINS = (1.0, 0.6, 0.35)
ROUNDING_SHARE = 0.1  # of what the comparison allows; more would leave it no room
ONE_ROUNDING = 2.0**-23
NUM_PROBED = 3
PROBE_TOKENS = 61
FIRST_LATE_ROW = 8  # past the reach of short convolutions
LEAST_MEMORY = 1e-2  # of a changed first token in late rows: a hundred times what the comparison allows
WINDOW = 13  # tokens; every longer window, chunk or state block becomes this long
ORIGINAL_CONTEXT = 24  # of rotary scalings
# Configs spell these in many ways; what a config does not have is left alone.
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = (
    *("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("mamba_n_heads", "mamba_num_heads", "linear_num_key_heads"),
)
WIDTHS = (*HIDDEN, *HEADS, "linear_num_value_heads", "lru_width", "mamba_d_ssm", "word_embed_proj_dim")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
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
    *("chunk_size", "mamba_chunk_size", "block_size", "sliding_window_size"),
)
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
ENCODER_DEPTHS = ("encoder_layers", "num_layers", "num_hidden_layers")
DECODER_DEPTHS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
VISION_DEPTHS = ("num_hidden_layers", "depth", "num_layers")
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def shrunken_models(model_class: Callable[[Any], Any], config: Any, device: torch.device) -> Iterator[Any]:
    """Small copies with random weights in float32, the smallest first; later ones are for configs that resist."""
    try:
        is_large = _num_parameters(model_class, config) > SMALL_ENOUGH
    except Exception:
        return  # a class that is not made from its config alone
    for shrink in (_shrink_freely, _shrink_evenly, _shrink_tables) if is_large else (lambda text: None,):
        small = copy.deepcopy(config)
        small._attn_implementation = None
        parts = _parts(small)
        for part in parts:
            shrink(part)
            scale_limits(part)
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


def _parts(config: Any) -> list[Any]:
    """The configs that describe language: of the encoder and the decoder where they have their own."""
    own = [part for name in ("encoder", "decoder") if hasattr(part := getattr(config, name, None), "to_dict")]
    if own:
        return own
    return [config if config.is_encoder_decoder else config.get_text_config(decoder=True)]


def scale_limits(text: Any) -> None:
    """Windows, state blocks and rotary limits that a short prompt would never reach are brought into it."""
    for name in LIMITS:
        if isinstance(value := getattr(text, name, None), int) and value > WINDOW:
            setattr(text, name, WINDOW if "window" in name else WINDOW + 3)
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
    for name in HIDDEN if is_free else ():
        _lower(text, name, MOST_HIDDEN)
    for name in INTERMEDIATE:
        _lower(text, name, MOST_INTERMEDIATE)


def _shrink_evenly(text: Any) -> None:
    _shrink_tables(text)
    _shrink_widths(text)


def _shrink_widths(text: Any) -> None:
    """One divisor for all widths, so that heads times head size still gives the width."""
    heads = [value for name in HEADS if isinstance(value := getattr(text, name, None), int)]
    divisor = 1
    while heads and all(value % (4 * divisor) == 0 and value // (2 * divisor) >= LEAST_HEADS for value in heads):
        divisor *= 2
    for name in AT_LEAST_ONE:
        if isinstance(value := getattr(text, name, None), int):
            setattr(text, name, max(1, value // divisor))
    for name in KEY_VALUE_HEADS:  # of one head alone it does not show how heads lie beside each other
        if isinstance(value := getattr(text, name, None), int):
            setattr(text, name, max(min(value, 2), value // divisor))
    for name in (*WIDTHS, *INTERMEDIATE):
        value = getattr(text, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value % divisor == 0:
            setattr(text, name, value // divisor)


def _shrink_tables(text: Any) -> None:
    if text.vocab_size > MOST_VOCABULARY:
        text.vocab_size = MOST_VOCABULARY
        if hasattr(text, "decoder_vocab_size"):
            text.decoder_vocab_size = MOST_VOCABULARY
        for index, name in enumerate(TOKEN_IDS):
            if getattr(text, name, None) is not None:
                setattr(text, name, index)
    num_chosen = getattr(text, "num_experts_per_tok", None) or 1
    for name in EXPERTS:
        _lower(text, name, max(MOST_EXPERTS, 2 * num_chosen))


def _lower(text: Any, name: str, most: int) -> None:
    if isinstance(value := getattr(text, name, None), int) and value > most:
        setattr(text, name, most)


def _shrink_depths(model_class: Callable[[Any], Any], config: Any, parts: list[Any]) -> None:
    if config.is_encoder_decoder:
        _shrink_depth(model_class, config, parts[0], ENCODER_DEPTHS, lambda model: model.get_encoder())
        _shrink_depth(model_class, config, parts[-1], DECODER_DEPTHS, lambda model: model.get_decoder())
        return
    _shrink_depth(model_class, config, parts[0], DEPTHS, lambda model: model)
    if vision := getattr(config, "vision_config", None):  # text does not reach it
        for name in VISION_DEPTHS:
            _lower(vision, name, 1)


def _shrink_depth(
    model_class: Callable[[Any], Any],
    config: Any,
    part: Any,
    names: tuple[str, ...],
    stack_of: Callable[[Any], Any],
) -> None:
    """The shortest run of first layers that has every kind, kinds being told apart by what the layers are made of."""
    depth_name = next((name for name in names if isinstance(getattr(part, name, None), int)), None)
    if depth_name is None:
        return
    depth = getattr(part, depth_name)
    with torch.device("meta"):
        layers = _layers(stack_of(model_class(copy.deepcopy(config))), depth)
    kinds = [_kind(layer) for layer in layers]
    if len(kinds) != depth or depth < 3:
        return
    needed = max(2, max(kinds.index(kind) for kind in set(kinds)) + 1)
    for name, value in list(vars(part).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(part, name, value[:needed])
    setattr(part, depth_name, needed)


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
            if isinstance(value, (int, float, str, bool, type(None))) and not key.startswith("_") and "idx" not in key
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
    for gain in GAINS:
        model = _random_model(model_class, config, gain).to(device)
        if _rounding_share(model) <= ROUNDING_SHARE:
            break
    return model


def _rounding_share(model: Any) -> float:
    """Of what the comparison allows: what one rounding of every input makes of the output, in two of three prompts."""
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
    """Of the part whose prompts are cut: the states of an encoder, the logits of everything else."""
    output = _stack(model)(input_ids=ids)
    return (output.last_hidden_state if model.config.is_encoder_decoder else output.logits)[0].float()


@torch.no_grad()
def _random_model(model_class: Callable[[Any], Any], config: Any, gain: float) -> Any:
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
                parameter.add_(noise * 0.05)
    return model
