"""A mixture of experts on a GPU in a few kernels. Nothing is asked of the device, so that steps can be captured."""

# T tokens, R rows (a token once for each of its experts), E experts, A experts of a token, M hidden size, F inner size

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton

from penstock.kernels import triton_experts
from penstock.kernels.overlap import overlap
from penstock.kernels.triton_layers import KINDS
from penstock.models.mxfp4 import Mxfp4Matrices
from penstock.models.quantization import CARD_GROUP

if TYPE_CHECKING:
    from penstock.models.experts import Experts
    from penstock.models.quantized import Weight

ROUTED_TOKENS = 4  # of one program: each has a warp
SUMMED_VALUES = 1024
SORTED_ROWS = (128, 1024, 4096)  # that one program looks at together
MAX_ALONE = 2  # tokens whose rows are multiplied one by one; beyond, they are likely to share experts
HOPPER_SHARED_BYTES = 232_448

_kernels: Any = triton_experts  # a launch has no type that a checker knows


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    """Shapes one program: that many outputs, of every row of a tile; columns are those of the weights at a time."""

    num_outs: int
    num_columns: int
    num_warps: int
    num_stages: int

    @property
    def launch(self) -> dict[str, int]:
        sizes = {"OUTS": self.num_outs, "COLUMNS": self.num_columns}
        return sizes | {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    num_rows: int
    gate_up: ProductTile
    down: ProductTile


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Experts of each token, the likeliest first, and their weights in float32."""

    experts_TA: torch.Tensor
    weights_TA: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    order_R: torch.Tensor  # rows by expert; experts of rows where there are no tiles
    tiles: torch.Tensor | None  # how many there are, and then each; None: each row is one
    rows_of_tile: int


def tile_shapes(
    num_rows: int, num_experts: int, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED_BYTES
) -> ExpertTiles:
    """Chooses tiles for that many rows over all experts. `shared_bytes`: of a multiprocessor, for one program."""
    if dtype == torch.float32:  # strict float32 has no tensor cores; small tiles keep it in registers
        tile = ProductTile(num_outs=32, num_columns=32, num_warps=4, num_stages=1)
        return ExpertTiles(num_rows=16, gate_up=tile, down=tile)
    rows_of_one = num_rows / num_experts
    if rows_of_one <= 12:  # they wait for memory
        few = ProductTile(num_outs=64, num_columns=128, num_warps=4, num_stages=3)
        tiles = ExpertTiles(num_rows=16, gate_up=few, down=replace(few, num_stages=4))
    elif rows_of_one <= 48:
        some = ProductTile(num_outs=64, num_columns=64, num_warps=4, num_stages=4)
        tiles = ExpertTiles(num_rows=32 if rows_of_one <= 24 else 64, gate_up=some, down=replace(some, num_outs=128))
    else:
        many = ProductTile(num_outs=128, num_columns=64, num_warps=8, num_stages=4)
        if rows_of_one > 256:
            many = replace(many, num_columns=32, num_stages=5)
        down = ProductTile(num_outs=128, num_columns=64, num_warps=4, num_stages=3)
        tiles = ExpertTiles(num_rows=128, gate_up=many, down=down)
    gate_up = _fitting(tiles.gate_up, tiles.num_rows, 2, shared_bytes)
    return replace(tiles, gate_up=gate_up, down=_fitting(tiles.down, tiles.num_rows, 1, shared_bytes))


def coded_tile_shapes(
    num_rows: int, num_experts: int, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED_BYTES
) -> ExpertTiles:
    """Chooses tiles for weights in MXFP4, of which a program reads 128 columns at a time."""
    if dtype == torch.float32:
        tile = ProductTile(num_outs=32, num_columns=CARD_GROUP, num_warps=4, num_stages=1)
        return ExpertTiles(num_rows=16, gate_up=tile, down=tile)
    rows_of_one = num_rows / num_experts
    few = ProductTile(num_outs=64, num_columns=CARD_GROUP, num_warps=4, num_stages=4)
    rows, gate_up, down = 128, replace(few, num_outs=128, num_warps=8, num_stages=3), replace(few, num_stages=3)
    if rows_of_one <= 48:
        rows, gate_up, down = (16 if rows_of_one <= 12 else 32 if rows_of_one <= 24 else 64), few, few
    gate_up, down = (
        replace(_fitting(tile, rows, num_weights, shared_bytes), num_columns=CARD_GROUP)
        for num_weights, tile in ((2, gate_up), (1, down))
    )
    return ExpertTiles(num_rows=rows, gate_up=gate_up, down=down)


def _fitting(tile: ProductTile, num_rows: int, num_weights: int, shared_bytes: int) -> ProductTile:
    """The tile, or a smaller one where the card has less room for rows and weights that are on their way."""
    for smaller in ({"num_stages": 3}, {"num_stages": 2}, {"num_outs": 64}, {"num_outs": 32}, {"num_columns": 32}):
        if 2 * tile.num_columns * (num_rows + num_weights * tile.num_outs) * tile.num_stages <= shared_bytes:
            break
        tile = replace(tile, **{name: min(value, getattr(tile, name)) for name, value in smaller.items()})
    return tile


def most_tiles(num_rows: int, num_experts: int, rows_of_tile: int) -> int:
    """However the rows lie: full tiles, and one of each expert that is not."""
    return min(num_rows, num_rows // rows_of_tile + num_experts)


def mixed(experts: Experts, x_TM: torch.Tensor) -> torch.Tensor:
    out_TM = torch.empty_like(x_TM)
    _mix(experts, out_TM, x_TM, adds=False)
    return out_TM


def add_mixed(experts: Experts, out_TM: torch.Tensor, x_TM: torch.Tensor) -> None:
    _mix(experts, out_TM, x_TM, adds=True)


def _mix(experts: Experts, out_TM: torch.Tensor, x_TM: torch.Tensor, *, adds: bool) -> None:
    assert x_TM.is_contiguous()
    assert out_TM.is_contiguous()
    if not len(x_TM):
        return
    is_alone = len(x_TM) <= MAX_ALONE
    routed = route(experts, x_TM, None if is_alone else experts.num_real_1)
    shared = ()
    if experts.shared is not None and experts.shared_gate is not None:
        shared = (experts.shared(x_TM), experts.shared_gate(x_TM))
    if is_alone and isinstance(experts.gate_up, torch.Tensor):
        down_alone(experts, out_TM, gate_up_alone(experts, x_TM, routed), routed, adds=adds)
        if shared:
            sum_parts(out_TM, None, *shared, adds=True)
    else:
        sum_parts(out_TM, _parts(experts, x_TM, routed), *shared, adds=adds)
    if experts.shared is not None and not shared:
        experts.shared.add_to(out_TM, x_TM)


def route(experts: Experts, x_TM: torch.Tensor, num_real_1: torch.Tensor | None = None) -> Routed:
    """`num_real_1`: tokens past that number are padding and get no expert; None: there are none."""
    spec, num_tokens = experts.spec, len(x_TM)
    if spec.sigmoid is not None:
        weights_TA, experts_TA = experts.route(x_TM)
        if num_real_1 is not None:
            is_padding_T = torch.arange(num_tokens, device=x_TM.device) >= num_real_1
            experts_TA = experts_TA.masked_fill(is_padding_T[:, None], spec.num_experts)
        return Routed(experts_TA=experts_TA.int(), weights_TA=weights_TA.float())
    shape = (num_tokens, spec.num_active)
    experts_TA = torch.empty(shape, dtype=torch.int32, device=x_TM.device)
    weights_TA = torch.empty(shape, dtype=torch.float32, device=x_TM.device)
    _kernels.route[(triton.cdiv(num_tokens, ROUTED_TOKENS),)](
        experts.logits(x_TM),
        num_real_1,
        experts_TA,
        weights_TA,
        num_tokens,
        NUM_EXPERTS=spec.num_experts,
        PADDED_EXPERTS=triton.next_power_of_2(spec.num_experts),
        NUM_ACTIVE=spec.num_active,
        PADDED_ACTIVE=triton.next_power_of_2(spec.num_active),
        NORMALIZES=spec.normalizes_chosen,
        TOKENS=ROUTED_TOKENS,
        **overlap(num_tokens),
    )
    return Routed(experts_TA=experts_TA, weights_TA=experts.scaled(weights_TA, experts_TA))


def _parts(experts: Experts, x_TM: torch.Tensor, routed: Routed) -> torch.Tensor:
    """[T, A, M]: what each expert of a token gives, weighted."""
    num_rows = routed.experts_TA.numel()
    choose = coded_tile_shapes if isinstance(experts.gate_up, Mxfp4Matrices) else tile_shapes
    tiles = choose(num_rows, experts.spec.num_experts, x_TM.dtype, _shared_bytes(x_TM.device))
    if len(x_TM) <= MAX_ALONE:
        placed = Sorted(order_R=routed.experts_TA.flatten(), tiles=None, rows_of_tile=tiles.num_rows)
    else:
        placed = sort(routed, experts.spec.num_experts, tiles.num_rows)
    inner_RF = gate_up_tiles(experts, x_TM, placed, tiles.gate_up)
    return down_tiles(experts, inner_RF, routed, placed, tiles.down)


def sort(routed: Routed, num_experts: int, rows_of_tile: int) -> Sorted:
    num_rows, device = routed.experts_TA.numel(), routed.experts_TA.device
    num_places = 1 + most_tiles(num_rows, num_experts, rows_of_tile)
    placed = Sorted(
        order_R=torch.empty(num_rows, dtype=torch.int32, device=device),
        tiles=torch.empty(num_places, triton_experts.TILE_INTS.value, dtype=torch.int32, device=device),
        rows_of_tile=rows_of_tile,
    )
    chunk = next((size for size in SORTED_ROWS if size >= num_rows), SORTED_ROWS[-1])
    _kernels.sort[(num_experts,)](
        routed.experts_TA,
        placed.order_R,
        placed.tiles,
        num_rows,
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        ROWS=rows_of_tile,
        CHUNK=chunk,
        **overlap(len(routed.experts_TA)),
        num_warps=8 if chunk > SORTED_ROWS[1] else 4,
    )
    return placed


def gate_up_tiles(experts: Experts, x_TM: torch.Tensor, placed: Sorted, tile: ProductTile) -> torch.Tensor:
    """[R, F], in the order of the sorted rows."""
    inner_RF = x_TM.new_empty(len(placed.order_R), experts.spec.intermediate_size)
    weights = (*_matrices(experts.gate_up), experts.gate_up_bias_EF, None)
    _multiply(x_TM, weights, inner_RF, placed, tile, _gate_up_options(experts), len(x_TM))
    return inner_RF


def down_tiles(
    experts: Experts, inner_RF: torch.Tensor, routed: Routed, placed: Sorted, tile: ProductTile
) -> torch.Tensor:
    """[T, A, M], in the order of the tokens."""
    parts_TAM = inner_RF.new_empty(*routed.experts_TA.shape, experts.down.shape[1])
    weights = (*_matrices(experts.down), experts.down_bias_EM, routed.weights_TA)
    _multiply(inner_RF, weights, parts_TAM, placed, tile, _down_options(experts), len(parts_TAM))
    return parts_TAM


def _multiply(
    rows: torch.Tensor,
    weights: tuple[torch.Tensor | None, ...],
    out: torch.Tensor,
    placed: Sorted,
    tile: ProductTile,
    options: dict[str, Any],
    num_tokens: int,
) -> None:
    num_blocks = triton.cdiv(out.shape[-1], tile.num_outs)
    num_tiles = len(placed.order_R) if placed.tiles is None else len(placed.tiles) - 1
    _kernels.multiply_tiles[(num_tiles * num_blocks,)](
        rows,
        *weights,
        out,
        placed.order_R,
        placed.tiles,
        **options,
        ROWS=placed.rows_of_tile,
        PACKED=rows.dtype == torch.bfloat16 and torch.version.hip is None,
        **tile.launch,
        **overlap(num_tokens),
    )


def sum_parts(
    out_TM: torch.Tensor,
    parts_TAM: torch.Tensor | None,
    shared_TM: torch.Tensor | None = None,
    shared_gate_T1: torch.Tensor | None = None,
    *,
    adds: bool,
) -> None:
    num_tokens, width = out_TM.shape
    _kernels.sum_parts[(num_tokens, triton.cdiv(width, SUMMED_VALUES))](
        parts_TAM,
        shared_TM,
        shared_gate_T1,
        out_TM,
        WIDTH=width,
        NUM_PARTS=0 if parts_TAM is None else parts_TAM.shape[1],
        ADDS=adds,
        VALUES=SUMMED_VALUES,
        **overlap(num_tokens),
    )


def gate_up_alone(
    experts: Experts, x_TM: torch.Tensor, routed: Routed, tile: ProductTile | None = None
) -> torch.Tensor:
    """[R, F], in the order of the tokens."""
    num_rows, inner_size = routed.experts_TA.numel(), experts.spec.intermediate_size
    tile = tile or alone_tiles(x_TM.shape[1], inner_size, experts.spec.num_active)[0]
    inner_RF = torch.empty(num_rows, inner_size, dtype=x_TM.dtype, device=x_TM.device)
    _kernels.gate_up_alone[(triton.cdiv(inner_size, tile.num_outs), num_rows)](
        x_TM,
        experts.gate_up_EFM,
        experts.gate_up_bias_EF,
        routed.experts_TA,
        inner_RF,
        **_gate_up_options(experts),
        **tile.launch,
        **overlap(len(x_TM)),
    )
    return inner_RF


def down_alone(
    experts: Experts,
    out_TM: torch.Tensor,
    inner_RF: torch.Tensor,
    routed: Routed,
    tile: ProductTile | None = None,
    *,
    adds: bool,
) -> None:
    num_tokens, width = out_TM.shape
    num_active = experts.spec.num_active
    tile = tile or alone_tiles(width, inner_RF.shape[1], num_active)[1]
    _kernels.down_alone[(triton.cdiv(width, tile.num_outs), num_tokens)](
        inner_RF,
        experts.down_EMF,
        experts.down_bias_EM,
        routed.experts_TA,
        routed.weights_TA,
        out_TM,
        NUM_ACTIVE=num_active,
        PADDED_ACTIVE=triton.next_power_of_2(num_active),
        NUM_IN=inner_RF.shape[1],
        NUM_OUT=width,
        ADDS=adds,
        **tile.launch,
        **overlap(num_tokens),
    )


def alone_tiles(width: int, inner_size: int, num_active: int) -> tuple[ProductTile, ProductTile]:
    """Chooses (gate and up, down) of rows on their own: what a program has on its way is enough; programs are many."""
    padded_active = triton.next_power_of_2(num_active)
    columns = min(2048, triton.next_power_of_2(width))
    gate_up = ProductTile(num_outs=2, num_columns=columns, num_warps=4, num_stages=1)
    columns = min(256, triton.next_power_of_2(inner_size))
    outs = max(1, 4096 // (padded_active * columns))
    return gate_up, ProductTile(num_outs=min(outs, 8), num_columns=columns, num_warps=4, num_stages=1)


def _matrices(weight: Weight | Mxfp4Matrices) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gives (values, None), or (codes, their factors)."""
    if isinstance(weight, Mxfp4Matrices):
        return weight.words_EGOW, weight.factors_EGO
    assert isinstance(weight, torch.Tensor), "other codes are multiplied on a CPU alone"
    return weight, None


def _gate_up_options(experts: Experts) -> dict[str, Any]:
    spec = experts.spec
    is_clamped = spec.clamp is not None
    alternates = is_clamped and isinstance(experts.gate_up, torch.Tensor)
    return {
        "NUM_ACTIVE": spec.num_active,
        "NUM_IN": experts.router.weight_OI.shape[1],
        "NUM_OUT": spec.intermediate_size,
        "STEP": 2 if alternates else 1,
        "UP": 1 if alternates else spec.intermediate_size,
        "KIND": triton_experts.CLAMPED.value if is_clamped else KINDS[experts.activation],
        "LIMIT": spec.clamp or 0.0,
        "ALPHA": spec.clamp_alpha,
    }


def _down_options(experts: Experts) -> dict[str, Any]:
    sizes = {"NUM_ACTIVE": experts.spec.num_active, "NUM_IN": experts.spec.intermediate_size}
    sizes["NUM_OUT"] = experts.router.weight_OI.shape[1]
    return sizes | {"STEP": 1, "UP": 0, "KIND": 0, "LIMIT": 0.0, "ALPHA": 0.0}


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
