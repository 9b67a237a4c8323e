"""Attention of encoders that are made for long sources: rows see the keys near them, and a few that all rows see.

Their modules attend by themselves instead of calling the library's interface, so each is stood in for here. The
projections, biases and norms are the module's own.
"""

# B batch, S source tokens, T rows of a tile, M hidden size, H heads, D head size, G keys that all rows see

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.foreign.source_attention import SeenByAll, SourceRule, attend


@dataclass(slots=True, kw_only=True)
class SourceState:
    """One source while it is read: all of its hidden states, and the keys and values of the layer that is due."""

    ids_BS: torch.Tensor
    is_padding_BS: torch.Tensor | None  # None: no padding
    hidden_BSM: torch.Tensor | None = None
    k_BKSD: torch.Tensor | None = None
    v_BKSD: torch.Tensor | None = None
    bias_by_module: dict[int, torch.Tensor] = field(default_factory=dict)
    has_all_positions: bool = False  # tables that grow with the source were grown
    kept: dict[str, torch.Tensor] = field(default_factory=dict)  # by attention that is no call of the interface

    @property
    def num_tokens(self) -> int:
        return self.ids_BS.shape[1]


@dataclass(slots=True, kw_only=True)
class Due:
    """What the encoder's forward is to compute now."""

    state: SourceState
    layer: int
    rows: slice
    keys_only: bool
    bias_module: Any  # whose relative biases hold for the layer; None: there are none
    num_attention_calls: int = 0


# [B, T, H, D]; takes the keys and ends the layer where they are all it wants
Attended = Callable[..., torch.Tensor]


def _heads(projected_BTX: torch.Tensor, num_heads: int) -> torch.Tensor:
    return projected_BTX.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _within(reach: int) -> dict[str, Any]:
    """Keys at most so many places away."""
    return {
        "mask": lambda batch, head, rows, keys: (rows - keys).abs() <= reach,
        "keys": lambda start, end: (start - reach, end + reach),
    }


# --- LED ----------------------------------------------------------------------------------------------------


def _led(module: Any, due: Due, attended: Attended, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
    projections = (module.query, module.key, module.value)
    q, k, v = (_heads(project(hidden_states), module.num_heads) for project in projections)
    out_BTHD = attended(q, k, v, scale=module.head_dim**-0.5, **_within(module.one_sided_attn_window_size))
    return (out_BTHD.flatten(2),)


# --- LongT5 -------------------------------------------------------------------------------------------------


def _long_t5(
    module: Any, due: Due, attended: Attended, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    beside = _summaries(module, due, hidden_states) if hasattr(module, "global_block_size") else None
    q, k, v = (_heads(project(hidden_states), module.n_heads) for project in (module.q, module.k, module.v))
    near = _within(module.block_len - 1)
    out_BTHD = attended(q, k, v, scale=1.0, has_bias=True, beside=beside, **near)
    return module.o(out_BTHD.flatten(2)), hidden_states.new_zeros(1, 1, 1, 1)


def long_t5_bias(module: Any, distances: torch.Tensor, table: nn.Embedding | None = None) -> torch.Tensor:
    """[..., H]: what the module adds to scores at these distances key - query."""
    buckets = module._relative_position_bucket(
        distances,
        bidirectional=True,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    return (module.relative_attention_bias if table is None else table)(buckets)


def _summaries(module: Any, due: Due, hidden_BTM: torch.Tensor) -> SeenByAll | None:
    """Keys and values of sums over blocks of the source, which are complete once all keys are taken."""
    state, kept, rows = due.state, due.state.kept, due.rows
    if "block_of" not in kept:
        library = sys.modules[type(module).__module__]
        ones = torch.ones(hidden_BTM.shape[0], state.num_tokens, dtype=torch.long, device=hidden_BTM.device)
        is_token_BS = ones if state.is_padding_BS is None else ones.masked_fill(state.is_padding_BS, 0)
        made = library._make_global_fixed_block_ids(is_token_BS, module.global_block_size)
        kept["block_of"], kept["is_block"] = made[0].long(), made[1] == 1
    num_blocks = kept["is_block"].shape[1]
    if due.keys_only:
        if rows.start == 0:
            kept["sums"] = hidden_BTM.new_zeros(hidden_BTM.shape[0], num_blocks + 1, hidden_BTM.shape[2])
        blocks_BT = kept["block_of"][:, rows]
        blocks_BT = blocks_BT.where(blocks_BT >= 0, num_blocks)[..., None]  # the last sum is of what has no block
        kept["sums"].scatter_add_(1, blocks_BT.expand_as(hidden_BTM), hidden_BTM)
    if due.keys_only or num_blocks == 0:
        return None
    if rows.start == 0:
        sums_BGM = module.global_input_layer_norm(kept["sums"][:, :-1])
        kept["k"], kept["v"] = (_heads(project(sums_BGM), module.n_heads) for project in (module.k, module.v))
    hidden_B11G = ~kept["is_block"][:, None, None]

    def addend(low: int, high: int) -> torch.Tensor:
        places_G = torch.arange(num_blocks, device=hidden_BTM.device)
        distances_BTG = places_G - kept["block_of"][:, low:high, None]
        table = due.bias_module.global_relative_attention_bias
        bias_BHTG = long_t5_bias(due.bias_module, distances_BTG, table).permute(0, 3, 1, 2).float()
        return bias_BHTG.masked_fill(hidden_B11G, torch.finfo(torch.float32).min)

    return SeenByAll(k_BKGD=kept["k"], v_BKGD=kept["v"], addend=addend)


# --- Pegasus-X ----------------------------------------------------------------------------------------------


def _pegasus_x(
    module: Any,
    due: Due,
    attended: Attended,
    token_hidden_states: torch.Tensor,
    global_hidden_states: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Blocks of every other layer begin half a block earlier: there the layer pads its rows by as much."""
    state, num_rows = due.state, due.rows.stop - due.rows.start
    size, shift = module.block_size, (token_hidden_states.shape[1] - num_rows) // 2

    def heads(projection: Any, x: torch.Tensor) -> torch.Tensor:
        return _heads(projection(x), module.num_heads)

    rows_BTM = token_hidden_states[:, shift : shift + num_rows]
    projections = (module.q_proj, module.k_proj, module.v_proj)
    beside = SeenByAll(
        k_BKGD=heads(module.k_proj, global_hidden_states), v_BKGD=heads(module.v_proj, global_hidden_states)
    )
    out_BTHD = attended(
        *(heads(projection, rows_BTM) for projection in projections),
        scale=module.scaling,
        mask=lambda batch, head, rows, keys: (rows + shift) // size == (keys + shift) // size,
        keys=lambda start, end: (
            (start + shift) // size * size - shift,
            ((end - 1 + shift) // size + 1) * size - shift,
        ),
        beside=beside,
    )
    out_BTM = nn.functional.pad(module.out_proj(out_BTHD.flatten(2)), (0, 0, shift, shift))
    if due.rows.stop < state.num_tokens:  # what is carried to the next layer sees all keys, which the last tile has
        return out_BTM, torch.zeros_like(global_hidden_states), None
    assert state.k_BKSD is not None
    assert state.v_BKSD is not None
    rule = SourceRule(scale=module.scaling, is_padding_BS=state.is_padding_BS, beside=beside)
    carried_BHGD = attend(heads(module.q_proj, global_hidden_states), state.k_BKSD, state.v_BKSD, 0, rule)
    return out_BTM, module.out_proj(carried_BHGD.transpose(1, 2).flatten(2)), None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAttention:
    """How a module that attends by itself is stood in for."""

    forward: Callable[..., Any]
    is_carried: bool = False  # layers hand on states of their own beside the rows


OWN_ATTENTIONS = {
    "LEDEncoderSelfAttention": OwnAttention(forward=_led),
    "LongT5LocalAttention": OwnAttention(forward=_long_t5),
    "LongT5TransientGlobalAttention": OwnAttention(forward=_long_t5),
    "PegasusXGlobalLocalAttention": OwnAttention(forward=_pegasus_x, is_carried=True),
}
