"""Which matrices are kept in few bits, in which types of GGUF, and what they take. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import IQ4_NL, MXFP4

from penstock.models.files import ModelFiles
from penstock.models.gguf_translation import hf_tensors
from penstock.models.projections import (
    EXPERT_ROLES,
    LANES,
    OUTSIDE_LAYERS,
    RECURRENT_ROLES,
    SHARED_ROLES,
    Projection,
    projections,
)
from penstock.models.spec import DecoderSpec

GROUP = 32  # inputs that share a scale, or two
HALF_GROUP = 16
REGION = 256  # inputs of groups that share their factors
CARD_GROUP = 128  # inputs of codes that a card reads together, and a last group is filled up
GROUP_SUM_BYTES = 4  # of inputs that share a lowest value, in float32
TILE_VALUES = 2**21  # of a matrix, dequantized at a time where no C kernels multiply its codes
FLOATS = frozenset({Type.F64, Type.F32, Type.F16, Type.BF16})
STORED_TOGETHER = (
    {"q_proj", "k_proj", "v_proj", "qkv_proj"},
    {"gate_proj", "up_proj", "gate_up_proj"},
    {"embed_tokens", "lm_head"},
)
MIXTURE = "experts"  # in names
# Of a checkpoint that is packed as it is read: what is not one matrix under one name, and small ones.
ASKED_IN_DTYPE = (*EXPERT_ROLES, *SHARED_ROLES, *RECURRENT_ROLES)
ASKED = {"int8": Type.Q8_0, "int4": Type.Q4_1}

_Fields = tuple[tuple[str, str, tuple[int, ...]], ...]
HALF: _Fields = (("scale", "<f2", ()),)
HALF_LOWEST: _Fields = (*HALF, ("lowest", "<f2", ()))
POWER: _Fields = (("power", "u1", ()),)
BYTE: _Fields = (*HALF, ("scales", "i1", (8,)))
BYTE_PAIR: _Fields = (*HALF, ("scales", "i1", (8, 2)))
SIXES: _Fields = (("low", "u1", (8,)), ("high", "u1", (4,)))  # two numbers of six bits for each group
SIX_PAIR: _Fields = (*HALF, *SIXES)
SIX_LOWEST: _Fields = (*HALF_LOWEST, *SIXES)
FOUR_LOWEST: _Fields = (*HALF_LOWEST, ("scale_pairs", "u1", (8,)), ("lowest_pairs", "u1", (8,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Says how a type is kept: 16 outputs side by side, in sets of codes and their factors; see blocks.h."""

    low: int  # bits of the first plane of codes
    high: int = 0  # and of the second
    offset: int = 0  # what a code stands for is less by this
    book: tuple[int, ...] = ()  # what codes stand for, where it is not themselves
    factors: _Fields = HALF

    @property
    def bits(self) -> int:
        return self.low + self.high

    @property
    def num_inputs(self) -> int:
        """Counts the inputs of one set of factors."""
        return GROUP if self.factors in (HALF, HALF_LOWEST, POWER) else REGION

    def factor_dtype(self, *lanes: int) -> np.dtype[Any]:
        return np.dtype([(name, kind, (*shape, *lanes)) for name, kind, shape in self.factors])

    def set_dtype(self) -> np.dtype[Any]:
        """Gives 16 outputs of the inputs of one set of factors."""
        words = {2: (2, LANES, 2), 4: (4, LANES, 2), 8: (GROUP // 2, LANES, 2)}[self.low]
        planes = [("low", "u1" if self.low == 8 else "<u2", words)]
        planes += [("high", "<u2", (self.high, LANES, 2))] if self.high else []
        codes = np.dtype((np.dtype(planes), (self.num_inputs // GROUP,)))
        return np.dtype([("codes", codes), ("factors", self.factor_dtype(LANES))])


LAYOUTS: Mapping[Type, Layout] = {
    Type.Q4_0: Layout(low=4, offset=8),
    Type.Q4_1: Layout(low=4, factors=HALF_LOWEST),
    Type.Q5_0: Layout(low=4, high=1, offset=16),
    Type.Q5_1: Layout(low=4, high=1, factors=HALF_LOWEST),
    Type.Q8_0: Layout(low=8),
    Type.Q2_K: Layout(low=2, factors=FOUR_LOWEST),
    Type.Q3_K: Layout(low=2, high=1, offset=4, factors=SIX_PAIR),
    Type.Q4_K: Layout(low=4, factors=SIX_LOWEST),
    Type.Q5_K: Layout(low=4, high=1, factors=SIX_LOWEST),
    Type.Q6_K: Layout(low=4, high=2, offset=32, factors=BYTE_PAIR),
    Type.IQ4_NL: Layout(low=4, book=IQ4_NL.kvalues),
    Type.IQ4_XS: Layout(low=4, book=IQ4_NL.kvalues, factors=BYTE),
    Type.MXFP4: Layout(low=4, book=MXFP4.kvalues, factors=POWER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Rows of a tensor that are stored in one type."""

    kind: Type
    rows_N: np.ndarray | slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Types by tensor, as a GGUF stores them, or one for all."""

    asked: Type | None  # None: the file's own
    stored: Mapping[str, tuple[StoredRows, ...]]  # of matrices that are not floats
    columns: Mapping[str, np.ndarray]  # of matrices whose inputs are stored in an order of their own
    on_card: bool = False  # experts alone, in MXFP4

    def types(self, projection: Projection) -> tuple[tuple[Type, int], ...] | None:
        """Gives (type, outputs) of what lies one below the other; None: the matrix stays in the model's dtype."""
        if self.on_card:
            return ((Type.MXFP4, projection.num_outputs),) if projection.role in EXPERT_ROLES else None
        if self.asked is not None:
            kind = Type.Q8_0 if projection.role in OUTSIDE_LAYERS else self.asked
            runs = None if projection.role in ASKED_IN_DTYPE else [(0, projection.num_outputs, kind)]
        else:
            runs = self._runs(projection)
        if runs is None or any(projection.num_inputs % LAYOUTS[kind].num_inputs for _, _, kind in runs):
            return None
        starts = [first for first, _, _ in runs]
        cuts = sorted({*starts, *projection.apart})
        pieces = [(runs[bisect_right(starts, first) - 1][2], first, end) for first, end in pairwise(cuts)]
        found: list[tuple[Type, int]] = []
        for kind, first, end in pieces:
            if found and found[-1][0] == kind and first not in projection.apart:
                found[-1] = (kind, found[-1][1] + end - first)
            else:
                found.append((kind, end - first))
        return tuple(found)

    def _runs(self, projection: Projection) -> list[tuple[int, int, Type]] | None:
        """Finds (first output, the one after the last, type) in order; None where types are mixed row by row."""
        runs = []
        for part, outputs_N in projection.outputs:
            for stored in self.stored.get(part.name, ()):
                if stored.kind not in LAYOUTS:
                    return None
                rows_N = outputs_N[stored.rows_N]
                runs.append((int(rows_N.min()), int(rows_N.max()) + 1, stored.kind))
            if part.name not in self.stored:
                return None
        runs.sort(key=lambda run: run[0])
        return None if any(before[1] > after[0] for before, after in pairwise(runs)) else runs

    def order(self, projection: Projection) -> np.ndarray | None:
        """Gives the order in which inputs are stored; None: their own."""
        return None if self.asked is not None else self.columns.get(projection.parts[0].name)


def quantization_of(files: ModelFiles, quantize: str, device: str = "cpu") -> Quantization | None:
    """`quantize` is none, keep, int8 or int4; None where nothing is quantized."""
    if quantize == "none":
        return None
    if device == "cuda":
        return Quantization(asked=None, stored={}, columns={}, on_card=True)
    if quantize != "keep":
        return Quantization(asked=ASKED[quantize], stored={}, columns={})
    stored, columns = _stored(files)
    return Quantization(asked=None, stored=stored, columns=columns) if stored else None


def stored_types(files: ModelFiles) -> dict[str, tuple[StoredRows, ...]]:
    """Finds the matrices that a GGUF keeps in few bits."""
    return _stored(files)[0]


def has_codes_for_card(files: ModelFiles) -> bool:
    """Tells whether experts are in MXFP4, all of a layer in one tensor: what kernels of a card multiply as it lies."""
    method = (files.config.get("quantization_config") or {}).get("quant_method")
    if files.config.get("model_type") != "gpt_oss" or MIXTURE in _changed_leaves(files):
        return False
    if files.gguf is None:
        return method == "mxfp4"
    kinds = {rows.kind for name, types in stored_types(files).items() if ".experts." in name for rows in types}
    return kinds == {Type.MXFP4}


def _stored(files: ModelFiles) -> tuple[dict[str, tuple[StoredRows, ...]], dict[str, np.ndarray]]:
    """What an adapter changes can be packed again as Q8_0 alone; mixtures that it changes are expanded."""
    found: dict[str, tuple[StoredRows, ...]] = {}
    columns: dict[str, np.ndarray] = {}
    if files.gguf is None:
        return found, columns
    changed = _changed_leaves(files)
    for name, tensor in hf_tensors(files.gguf).items():
        kinds = {piece.stored.quant_type for piece in tensor.pieces}
        is_mixture = len(tensor.shape) == 3 or ".experts." in name
        if len(tensor.shape) < 2 or kinds & FLOATS or (is_mixture and MIXTURE in changed):
            continue
        is_changed = name.removesuffix(".weight").rpartition(".")[2] in changed
        found[name] = tuple(
            StoredRows(kind=Type.Q8_0 if is_changed else piece.stored.quant_type, rows_N=piece.rows)
            for piece in tensor.pieces
        )
        if tensor.pieces[0].columns is not None and not is_changed:
            columns[name] = tensor.pieces[0].columns
    return found, columns


def _changed_leaves(files: ModelFiles) -> set[str]:
    """Names the matrices that an adapter changes, as layers call them, and those that they may be stored within."""
    if files.adapter is None:
        return set()
    places = [*files.adapter.low_rank, *(name.removesuffix(".weight") for name in files.adapter.replaced)]
    leaves = {place.rpartition(".")[2] for place in places}
    leaves |= {MIXTURE} & {part for place in places for part in place.split(".")}
    return leaves.union(*(whole for whole in STORED_TOGETHER if leaves & whole))


def expanded_types(files: ModelFiles) -> list[str]:
    """Names the types of a GGUF whose codes nothing multiplies."""
    kinds = {stored.kind for types in stored_types(files).values() for stored in types}
    return sorted(kind.name for kind in kinds if kind not in LAYOUTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSizes:
    num_values: int
    num_bytes: int
    tile_values: int  # dequantized at a time
    most_halves: int  # of groups of the inputs of a matrix
    are_all: bool  # whether no matrix of a layer stays in the dtype
    has_experts: bool  # whether matrices of experts are among them


def quantized_sizes(spec: DecoderSpec, quantization: Quantization) -> QuantizedSizes:
    num_values = num_bytes = tile = most_halves = 0
    has_experts = False
    are_all = True
    for projection in projections(spec):
        if (types := quantization.types(projection)) is None:
            are_all = are_all and projection.role in OUTSIDE_LAYERS
            continue
        num_inputs, num_experts = projection.num_inputs, 1
        if projection.role in EXPERT_ROLES and spec.experts is not None:
            num_experts, has_experts = spec.experts.num_experts, True
        num_values += projection.num_outputs * num_inputs
        if quantization.on_card:
            group_bytes = CARD_GROUP // 2 + CARD_GROUP // GROUP
            num_bytes += projection.num_outputs * -(-num_inputs // CARD_GROUP) * group_bytes
            continue
        num_bytes += sum(matrix_bytes(kind, num_outputs, num_inputs) for kind, num_outputs in types)
        tile = max(tile, tile_outputs(projection.num_outputs // num_experts, num_inputs) * num_inputs)
        most_halves = max(most_halves, num_inputs // HALF_GROUP)
    return QuantizedSizes(
        num_values=num_values,
        num_bytes=num_bytes,
        tile_values=tile,
        most_halves=most_halves,
        are_all=are_all,
        has_experts=has_experts,
    )


def matrix_bytes(kind: Type, num_outputs: int, num_inputs: int) -> int:
    layout = LAYOUTS[kind]
    return -(-num_outputs // LANES) * (num_inputs // layout.num_inputs) * layout.set_dtype().itemsize


def tile_outputs(num_outputs: int, num_inputs: int) -> int:
    return min(num_outputs, max(1, TILE_VALUES // num_inputs // LANES) * LANES)
