"""Which matrices are kept in few bits, in which format, and what they take. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from gguf.constants import GGMLQuantizationType

from penstock.models.files import ModelFiles
from penstock.models.gguf_translation import hf_tensors
from penstock.models.projections import OUTSIDE_LAYERS, Projection, projections
from penstock.models.spec import DecoderSpec

GROUP = 32  # inputs that share a scale
GROUP_SUM_BYTES = 4  # of a row's inputs that share a scale, in float32
LANES = 16  # outputs that lie together
TILE_VALUES = 2**21  # of a matrix, dequantized at a time where no C kernels multiply its codes
FLOATS = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
IN_FOUR_BITS = frozenset({GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K})


class Format(Enum):
    """Codes of a group with a scale, and in four bits its lowest value too; both in float16."""

    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        return 8 if self is Format.INT8 else 4

    @property
    def group_bytes(self) -> int:
        return GROUP + 2 if self is Format.INT8 else GROUP // 2 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Formats by tensor, as a GGUF stores them, or one for all."""

    asked: Format | None  # None: the file's own
    stored: Mapping[str, Format]

    def format(self, projection: Projection) -> Format | None:
        """None: the matrix stays in the model's dtype. Parts of two formats are kept in the wider one."""
        if projection.num_inputs % GROUP:
            return None
        if self.asked is not None:
            return Format.INT8 if projection.role in OUTSIDE_LAYERS else self.asked
        formats = {self.stored.get(part.name) for part in projection.parts}
        if None in formats:
            return None
        return Format.INT8 if Format.INT8 in formats else Format.INT4


def quantization_of(files: ModelFiles, quantize: str) -> Quantization | None:
    """`quantize` is none, keep, int8 or int4; None where nothing is quantized."""
    if quantize == "none":
        return None
    if quantize != "keep":
        return Quantization(asked=Format(quantize), stored={})
    stored = stored_formats(files)
    return Quantization(asked=None, stored=stored) if stored else None


def stored_formats(files: ModelFiles) -> dict[str, Format]:
    """Chooses formats of matrices that a GGUF keeps in few bits: four where ours hold the same values, else eight."""
    if files.gguf is None:
        return {}
    return {
        name: Format.INT4 if types <= IN_FOUR_BITS else Format.INT8
        for name, tensor in hf_tensors(files.gguf).items()
        if not (types := {piece.stored.quant_type for piece in tensor.pieces}) & FLOATS and len(tensor.shape) == 2
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSizes:
    num_values: int
    num_bytes: int
    tile_values: int  # dequantized at a time
    most_groups: int  # of the inputs of a matrix
    are_all: bool  # whether no matrix of a layer stays in the dtype


def quantized_sizes(spec: DecoderSpec, quantization: Quantization) -> QuantizedSizes:
    num_values = num_bytes = tile = most_groups = 0
    are_all = spec.experts is None and spec.recurrent is None
    for projection in projections(spec):
        if (found := quantization.format(projection)) is None:
            are_all = are_all and projection.role in OUTSIDE_LAYERS
            continue
        num_values += projection.num_outputs * projection.num_inputs
        num_bytes += matrix_bytes(found, projection.num_outputs, projection.num_inputs)
        tile = max(tile, tile_outputs(projection.num_outputs, projection.num_inputs) * projection.num_inputs)
        most_groups = max(most_groups, projection.num_inputs // GROUP)
    return QuantizedSizes(
        num_values=num_values, num_bytes=num_bytes, tile_values=tile, most_groups=most_groups, are_all=are_all
    )


def matrix_bytes(quantized: Format, num_outputs: int, num_inputs: int) -> int:
    num_blocks = -(-num_outputs // LANES)
    return num_blocks * LANES * (num_inputs // GROUP) * quantized.group_bytes


def tile_outputs(num_outputs: int, num_inputs: int) -> int:
    return min(num_outputs, max(1, TILE_VALUES // num_inputs // LANES) * LANES)
