"""Recurrent layers on a GPU in a few kernels. Nothing is asked of the device, so that steps can be captured."""

# T tokens, H value heads, K key size, V value size, C channels, W width of the convolution, S slots

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from penstock.attention.chunk_tables import ChunkTables
from penstock.kernels import triton_recurrence
from penstock.kernels.overlap import overlap

if TYPE_CHECKING:
    from penstock.cache.storage import LayerState
    from penstock.models.delta import GatedDelta
    from penstock.models.layers import RmsNorm
    from penstock.models.mamba import Mamba

# Along a table: each takes several of its rows where there are more.
MAX_ROWS, MAX_SINGLES, MAX_PIECES, MAX_CHUNKS = 64, 32, 16, 4
GATED_VALUES = 2048
LEAST_SIZE = 16  # of a product


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTile:
    """Shapes one program: so many channels of the convolution, or columns of a head's matrix."""

    num_columns: int
    num_warps: int
    num_stages: int = 2

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


TILES = {
    "convolve singles": ColumnTile(num_columns=128, num_warps=1),
    "convolve": ColumnTile(num_columns=64, num_warps=8),
    "singles": ColumnTile(num_columns=32, num_warps=4),
    "pieces": ColumnTile(num_columns=64, num_warps=4),
    "chunks": ColumnTile(num_columns=32, num_warps=4),
    # Strict float32 has to fit into registers.
    "exact chunks": ColumnTile(num_columns=LEAST_SIZE, num_warps=8, num_stages=1),
}

_kernels: Any = triton_recurrence  # a launch has no type that a checker knows


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTokens:
    """What the convolution gave and the gates, and where queries, keys and values begin among its channels."""

    mixed_TC: torch.Tensor
    gates: torch.Tensor  # beta and alpha of each head, or its time step
    a_log_H: torch.Tensor
    bias_H: torch.Tensor
    skip_H: torch.Tensor | None
    q_at: int
    k_at: int
    v_at: int
    group: int  # of value heads that share queries and keys
    gate_group: int = 0  # of heads whose betas lie before their alphas; 0: there is no beta, and no delta rule
    scale: float = 1.0  # of queries, where they are normed
    time_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        return self.mixed_TC, self.gates, self.a_log_H, self.bias_H

    @property
    def limits(self) -> dict[str, Any]:
        return {"GATE_GROUP": self.gate_group, "LOW": self.time_limits[0], "HIGH": self.time_limits[1]}

    def shape(self, num_heads: int, key: int) -> dict[str, Any]:
        sizes = {"HEADS": num_heads, "GROUP": self.group, "KEY": key, "PADDED_KEY": _padded(key)}
        return sizes | {"NUM_CHANNELS": self.mixed_TC.shape[1], "Q_AT": self.q_at, "K_AT": self.k_at}


def gated_delta(layer: GatedDelta, x_TM: torch.Tensor, tables: ChunkTables, state: LayerState) -> torch.Tensor:
    """[T, value width]: what the output projection is given."""
    spec = layer.spec
    group, of_values = spec.num_value_heads // spec.num_key_heads, spec.value_width // spec.num_key_heads
    qkvz, beta_alpha = layer.qkvz(x_TM), layer.beta_alpha(x_TM)
    heads = (spec.num_key_heads, spec.key_size, of_values) if spec.is_grouped else (0, 0, 0)
    mixed_TC = convolve(qkvz, layer.conv_CW, None, tables, state.tails_SWC, heads=heads)
    tokens = MixedTokens(
        mixed_TC=mixed_TC, gates=beta_alpha, a_log_H=layer.a_log_H, bias_H=layer.dt_bias_H, skip_H=None, q_at=0,
        k_at=spec.key_width, v_at=2 * spec.key_width, group=group,
        gate_group=group if spec.is_grouped else spec.num_value_heads, scale=spec.key_size**-0.5,
    )  # fmt: skip
    read_THV = recur(tokens, tables, state.matrices_SHKV)
    step = 2 * spec.key_size + 2 * of_values
    z = qkvz[:, step - of_values :] if spec.is_grouped else qkvz[:, spec.num_channels :]
    places = (group, step) if spec.is_grouped else (spec.num_value_heads, 0)
    return gated(read_THV, z, layer.norm, x_TM.dtype, norms_first=True, z_places=places)


def mamba(layer: Mamba, projected: torch.Tensor, tables: ChunkTables, state: LayerState) -> torch.Tensor:
    """[T, inner width]: what the output projection is given."""
    spec = layer.spec
    gate_TI, channels_TC, steps_TH = projected.split([spec.inner_width, spec.num_channels, spec.num_heads], -1)
    tokens = MixedTokens(
        mixed_TC=convolve(channels_TC, layer.conv_CW, layer.conv_bias_C, tables, state.tails_SWC), gates=steps_TH,
        a_log_H=layer.a_log_H, bias_H=layer.dt_bias_H, skip_H=layer.skip_H, q_at=spec.inner_width + spec.group_width,
        k_at=spec.inner_width, v_at=0, group=spec.num_heads // spec.num_groups, time_limits=spec.time_step_limits,
    )  # fmt: skip
    read_TGI = recur(tokens, tables, state.matrices_SHKV).view(len(projected), spec.num_groups, -1)
    order, places = spec.norms_before_gate, (spec.num_groups, 0)
    return gated(read_TGI, gate_TI, layer.norm, projected.dtype, norms_first=order, z_places=places)


def convolve(
    x: torch.Tensor, conv_CW: torch.Tensor, bias_C: torch.Tensor | None, tables: ChunkTables, tails_SWC: torch.Tensor,
    *, activates: bool = True, heads: tuple[int, int, int] = (0, 0, 0),
) -> torch.Tensor:  # fmt: skip
    """[T, C]. `heads`: key heads, their size, and values of each, of inputs that are grouped by them."""
    num_channels, width = conv_CW.shape
    out_TC = torch.empty(len(x), num_channels, dtype=x.dtype, device=x.device)
    launches = (("convolve", tables.pieces_P4, 1, tables.piece), ("convolve singles", tables.singles_S4, 0, 1))
    for name, items, table, num_tokens in launches:
        if not len(items):
            continue
        tile = TILES[name]
        _kernels.convolve[(min(len(items), MAX_ROWS), triton.cdiv(num_channels, tile.num_columns))](
            x, conv_CW, bias_C, tails_SWC, out_TC, items, tables.chunks_C4, tables.count(table), x.stride(0),
            NUM_CHANNELS=num_channels, WIDTH=width, PADDED_TAIL=triton.next_power_of_2(width - 1), KEY_HEADS=heads[0],
            KEY=heads[1], VALUES=heads[2], ACTIVATES=activates, TOKENS=num_tokens, CHANNELS=tile.num_columns,
            **tile.launch, **overlap(len(x)),
        )  # fmt: skip
    return out_TC


def recur(tokens: MixedTokens, tables: ChunkTables, matrices_SHKV: torch.Tensor) -> torch.Tensor:
    """[T, H, V] in float32: what the tokens read; the matrices of the tables' slots advance in place."""
    num_tokens = len(tokens.mixed_TC)
    _, num_heads, key, value = matrices_SHKV.shape
    read_THV = matrices_SHKV.new_empty(num_tokens, num_heads, value)
    if len(tables.chunks_C4):
        _recur_in_pieces(tokens, tables, matrices_SHKV, read_THV)
    if len(tables.singles_S4):
        tile = TILES["singles"]
        values = min(tile.num_columns, _padded(value))
        programs = len(tables.singles_S4)
        if len(tables.chunks_C4):  # of which few may be there
            programs = min(programs, MAX_SINGLES)
        _kernels.advance_singles[(programs, num_heads, triton.cdiv(value, values))](
            *tokens.given, tokens.skip_H, matrices_SHKV, read_THV, tables.singles_S4, tables.count(0),
            tokens.gates.stride(0), tokens.scale, **tokens.shape(num_heads, key), **tokens.limits, VALUE=value,
            V_AT=tokens.v_at, VALUES=values, **tile.launch, **overlap(num_tokens),
        )  # fmt: skip
    return read_THV


def _recur_in_pieces(
    tokens: MixedTokens, tables: ChunkTables, matrices_SHKV: torch.Tensor, read_THV: torch.Tensor
) -> None:
    (num_tokens, num_heads, value), key = read_THV.shape, matrices_SHKV.shape[2]
    piece, is_exact = tables.piece, tokens.mixed_TC.dtype == torch.float32
    kept = (1 if is_exact else 2, num_tokens, num_heads, piece)  # in two parts that are narrower than float32
    seen_THP = tokens.mixed_TC.new_empty(kept)
    solved_THP = torch.empty_like(seen_THP) if tokens.gate_group else seen_THP
    factors_TH4 = read_THV.new_empty(num_tokens, num_heads, 4)
    shape = tokens.shape(num_heads, key) | {"PIECE": piece}
    _kernels.solve_pieces[(min(len(tables.pieces_P4), MAX_PIECES), num_heads)](
        *tokens.given, seen_THP, solved_THP, factors_TH4, tables.pieces_P4, tables.count(1), tokens.gates.stride(0),
        seen_THP.stride(0), tokens.scale, **shape, **tokens.limits, LEVELS=piece.bit_length() - 1,
        **TILES["pieces"].launch,
    )  # fmt: skip
    tile = TILES["exact chunks" if is_exact else "chunks"]
    values = min(tile.num_columns, _padded(value))
    _kernels.advance_chunks[(min(len(tables.chunks_C4), MAX_CHUNKS), num_heads, triton.cdiv(value, values))](
        tokens.mixed_TC, tokens.skip_H, matrices_SHKV, seen_THP, solved_THP, factors_TH4, read_THV, tables.chunks_C4,
        tables.count(2), seen_THP.stride(0), **shape, VALUE=value, V_AT=tokens.v_at, IS_DELTA=tokens.gate_group > 0,
        VALUES=values, **tile.launch,
    )  # fmt: skip


def gated(
    read_TGV: torch.Tensor, z: torch.Tensor, norm: RmsNorm | None, dtype: torch.dtype,
    *, norms_first: bool, z_places: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """[T, G x V]: normed by group, and gated. `z_places`: groups of z that lie together, and how far the next are."""
    num_tokens, num_groups, width = read_TGV.shape
    out = torch.empty(num_tokens, num_groups * width, dtype=dtype, device=read_TGV.device)
    padded = triton.next_power_of_2(width)
    rows = max(1, GATED_VALUES // padded)
    _kernels.gate[(triton.cdiv(num_tokens * num_groups, rows),)](
        read_TGV, z, None if norm is None else norm.weight, out, num_tokens * num_groups, z.stride(0),
        0.0 if norm is None else norm.eps, GROUPS=num_groups, WIDTH=width, PADDED_WIDTH=padded, Z_GROUPS=z_places[0],
        Z_STEP=z_places[1], SHARES_WEIGHT=norm is not None and len(norm.weight) == width, NORMS_FIRST=norms_first,
        ROWS=rows, **overlap(num_tokens),
    )  # fmt: skip
    return out


def _padded(size: int) -> int:
    return max(LEAST_SIZE, triton.next_power_of_2(size))
