"""Reads a source through an encoder of transformers in exact tiles of rows.

An encoder sees the whole source in every layer, so it is read layer by layer: first the keys and values of all tiles,
then each tile's queries over all of them. The encoder's own forward makes the arguments of every layer: it is run on
the tile's ids, and only the layer that is due computes. Norms, rotary positions, residuals and feed-forwards are the
model's own code; the attention between them is ours, through the library's attention interface.
"""

# B batch, S source tokens, T rows of a tile, M hidden size, H heads, K key-value heads, D head size

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.errors import InvalidPrompt, InvalidSetting, PromptTooLong, UnsupportedModel
from penstock.foreign.signature import ForwardSignature
from penstock.foreign.source_attention import MaskFunction, SourceRule, attend
from penstock.foreign.source_local import OWN_ATTENTIONS, Due, SourceState, long_t5_bias

INTERFACE = "penstock-source"
PASSES_PER_LAYER = 2  # keys and values, then everything else
PADDING_NAME = "_pad_to_window_size"
ATTENTION_SWITCH = "set_attention_type"  # of encoders that forget their kind of attention over a short source
OFFSET_NAME = "past_key_values_length"  # how position tables of the library are told where a piece begins


class _KeysTaken(Exception):
    """Ends a layer whose keys and values are all that was wanted."""


class _Turn(nn.Module):
    """Stands where a layer stands: runs it on the state's rows if it is due, else lets the rows pass."""

    def __init__(self, encoder: TiledEncoder, index: int, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_owner"] = (encoder, index, layer)  # past torch, which would register the layer a second time

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_owner"][2], name)

    def forward(self, hidden_BTM: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        encoder, index, layer = self._owner
        due = encoder.due
        assert due is not None
        if index != due.layer:
            return encoder.passing(hidden_BTM)
        if index == 0 and due.keys_only:
            encoder.keep(due, hidden_BTM)
        assert due.state.hidden_BSM is not None
        rows_BTM = due.state.hidden_BSM[:, due.rows]
        if encoder.is_carried and index:
            arguments = (due.state.kept["carried"], *arguments[1:])
        try:
            output = layer(rows_BTM, *arguments, **named)
        except _KeysTaken:
            return encoder.passing(rows_BTM)
        encoder.keep(due, output[0] if isinstance(output, tuple) else output)
        if encoder.is_carried and due.rows.stop == due.state.num_tokens:
            due.state.kept["carried"] = output[1]
        return output


class TiledEncoder:
    """An encoder that was looked at once: where its layers are, and how its positions are told where a tile begins."""

    def __init__(self, encoder: Any) -> None:
        if hasattr(encoder, ATTENTION_SWITCH):
            raise UnsupportedModel(
                "its rows see blocks drawn at random for the whole source, so no tile is read by itself; of the models "
                "for long sources, LED, LongT5 and Pegasus-X are read in tiles"
            )
        _register()
        self.encoder = encoder
        self.layers_name, layers = _find_layers(encoder)
        self.num_layers = len(layers)
        self.num_passes = PASSES_PER_LAYER * self.num_layers
        self.takes_positions = ForwardSignature.of(encoder.forward).accepts("position_ids")
        self.position_tables = _position_tables(encoder)
        self.max_positions = position_limit(encoder)
        self.due: Due | None = None
        self._layers = layers
        # What a layer gives besides hidden states; T5 hands its bias to the next layer there.
        self._output_kinds = _output_kinds(encoder, layers[0])
        self._turns = nn.ModuleList([_Turn(self, index, layer) for index, layer in enumerate(layers)])
        self._bias_modules = _bias_modules(layers)
        modules = [module for layer in layers for module in layer.modules()]
        self._own = [(module, own) for module in modules if (own := OWN_ATTENTIONS.get(type(module).__name__))]
        self.is_carried = any(own.is_carried for _, own in self._own)

    def new_state(self, ids_BS: torch.Tensor, attention_mask: torch.Tensor | None = None) -> SourceState:
        if ids_BS.shape[1] == 0:
            raise InvalidPrompt("The source is empty: it has 0 tokens. Give at least 1.")
        self.refuse_too_long(ids_BS.shape[1])
        is_padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask == 0
        return SourceState(ids_BS=ids_BS, is_padding_BS=is_padding)

    def refuse_too_long(self, num_tokens: int) -> None:
        if (limit := self.max_positions) is not None and num_tokens > limit:
            raise PromptTooLong(
                f"The source has {num_tokens} tokens; the model has positions for {limit}. Shorten the source."
            )

    @torch.no_grad()
    def read(self, state: SourceState, start: int, end: int) -> None:
        """Work positions [start, end): pass p holds [p S, (p + 1) S), and the passes of a layer follow each other."""
        num_tokens = state.num_tokens
        while start < end:
            number, low = divmod(start, num_tokens)
            high = min(num_tokens, low + end - start)
            layer, kind = divmod(number, PASSES_PER_LAYER)
            bias_module = self._bias_modules[layer]
            rows = slice(low, high)
            self._run(Due(state=state, layer=layer, rows=rows, keys_only=kind == 0, bias_module=bias_module))
            start += high - low
        if end == self.num_passes * num_tokens:
            state.k_BKSD = state.v_BKSD = None
            state.bias_by_module.clear()
            state.kept.clear()

    def passing(self, hidden_BTM: torch.Tensor) -> Any:
        if self._output_kinds is None:
            return hidden_BTM
        # A table of one entry stands for a bias: with none at all the next layer would make rows by rows of zeros.
        others = [hidden_BTM.new_zeros(1, 1, 1, 1) if is_tensor else None for is_tensor in self._output_kinds[1:]]
        return (hidden_BTM, *others)

    def keep(self, due: Due, hidden_BTM: torch.Tensor) -> None:
        state = due.state
        if state.hidden_BSM is None:
            batch, _, width = hidden_BTM.shape
            state.hidden_BSM = hidden_BTM.new_empty(batch, state.num_tokens, width)
        state.hidden_BSM[:, due.rows] = hidden_BTM[:, : due.rows.stop - due.rows.start]  # some pad to whole blocks

    def _run(self, due: Due) -> None:
        state, rows = due.state, due.rows
        named: dict[str, Any] = {"attention_mask": torch.ones_like(state.ids_BS[:, rows])}
        if self.takes_positions:
            named["position_ids"] = torch.arange(rows.start, rows.stop, device=state.ids_BS.device)[None]
        self.due = due
        try:
            with self._in_place(due):
                output = self.encoder(input_ids=state.ids_BS[:, rows], return_dict=True, **named)
        finally:
            self.due = None
        if due.num_attention_calls != 1:
            raise UnsupportedModel(f"a layer calls the attention interface {due.num_attention_calls} times, not once")
        if due.layer == self.num_layers - 1 and not due.keys_only:
            self.keep(due, output.last_hidden_state)  # the final norm is in it

    @contextmanager
    def _in_place(self, due: Due) -> Generator[None]:
        """Our attention, our stand-ins and the tile's position, for one call of the encoder's forward."""
        config = self.encoder.config
        implementation = config._attn_implementation
        hooks = [table.register_forward_pre_hook(_offset_hook(due), with_kwargs=True) for table in self.position_tables]
        config._attn_implementation = INTERFACE
        self.encoder._modules[self.layers_name] = self._turns
        _current.append(self)
        biased = {id(module): module for module in self._bias_modules if module is not None}.values()
        for module in biased:
            module.compute_bias = _no_bias
        for module, own in self._own:
            module.forward = partial(own.forward, module, due, partial(_attended, self, due))
        if pads := hasattr(self.encoder, PADDING_NAME):
            setattr(self.encoder, PADDING_NAME, _unpadded)
        try:
            yield
        finally:
            if pads:
                delattr(self.encoder, PADDING_NAME)
            for module, _ in self._own:
                del module.forward
            for module in biased:
                del module.compute_bias
            _current.pop()
            self.encoder._modules[self.layers_name] = self._layers
            config._attn_implementation = implementation
            for hook in hooks:
                hook.remove()

    def bias(self, due: Due, dtype: torch.dtype) -> torch.Tensor | None:
        """[H, 2 S - 1] by the module's own rule: the last row sees all distances up to 0, the first all from 0 on."""
        state, module = due.state, due.bias_module
        if module is None:
            return None
        key, num_tokens = id(module), state.num_tokens
        if key not in state.bias_by_module and any(module is own for own, _ in self._own):
            distances_X = torch.arange(1 - num_tokens, num_tokens, device=state.ids_BS.device)
            state.bias_by_module = {key: long_t5_bias(module, distances_X).T.to(dtype).contiguous()}
        elif key not in state.bias_by_module:
            compute = type(module).compute_bias
            before = compute(module, 1, num_tokens, past_seen_tokens=num_tokens - 1)[0, :, 0]
            after = compute(module, 1, num_tokens)[0, :, 0]
            state.bias_by_module = {key: torch.cat((before, after[:, 1:]), 1).to(dtype)}
        return state.bias_by_module[key]


def read_source(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    tile: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> torch.Tensor:
    """[B, S, M]: what `model.get_encoder()(input_ids, attention_mask)` gives, computed `tile` rows at a time.

    `on_progress` is called with the work positions that are done and all there are.
    """
    if tile < 1:
        raise InvalidSetting(f"The tile is {tile} rows; it must be at least 1.")
    encoder = TiledEncoder(encoder_of(model))
    state = encoder.new_state(input_ids, attention_mask)
    num_positions = encoder.num_passes * state.num_tokens
    for start in range(0, num_positions, tile):
        end = min(start + tile, num_positions)
        encoder.read(state, start, end)
        if on_progress is not None:
            on_progress(end, num_positions)
    assert state.hidden_BSM is not None
    return state.hidden_BSM


def read_whole(encoder: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    """[B, S, M] by the encoder's own forward, which may not change how it reads the next source."""
    kind = getattr(encoder, "attention_type", None)
    states_BSM = encoder(ids_BS, attention_mask=torch.ones_like(ids_BS)).last_hidden_state
    if kind is not None and encoder.attention_type != kind:
        getattr(encoder, ATTENTION_SWITCH)(kind)
    return states_BSM


def encoder_of(model: Any) -> Any:
    if model.training:
        raise InvalidSetting("The model is in training mode, where dropout is random. Call model.eval() first.")
    get_encoder = getattr(model, "get_encoder", None)
    encoder = get_encoder() if callable(get_encoder) else None
    if not isinstance(encoder, nn.Module) or encoder is model:
        raise UnsupportedModel("the model has no encoder of its own")
    return encoder


# --- what is looked at once ---------------------------------------------------------------------------------


def _find_layers(encoder: Any) -> tuple[str, nn.ModuleList]:
    """The one list of like modules that the encoder has."""
    found = [
        (name, child)
        for name, child in encoder.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and len({type(layer) for layer in child}) == 1
    ]
    if len(found) != 1:
        raise UnsupportedModel(f"the encoder has {len(found)} lists of layers, not one")
    return found[0]


def position_limit(stack: Any) -> int | None:
    """Tokens that the position table of an encoder or decoder holds; None: there is none, or it grows."""
    tables = [table for table in _position_tables(stack) if isinstance(table, nn.Embedding)]
    return min((table.num_embeddings - getattr(table, "offset", 0) for table in tables), default=None)


def _position_tables(stack: Any) -> list[nn.Module]:
    return [child for child in stack.children() if ForwardSignature.of(child.forward).accepts(OFFSET_NAME)]


def _bias_modules(layers: Iterable[nn.Module]) -> list[Any]:
    """Finds by layer the attention whose relative bias it uses: its own, or that of the nearest layer before."""
    found: list[Any] = []
    for layer in layers:
        own = [m for m in layer.modules() if hasattr(m, "compute_bias") and hasattr(m, "relative_attention_bias")]
        found.append(own[0] if own else found[-1] if found else None)
    return found


@torch.no_grad()
def _output_kinds(encoder: Any, layer: nn.Module) -> tuple[bool, ...] | None:
    """Which parts of a layer's output are tensors, seen on one token; None: the output is no tuple."""
    outputs: list[Any] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        one = torch.ones(1, 1, dtype=torch.long, device=next(encoder.parameters()).device)
        encoder(input_ids=one, attention_mask=one)
    finally:
        hook.remove()
    if len(outputs) != 1:
        raise UnsupportedModel(f"the encoder ran its first layer {len(outputs)} times, not once")
    output = outputs[0]
    return tuple(isinstance(item, torch.Tensor) for item in output) if isinstance(output, tuple) else None


# --- what the library calls back ----------------------------------------------------------------------------

_current: list[TiledEncoder] = []  # whose forward runs now; the interface has no place for it


@dataclass(frozen=True, slots=True, kw_only=True)
class _MaskRule:
    """Travels through the encoder in place of a mask; `function` is None where every row sees every key."""

    function: MaskFunction | None


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if INTERFACE not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, _mask)


def _mask(*, mask_function: MaskFunction, **_: Any) -> _MaskRule:
    from transformers.masking_utils import bidirectional_mask_function

    return _MaskRule(function=None if mask_function is bidirectional_mask_function else mask_function)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _MaskRule | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Keeps the keys and values of the rows that are due, or attends for these rows over those of all."""
    if not isinstance(attention_mask, _MaskRule | None):
        raise UnsupportedModel("its layers make masks of their own")
    encoder = _current[-1]
    due = encoder.due
    assert due is not None
    out_BTHD = _attended(
        encoder,
        due,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        mask=None if attention_mask is None else attention_mask.function,
        has_bias=position_bias is not None,
    )
    return out_BTHD, None


def _attended(
    encoder: TiledEncoder,
    due: Due,
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    *,
    has_bias: bool = False,
    **rule: Any,
) -> torch.Tensor:
    """[B, T, H, D] of the rows that are due, over the keys that `rule` lets them see; or their keys and values kept."""
    due.num_attention_calls += 1
    state = due.state
    if k_BKTD.shape[2] != due.rows.stop - due.rows.start:
        raise UnsupportedModel("a layer attends to other rows than its own")
    if due.keys_only:
        state.k_BKSD = _stored(state.k_BKSD, k_BKTD, due)
        state.v_BKSD = _stored(state.v_BKSD, v_BKTD, due)
        raise _KeysTaken
    assert state.k_BKSD is not None
    assert state.v_BKSD is not None
    bias_HX = encoder.bias(due, q_BHTD.dtype) if has_bias else None
    source_rule = SourceRule(bias_HX=bias_HX, is_padding_BS=state.is_padding_BS, **rule)
    return attend(q_BHTD, state.k_BKSD, state.v_BKSD, due.rows.start, source_rule).transpose(1, 2).contiguous()


def _unpadded(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, inputs_embeds: torch.Tensor, pad_token_id: int
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands where an encoder pads its source to whole windows, which no tile needs."""
    return 0, input_ids, attention_mask, inputs_embeds


def _no_bias(query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0) -> torch.Tensor:
    return torch.zeros(1, 1, 1, 1, device=device)


def _offset_hook(due: Due) -> Callable[..., Any]:
    def tell_offset(table: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        first = arguments[0] if arguments else None
        offset = due.rows.start
        padding = getattr(table, "padding_idx", None)
        counts_tokens = isinstance(first, torch.Tensor) and not first.is_floating_point() and first.ndim == 2
        if counts_tokens and padding is not None and not isinstance(table, nn.Embedding):
            offset = _num_tokens_before(due, padding)
            if not due.state.has_all_positions:  # once, not a little with every tile
                table.forward(first[:, :1], **{OFFSET_NAME: due.state.num_tokens - 1})
                due.state.has_all_positions = True
        return arguments, {**named, OFFSET_NAME: offset}

    return tell_offset


def _num_tokens_before(due: Due, padding: int) -> int:
    """Counts the tokens before, for tables that count positions over what is no padding."""
    is_token_BS = due.state.ids_BS != padding
    counts = is_token_BS[:, : due.rows.start].sum(1)[is_token_BS[:, due.rows].any(1)].unique()
    if len(counts) > 1:
        raise InvalidPrompt(
            "The sources of the batch are padded on the left; this model needs them padded on the right."
        )
    return int(counts[0]) if len(counts) else 0


def _stored(kept_BKSD: torch.Tensor | None, part_BKTD: torch.Tensor, due: Due) -> torch.Tensor:
    """The part copied to its rows. Rows of all heads lie together, as the projections make them."""
    if kept_BKSD is None:
        batch, heads, _, size = part_BKTD.shape
        kept_BKSD = part_BKTD.new_empty(batch, due.state.num_tokens, heads, size).transpose(1, 2)
    kept_BKSD[:, :, due.rows] = part_BKTD
    return kept_BKSD
