"""Matrices kept in few bits. Rows are multiplied with the codes themselves, in C; without it with dequantized tiles."""

# T tokens, I inputs, O outputs, N rows of a matrix, G groups of 32 inputs

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type

from penstock.kernels.calls import CKernels, c_kernels
from penstock.models.groups import Groups
from penstock.models.projections import LANES
from penstock.models.quantization import GROUP, LAYOUTS, matrix_bytes, tile_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPart:
    """Outputs of a matrix that are stored in one type."""

    kind: Type
    first: int  # output of the matrix
    num_outputs: int
    num_inputs: int
    bytes: torch.Tensor  # uint8

    def fill(self, outputs_N: np.ndarray, groups: Groups) -> None:
        """Takes rows; outputs are those of the whole matrix."""
        blocks, outputs_N = self._blocks(), outputs_N - self.first
        fields = [(blocks["factors"][name], groups.factors_NR[name]) for name in groups.factors_NR.dtype.names or ()]
        for name, words_NGW in _packed(groups.codes_NI, self.kind).items():
            stored = blocks["codes"][name].view(words_NGW.dtype)[..., 0]
            fields.append((stored, words_NGW.reshape(-1, *stored.shape[1:-1])))
        first, count = outputs_N[0], len(outputs_N)
        if first % LANES == count % LANES == 0 and np.array_equal(outputs_N, np.arange(first, first + count)):
            for stored, values in fields:  # whole blocks
                of_block = values.reshape(-1, LANES, *values.shape[1:])
                stored[first // LANES : (first + count) // LANES] = np.moveaxis(of_block, 1, -1)
            return
        block, lane = np.divmod(outputs_N, LANES)
        for stored, values in fields:
            stored[block, ..., lane] = values

    def pack(self, kernels: CKernels, outputs_N: np.ndarray, rows_NB: np.ndarray) -> None:
        """Takes rows as a GGUF has them, in C."""
        outputs_N, rows_NB = outputs_N - self.first, np.ascontiguousarray(rows_NB)
        places = {"rows": rows_NB.ctypes.data, "outputs": outputs_N.ctypes.data, "weight": self.bytes.data_ptr()}
        sizes = {"type": int(self.kind), "num_rows": len(rows_NB), "num_inputs": self.num_inputs}
        kernels.run("penstock_pack", "struct packing *", places | sizes)

    def values(self, outputs_N: np.ndarray) -> np.ndarray:
        """Gives those rows in float32."""
        blocks, (block, lane) = self._blocks(), np.divmod(outputs_N - self.first, LANES)
        dtype = LAYOUTS[self.kind].factor_dtype()
        factors = np.empty((len(outputs_N), self.num_inputs // LAYOUTS[self.kind].num_inputs), dtype)
        for name in dtype.names or ():
            factors[name] = blocks["factors"][name][block, ..., lane]
        planes = {name: blocks["codes"][name][block, :, :, :, lane] for name in blocks["codes"].dtype.names or ()}
        return Groups(kind=self.kind, codes_NI=_unpacked(planes, self.kind), factors_NR=factors).values

    def _blocks(self) -> np.ndarray:
        layout = LAYOUTS[self.kind]
        return self.bytes.numpy().view(layout.set_dtype()).reshape(-1, self.num_inputs // layout.num_inputs)


def _packed(codes_NI: np.ndarray, kind: Type) -> dict[str, np.ndarray]:
    """Planes of [N, G, words], each with both inputs of some pairs."""
    layout, shape = LAYOUTS[kind], (len(codes_NI), codes_NI.shape[1] // GROUP, -1)
    if layout.bits == 8:
        return {"low": np.ascontiguousarray(codes_NI).view("<u2").reshape(shape)}
    planes = {}
    for name, bits, below in (("low", layout.low, 0), ("high", layout.high, layout.low)):
        if bits:
            four_pairs = (codes_NI >> np.uint8(below) & np.uint8((1 << bits) - 1)).view("<u8")
            four_pairs |= four_pairs >> np.uint64(16 - bits)
            two_pairs = four_pairs.view("<u4")  # the first inputs of both are in one byte, the second in the next
            two_pairs = (two_pairs & 0xFF | (two_pairs & 0xFF00) << 8).reshape(-1, 8 // bits)
            words = two_pairs[:, 0].copy()
            for index in range(1, 8 // bits):
                words |= two_pairs[:, index] << np.uint32(2 * bits * index)
            planes[name] = words.reshape(shape)
    return planes


def _unpacked(planes: dict[str, np.ndarray], kind: Type) -> np.ndarray:
    layout, codes = LAYOUTS[kind], None
    if layout.bits == 8:
        return planes["low"].reshape(len(planes["low"]), -1)
    for name, bits, below in (("low", layout.low, 0), ("high", layout.high, layout.low)):
        if bits:
            shifts = np.arange(0, 16, bits, dtype=np.uint16)[:, None]
            part = (planes[name][..., None, :] >> shifts & (1 << bits) - 1).astype(np.uint8) << below
            part = part.reshape(len(part), -1)
            codes = part if codes is None else codes | part
    assert codes is not None
    return codes


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """Parts lie one below the other, each in its own type."""

    parts: tuple[QuantizedPart, ...]

    @classmethod
    def empty(cls, types: Iterable[tuple[Type, int]], num_inputs: int) -> QuantizedMatrix:
        """`types`: and the outputs of each."""
        parts, first = [], 0
        for kind, num_outputs in types:
            memory = _zeros(matrix_bytes(kind, num_outputs, num_inputs))  # outputs past the last one stay so
            parts.append(
                QuantizedPart(kind=kind, first=first, num_outputs=num_outputs, num_inputs=num_inputs, bytes=memory)
            )
            first += num_outputs
        return cls(parts=tuple(parts))

    def __len__(self) -> int:
        return self.parts[-1].first + self.parts[-1].num_outputs

    @property
    def num_inputs(self) -> int:
        return self.parts[0].num_inputs

    @property
    def num_bytes(self) -> int:
        return sum(part.bytes.nbytes for part in self.parts)

    @property
    def places(self) -> list[tuple[torch.Tensor, Type, int, int]]:
        """Lists (memory, type, first output, number of outputs) of the parts."""
        return [(part.bytes, part.kind, part.first, part.num_outputs) for part in self.parts]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.num_inputs

    def of_expert(self, expert: int, num_experts: int, num_outputs: int) -> QuantizedMatrix:
        """Gives the matrix of one expert, over the same memory: `num_outputs` of each part."""
        return QuantizedMatrix(
            parts=tuple(
                replace(
                    part,
                    first=index * num_outputs,
                    num_outputs=num_outputs,
                    bytes=part.bytes.view(num_experts, -1)[expert],
                )
                for index, part in enumerate(self.parts)
            )
        )

    def rows(self, ids_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows by their numbers, as embeddings are looked up."""
        if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < len(self):
            raise IndexError(f"rows {int(ids_T.min())} to {int(ids_T.max())} of {len(self)}")
        (part,) = self.parts
        kernels = c_kernels() if dtype == torch.bfloat16 else None
        if kernels is None:
            return torch.from_numpy(part.values(ids_T.numpy())).to(dtype)
        ids_T = ids_T.contiguous()
        out = torch.empty(len(ids_T), self.num_inputs, dtype=dtype)
        places = {"weight": part.bytes.data_ptr(), "ids": ids_T.data_ptr(), "out": out.data_ptr()}
        sizes = {"type": int(part.kind), "num_rows": len(out), "num_inputs": self.num_inputs}
        kernels.run("penstock_unpack_rows", "struct unpacking *", places | sizes)
        return out

    def tiles(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields (outputs, their rows) for the whole matrix, where the C kernels cannot multiply."""
        step = tile_outputs(len(self), self.num_inputs)
        for part in self.parts:
            end = part.first + part.num_outputs
            for first in range(part.first, end, step):
                outputs = slice(first, min(first + step, end))
                yield outputs, torch.from_numpy(part.values(np.arange(first, outputs.stop))).to(dtype)


def _zeros(num_bytes: int) -> torch.Tensor:
    """Bytes that the system makes zeros where they are first touched: torch would write them, all of them, before that.

    Numpy leaves it to the system too, and asks for large pages, which took four times as long to come.
    """
    return torch.frombuffer(mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=torch.uint8)


Weight = torch.Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """Says where a stored tensor goes."""

    matrix: QuantizedMatrix
    outputs_N: np.ndarray  # where each row goes

    @property
    def kind(self) -> Type:
        """All rows are of one, or `some` of them are to be taken."""
        (kind,) = {part.kind for part in self.matrix.parts if self._is_of(part, self.outputs_N).any()}
        return kind

    def _is_of(self, part: QuantizedPart, outputs_N: np.ndarray) -> np.ndarray:
        return (outputs_N >= part.first) & (outputs_N < part.first + part.num_outputs)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.outputs_N), self.matrix.num_inputs

    def some(self, rows_N: np.ndarray | slice) -> QuantizedRows:
        return QuantizedRows(matrix=self.matrix, outputs_N=self.outputs_N[rows_N])

    def taking(self, order_N: np.ndarray) -> QuantizedRows:
        """Takes rows in another order: what goes first is row `order_N[0]` of those that are stored."""
        outputs_N = np.empty_like(self.outputs_N)
        outputs_N[order_N] = self.outputs_N
        return QuantizedRows(matrix=self.matrix, outputs_N=outputs_N)

    def fill(self, first: int, groups: Groups) -> None:
        """Takes rows from `first` on, of those that are stored."""
        for part, outputs_N, is_of_N in self._parts(first, len(groups.codes_NI)):
            some = Groups(kind=groups.kind, codes_NI=groups.codes_NI[is_of_N], factors_NR=groups.factors_NR[is_of_N])
            part.fill(outputs_N, some)

    def pack(self, kernels: CKernels, first: int, rows_NB: np.ndarray) -> None:
        """Takes the same as a GGUF has them."""
        for part, outputs_N, is_of_N in self._parts(first, len(rows_NB)):
            part.pack(kernels, outputs_N, rows_NB[is_of_N])

    def _parts(self, first: int, num_rows: int) -> Iterator[tuple[QuantizedPart, np.ndarray, np.ndarray | slice]]:
        """Yields (part, its outputs, which of the rows they are)."""
        outputs_N = self.outputs_N[first : first + num_rows]
        for part in self.matrix.parts:
            if (is_of_N := self._is_of(part, outputs_N)).all():
                yield part, outputs_N, slice(None)
            elif is_of_N.any():
                yield part, outputs_N[is_of_N], is_of_N
