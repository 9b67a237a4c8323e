"""Weights: safetensors and GGUF read into existing parameters, a slice at a time, without mapping files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.kernels.calls import c_kernels
from penstock.models.files import ModelFiles
from penstock.models.gguf import GgufFile
from penstock.models.gguf_blocks import from_gguf
from penstock.models.gguf_translation import HfTensor, Piece, hf_tensors
from penstock.models.groups import grouped
from penstock.models.mxfp4 import Mxfp4Matrices, mxfp4_values
from penstock.models.quantization import GROUP
from penstock.models.quantized import QuantizedRows
from penstock.models.safetensors import StoredTensor, read_safetensors_header
from penstock.models.stored_names import SCALES

SLICE_BYTES = 2 << 20  # of values as they are read or dequantised; a multiple of every block
SMALL_BYTES = 1 << 20  # of a tensor, behind which nothing is read ahead
FULL_PRECISION = frozenset({"F32", "F64"})
FLOATS = frozenset({"F16", "BF16", *FULL_PRECISION})


Destination = torch.Tensor | QuantizedRows | Mxfp4Matrices
StoredRun = tuple[Path, int, int]  # a file, the first byte, and how many


class WeightSource(Protocol):
    """Tensors under their Hugging Face names. `quantization` is the type that most values are stored in."""

    @property
    def names(self) -> frozenset[str]: ...

    @property
    def quantization(self) -> str: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        """Fills `destination`, of any float type and maybe a slice of a larger parameter, with the tensor."""

    def quantize_into(self, destination: QuantizedRows, name: str) -> None:
        """Fills `destination`, rows of a matrix that is kept in few bits, with the tensor."""

    def codes_into(self, destination: Mxfp4Matrices, name: str) -> None:
        """Fills `destination` with a mixture's matrices, which are stored in MXFP4."""

    def stored_runs(self, name: str, destination: torch.Tensor) -> list[StoredRun] | None:
        """Finds the bytes that would fill `destination`, one after another; None where they are not stored as such."""


def fill(source: WeightSource, destination: Destination, name: str) -> None:
    if isinstance(destination, QuantizedRows):
        source.quantize_into(destination, name)
    elif isinstance(destination, Mxfp4Matrices):
        source.codes_into(destination, name)
    else:
        source.copy_into(destination, name)


def open_weights(files: ModelFiles) -> WeightSource:
    if files.gguf is not None:
        return GgufWeights(files.gguf)
    quantization = files.config.get("quantization_config")
    blocks = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    return SafetensorsWeights(files.weight_files, scale_block=tuple(blocks) if blocks else FP8_BLOCK)


# --- what both sources share --------------------------------------------------------------------------------


def _read_into(path: Path, offset: int, values: torch.Tensor) -> None:
    """Positioned reads straight into the memory of a contiguous tensor."""
    if not values.numel():
        return
    memory = memoryview(values.reshape(-1).view(torch.uint8).numpy())
    try:
        with path.open("rb", buffering=0) as file:
            if len(memory) < SMALL_BYTES and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # what lies behind it may not be wanted
            done = 0
            while done < len(memory):
                count = os.preadv(file.fileno(), [memory[done:]], offset + done)
                if count == 0:
                    raise InvalidModelFile(
                        f"{path} ends at byte {offset + done}, before {offset + len(memory)}; download it again."
                    )
                done += count
    except OSError as error:
        raise InvalidModelFile(f"{path} cannot be read: {error.strerror}; check its permissions.") from error


def _check_destination(destination: torch.Tensor, shape: tuple[int, ...], name: str, path: Path) -> None:
    _check_shape(tuple(destination.shape), shape, name, path)
    assert destination.is_floating_point(), destination.dtype


def _check_shape(asked: tuple[int, ...], stored: tuple[int, ...], name: str, path: Path) -> None:
    if asked != stored:
        raise InvalidModelFile(
            f"{path}: tensor {name!r} has shape {stored}, the model's config asks for "
            f"{asked}; take config and weights from the same model."
        )


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _slices(
    destination: torch.Tensor, start: int, item_bytes: int, multiple: int
) -> Iterable[tuple[torch.Tensor, int]]:
    """Cuts along the first dimension into (part, index of its first value), each of at most SLICE_BYTES.

    A row beyond that is cut within; `multiple` rows of the first dimension stay together.
    """
    row_items = prod(destination.shape[1:])
    num_rows = SLICE_BYTES // max(1, row_items * item_bytes) // multiple * multiple
    if num_rows == 0 and multiple == 1 and destination.dim() > 1:
        for index, row in enumerate(destination):
            yield from _slices(row, start + index * row_items, item_bytes, 1)
        return
    for part in destination.split(max(num_rows, multiple)) if destination.dim() else [destination]:
        yield part, start
        start += part.numel()


class ChangedWeights:
    """A source some of whose tensors are changed on their way; the others are read as they lie."""

    def __init__(self, source: WeightSource, changed: frozenset[str]) -> None:
        self.source, self.changed = source, changed
        self.names, self.quantization = source.names, source.quantization

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def codes_into(self, destination: Mxfp4Matrices, name: str) -> None:
        self.source.codes_into(destination, name)  # codes are never changed: what changes experts has them expanded

    def stored_runs(self, name: str, destination: torch.Tensor) -> list[StoredRun] | None:
        return None if name in self.changed else self.source.stored_runs(name, destination)


class HalvesFirst(ChangedWeights):
    """A source whose queries and keys have rotated pairs side by side; it gives what is first in each pair before.

    `changed`: the tensors that have heads in their rows.
    """

    def __init__(self, source: WeightSource, changed: frozenset[str], *, head_size: int, num_rotated: int) -> None:
        """`num_rotated`: dimensions of a head."""
        super().__init__(source, changed)
        self._head_O = torch.arange(head_size)
        self._head_O[:num_rotated] = torch.arange(num_rotated).view(-1, 2).t().flatten()

    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        self.source.copy_into(destination, name)
        if name in self.changed:
            destination.copy_(destination[self._order(len(destination))])

    def quantize_into(self, destination: QuantizedRows, name: str) -> None:
        if name in self.changed:
            destination = destination.taking(self._order(self.shape(name)[0]).numpy())
        self.source.quantize_into(destination, name)

    def _order(self, num_rows: int) -> torch.Tensor:
        """Finds where each row is stored."""
        return (torch.arange(0, num_rows, len(self._head_O))[:, None] + self._head_O).flatten()


def _missing(name: str, where: object) -> InvalidModelFile:
    return InvalidModelFile(f"{where} has no tensor {name!r}; the file is incomplete or of another architecture.")


def _common_type(num_values: Counter[str]) -> str:
    """The type most values are in; a quantised one, if there is any, speaks for the file."""
    quantised = Counter({kind: count for kind, count in num_values.items() if kind not in FLOATS})
    return (quantised or num_values).most_common(1)[0][0] if num_values else "F32"


# --- safetensors --------------------------------------------------------------------------------------------

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
FP8_BLOCK = (128, 128)  # rows and columns that share a scale, where a config does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScales:
    """Holds the scales of a matrix, or of several of equal shape one below the other, whose blocks have one each."""

    scales_RC: torch.Tensor  # a row for each row of blocks
    num_rows: int  # of a matrix
    width: int  # of its rows
    rows: int  # of a block
    columns: int

    def scaled(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Float32 values of whole rows, of which the first is value number `start`."""
        width = self.width
        row_n = start // width + torch.arange(values.numel() // width)
        blocks_of_matrix = -(-self.num_rows // self.rows)
        block_n = row_n // self.num_rows * blocks_of_matrix + row_n % self.num_rows // self.rows
        scales = self.scales_RC[block_n].repeat_interleave(self.columns, dim=1)[:, :width]
        return values.float().view(-1, width) * scales


class SafetensorsWeights:
    """`scale_block`: rows and columns of a matrix in eight bits that share a scale."""

    def __init__(self, paths: Iterable[Path], *, scale_block: tuple[int, ...] = FP8_BLOCK) -> None:
        self._scale_block = scale_block
        self._tensors: dict[str, StoredTensor] = {}
        paths = tuple(paths)
        for path in paths:
            for name, tensor in read_safetensors_header(path).items():
                if name in self._tensors:
                    raise InvalidModelFile(
                        f"Tensor {name!r} is in both {self._tensors[name].path} and {path}; "
                        "remove the file that is not of this model."
                    )
                self._tensors[name] = tensor
        num_values: Counter[str] = Counter()
        for tensor in self._tensors.values():
            num_values[tensor.dtype] += prod(tensor.shape)
        self.names = frozenset(self._tensors)
        floats = {kind: count for kind, count in num_values.items() if kind in DTYPES}
        self.quantization = _common_type(Counter(floats or num_values))
        self._where = paths[0].parent if len(paths) > 1 else paths[0]

    def _find(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise _missing(name, self._where)
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    @torch.no_grad()
    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        if name not in self._tensors and f"{name}_blocks" in self._tensors:
            self._copy_mxfp4(destination.detach(), name)
            return
        tensor = self._find(name)
        _check_destination(destination, tensor.shape, name, tensor.path)
        self._copy_values(destination.detach(), tensor, name, 0)

    def stored_runs(self, name: str, destination: torch.Tensor) -> list[StoredRun] | None:
        tensor = self._tensors.get(name)
        if tensor is None or DTYPES.get(tensor.dtype) != destination.dtype or not destination.is_contiguous():
            return None
        _check_destination(destination, tensor.shape, name, tensor.path)
        return [(tensor.path, tensor.offset, destination.nbytes)]

    def _copy_values(self, destination: torch.Tensor, tensor: StoredTensor, name: str, first: int) -> None:
        """Values from number `first` on."""
        if tensor.dtype not in DTYPES:
            raise UnsupportedModel(
                f"{tensor.path}: tensor {name!r} is stored as {tensor.dtype}; {', '.join(DTYPES)} are read, "
                "so use a checkpoint in one of those or a GGUF file."
            )
        dtype = DTYPES[tensor.dtype]
        scales = self._scales(tensor, name) if dtype == torch.float8_e4m3fn else None
        if destination.dtype == dtype and destination.is_contiguous() and destination.device.type == "cpu":
            _read_into(tensor.path, tensor.offset + first * dtype.itemsize, destination)
            return
        buffer = torch.empty(0, dtype=dtype)
        for part, start in _slices(destination, first, dtype.itemsize, 1):
            if buffer.numel() < part.numel():
                buffer = torch.empty(part.numel(), dtype=dtype)
            values = buffer[: part.numel()]
            _read_into(tensor.path, tensor.offset + start * dtype.itemsize, values)
            if scales is not None:
                values = scales.scaled(values, start)
            part.copy_(values.view(part.shape))

    def _scales(self, tensor: StoredTensor, name: str) -> BlockScales | None:
        """None for values in eight bits that are what they say."""
        stored = self._tensors.get(f"{name}{SCALES}")
        if stored is None:
            return None
        *_, num_rows, num_columns = (1, *tensor.shape)
        rows, columns = self._scale_block if prod(stored.shape) > 1 else (num_rows, num_columns)
        shape = (*tensor.shape[:-2], -(-num_rows // rows), -(-num_columns // columns))
        if prod(stored.shape) != prod(shape):
            raise InvalidModelFile(
                f"{tensor.path}: {name!r} {tensor.shape} has scales {stored.shape}, blocks of {rows} x {columns} need "
                f"{shape}; take config and weights from the same model."
            )
        values = torch.empty(stored.shape)
        self._copy_values(values, stored, f"{name}{SCALES}", 0)
        return BlockScales(
            scales_RC=values.view(-1, shape[-1]), num_rows=num_rows, width=num_columns, rows=rows, columns=columns
        )

    def quantize_into(self, destination: QuantizedRows, name: str) -> None:
        tensor = self._find(name)
        _check_shape(destination.shape, tensor.shape, name, tensor.path)
        num_rows, num_inputs = destination.shape
        step = max(1, SLICE_BYTES // (4 * num_inputs))
        for first in range(0, num_rows, step):
            values = torch.empty(min(step, num_rows - first), num_inputs)
            self._copy_values(values, tensor, name, first * num_inputs)
            destination.fill(first, grouped(values.numpy(), destination.kind))

    def _mxfp4(self, name: str, asked: tuple[int, ...]) -> tuple[StoredTensor, StoredTensor]:
        """Finds (blocks, scales) of that many values: 32 in four bits have a power of two each."""
        blocks, scales = self._find(f"{name}_blocks"), self._find(f"{name}_scales")
        shape = (*asked[:-1], asked[-1] // GROUP)
        if (blocks.shape, scales.shape) != ((*shape, GROUP // 2), shape) or {blocks.dtype, scales.dtype} != {"U8"}:
            raise InvalidModelFile(
                f"{blocks.path}: {name!r} has blocks {blocks.shape} and scales {scales.shape}, the model's config asks "
                f"for scales {shape}; take config and weights from the same model."
            )
        return blocks, scales

    def _copy_mxfp4(self, destination: torch.Tensor, name: str) -> None:
        """Expands blocks, whose rows are outputs, the plain tensor's inputs."""
        transposed = destination.transpose(-1, -2)
        blocks, scales = self._mxfp4(name, tuple(transposed.shape))
        assert transposed.is_contiguous(), "blocks go to whole rows"
        for part, start in _slices(transposed.view(-1), 0, 4, GROUP):
            codes = torch.empty(part.numel() // 2, dtype=torch.uint8)
            powers = torch.empty(part.numel() // GROUP, dtype=torch.uint8)
            _read_into(blocks.path, blocks.offset + start // 2, codes)
            _read_into(scales.path, scales.offset + start // GROUP, powers)
            part.copy_(mxfp4_values(codes, powers))

    @torch.no_grad()
    def codes_into(self, destination: Mxfp4Matrices, name: str) -> None:
        blocks, scales = self._mxfp4(name, destination.shape)
        codes = torch.empty(blocks.shape[1:], dtype=torch.uint8)
        powers = torch.empty(scales.shape[1:], dtype=torch.uint8)
        for expert in range(destination.shape[0]):
            _read_into(blocks.path, blocks.offset + expert * codes.nbytes, codes)
            _read_into(scales.path, scales.offset + expert * powers.nbytes, powers)
            destination.take(expert, codes, powers)


# --- GGUF ---------------------------------------------------------------------------------------------------


class GgufWeights:
    def __init__(self, gguf: GgufFile, tensors: dict[str, HfTensor] | None = None) -> None:
        """`tensors`: those of a tower; None: the decoder's."""
        self._path = gguf.path
        self._tensors = hf_tensors(gguf) if tensors is None else tensors
        num_values: Counter[str] = Counter()
        for piece in (piece for tensor in self._tensors.values() for piece in tensor.pieces):
            num_values[piece.stored.quant_type.name] += prod(piece.stored.shape)
        self.names = frozenset(self._tensors)
        self.quantization = _common_type(num_values)

    def _find(self, name: str) -> HfTensor:
        if name not in self._tensors:
            raise _missing(name, self._path)
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    @torch.no_grad()
    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        tensor, destination = self._find(name), destination.detach()
        if _without_ones(destination.shape) == _without_ones(tensor.shape):
            destination = destination.view(tensor.shape)
        _check_destination(destination, tensor.shape, name, self._path)
        rows = destination.transpose(-1, -2) if tensor.is_turned else destination
        if any(piece.places is not None for piece in tensor.pieces) and not rows.is_contiguous():
            whole = torch.empty(rows.shape)
            self._copy_pieces(whole, tensor, name)
            rows.copy_(whole)
        else:
            self._copy_pieces(rows, tensor, name)

    def _copy_pieces(self, rows: torch.Tensor, tensor: HfTensor, name: str) -> None:
        for piece in tensor.pieces:
            if piece.places is not None:
                self._scatter(rows, piece, name)
            elif len(tensor.pieces) == 1:
                self._copy(rows, piece, name)
            else:
                self._copy(rows[piece.first_row : piece.first_row + piece.stored.shape[0]], piece, name)

    def _copy(self, destination: torch.Tensor, piece: Piece, name: str) -> None:
        stored = piece.stored
        block_items, block_bytes = GGML_QUANT_SIZES[stored.quant_type]
        # A vector is cut between blocks, a matrix between rows.
        for part, start in _slices(destination, 0, 4, 1 if len(stored.shape) > 1 else block_items):
            raw = torch.empty(part.numel() // block_items * block_bytes, dtype=torch.uint8)
            _read_into(stored.path, stored.offset + start // block_items * block_bytes, raw)
            values = self._values(piece, raw.numpy(), part.shape[-1] if part.dim() else 1, name)
            part.copy_(torch.from_numpy(np.ascontiguousarray(values)).view(part.shape))

    def _scatter(self, destination: torch.Tensor, piece: Piece, name: str) -> None:
        """Puts rows, or the values of a vector, where they belong."""
        stored, places = piece.stored, torch.from_numpy(piece.places)
        row_items = prod(stored.shape) // len(places)
        flat, width = destination.view(-1, row_items), stored.shape[-1]
        block_items, block_bytes = GGML_QUANT_SIZES[stored.quant_type]
        step = max(1, SLICE_BYTES // (4 * width)) * width
        for start in range(0, prod(stored.shape), step):
            count = min(step, prod(stored.shape) - start)
            raw = torch.empty(count // block_items * block_bytes, dtype=torch.uint8)
            _read_into(stored.path, stored.offset + start // block_items * block_bytes, raw)
            values = torch.from_numpy(self._values(piece, raw.numpy(), width, name)).reshape(-1, row_items)
            rows = places[start // row_items :][: len(values)].to(flat.device)
            flat[rows] = values.to(flat.device, flat.dtype)

    def _values(self, piece: Piece, raw: np.ndarray, row_items: int, name: str) -> np.ndarray:
        values = self._dequantized(raw, row_items, piece.stored.quant_type, name)
        if piece.subtract:
            values = values - np.float32(piece.subtract)
        if piece.is_decay:
            if not np.all((values < 0) & np.isfinite(values)):
                raise InvalidModelFile(f"{self._path}: {piece.stored.name!r} holds no decay; download it again.")
            values = np.log(-values)
        if piece.columns is not None:
            moved = np.empty_like(values)
            moved[:, piece.columns] = values
            values = moved
        return values

    def stored_runs(self, name: str, destination: torch.Tensor) -> list[StoredRun] | None:
        tensor = self._find(name)
        pieces = sorted(tensor.pieces, key=lambda piece: piece.first_row)
        is_as_stored = not tensor.is_turned and destination.is_contiguous() and all(p.is_as_stored for p in pieces)
        if not is_as_stored or {DTYPES.get(p.stored.quant_type.name) for p in pieces} != {destination.dtype}:
            return None
        if _without_ones(destination.shape) != _without_ones(tensor.shape):
            _check_destination(destination, tensor.shape, name, self._path)
        return [(p.stored.path, p.stored.offset, p.stored.num_bytes) for p in pieces]

    def quantize_into(self, destination: QuantizedRows, name: str) -> None:
        tensor = self._find(name)
        shape = tensor.shape[:-2] + tensor.shape[:-3:-1] if tensor.is_turned else tensor.shape
        _check_shape(destination.shape, (prod(shape[:-1]), shape[-1]), name, self._path)
        for piece in tensor.pieces:
            self._quantize(destination.some(piece.rows), piece, name)

    @torch.no_grad()
    def codes_into(self, destination: Mxfp4Matrices, name: str) -> None:
        """Takes blocks with their power first and the low halves of the bytes before the high ones."""
        tensor, (num_experts, num_outputs, num_inputs) = self._find(name), destination.shape
        _check_shape((num_experts, num_inputs, num_outputs), tensor.shape, name, self._path)
        shape = (num_outputs // len(tensor.pieces), num_inputs // GROUP, 1 + GROUP // 2)
        parts = [torch.empty(shape, dtype=torch.uint8) for _ in tensor.pieces]
        for expert in range(num_experts):
            for part, piece in zip(parts, tensor.pieces, strict=True):
                _read_into(piece.stored.path, piece.stored.offset + expert * part.nbytes, part)
            rows = torch.stack(parts, 1).flatten(0, 1)
            codes = torch.cat([rows[..., 1:] & 15, rows[..., 1:] >> 4], -1)
            destination.take(expert, codes[..., ::2] | codes[..., 1::2] << 4, rows[..., 0])

    def _quantize(self, destination: QuantizedRows, piece: Piece, name: str) -> None:
        stored = piece.stored
        num_rows, num_inputs = destination.shape
        block_items, block_bytes = GGML_QUANT_SIZES[stored.quant_type]
        row_bytes = num_inputs // block_items * block_bytes
        kind, kernels = destination.kind, c_kernels()
        packs = kernels is not None and kind == stored.quant_type
        step = max(1, SLICE_BYTES // (row_bytes if packs else 4 * num_inputs))
        for first in range(0, num_rows, step):
            raw = torch.empty(min(step, num_rows - first), row_bytes, dtype=torch.uint8)
            _read_into(stored.path, stored.offset + first * row_bytes, raw)
            if packs:
                destination.pack(kernels, first, raw.numpy())
            elif kind == stored.quant_type:
                destination.fill(first, from_gguf(raw.numpy(), kind))
            else:
                values = self._dequantized(raw.numpy(), num_inputs, stored.quant_type, name)
                destination.fill(first, grouped(values, kind))

    def _dequantized(self, raw: np.ndarray, row_items: int, quant_type: GGMLQuantizationType, name: str) -> np.ndarray:
        block_items, block_bytes = GGML_QUANT_SIZES[quant_type]
        rows = raw.reshape(-1, row_items // block_items * block_bytes)
        try:
            return dequantize(rows, quant_type)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{self._path}: tensor {name!r} is stored as {quant_type.name}, which cannot be dequantised "
                "here; use a file in Q4_K, Q8_0 or BF16."
            ) from None
