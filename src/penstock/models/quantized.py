"""Matrices kept in few bits. Rows are multiplied with the codes themselves, in C; without it with dequantized tiles."""

# T tokens, I inputs, O outputs, N rows of a matrix, G groups of 32 inputs

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type

from penstock.kernels.calls import c_kernels
from penstock.models.groups import Groups
from penstock.models.quantization import GROUP, LANES, LAYOUTS, matrix_bytes, tile_outputs


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
        blocks, (block, lane) = self._blocks(), np.divmod(outputs_N - self.first, LANES)
        for name, codes in _packed(groups.codes_NI, self.kind).items():
            blocks["codes"][name][block, :, :, lane] = codes
        for name in groups.factors_NR.dtype.names or ():
            blocks["factors"][name][block, ..., lane] = groups.factors_NR[name]

    def values(self, outputs_N: np.ndarray) -> np.ndarray:
        """Gives those rows in float32."""
        blocks, (block, lane) = self._blocks(), np.divmod(outputs_N - self.first, LANES)
        dtype = LAYOUTS[self.kind].factor_dtype()
        factors = np.empty((len(outputs_N), self.num_inputs // LAYOUTS[self.kind].num_inputs), dtype)
        for name in dtype.names or ():
            factors[name] = blocks["factors"][name][block, ..., lane]
        planes = {name: blocks["codes"][name][block, :, :, lane] for name in blocks["codes"].dtype.names or ()}
        return Groups(kind=self.kind, codes_NI=_unpacked(planes, self.kind), factors_NR=factors).values

    def _blocks(self) -> np.ndarray:
        return self.bytes.numpy().view(LAYOUTS[self.kind].block_dtype(self.num_inputs))


def _packed(codes_NI: np.ndarray, kind: Type) -> dict[str, np.ndarray]:
    """Planes of [N, G, words, input of a pair]."""
    layout, shape = LAYOUTS[kind], (len(codes_NI), -1)
    if layout.bits == 8:
        return {"low": codes_NI.reshape(*shape, GROUP // 2, 2)}
    planes = {}
    for name, bits, below in (("low", layout.low, 0), ("high", layout.high, layout.low)):
        if bits:
            parts = codes_NI.reshape(*shape, bits, 16 // bits, 2) >> below & (1 << bits) - 1
            words = np.zeros((*parts.shape[:3], 2), np.uint16)
            for index in range(16 // bits):
                words |= parts[..., index, :].astype(np.uint16) << bits * index
            planes[name] = words
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
            # Outputs past the last one are zeros.
            memory = torch.zeros(matrix_bytes(kind, num_outputs, num_inputs), dtype=torch.uint8)
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


Weight = torch.Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """Says where a stored tensor goes."""

    matrix: QuantizedMatrix
    outputs_N: np.ndarray  # where each row goes

    @property
    def part(self) -> QuantizedPart:
        """All rows are of one, or `some` of them are to be taken."""
        first, last = self.outputs_N.min(), self.outputs_N.max()
        (part,) = (one for one in self.matrix.parts if one.first <= first and last < one.first + one.num_outputs)
        return part

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.outputs_N), self.matrix.num_inputs

    def some(self, first: int, count: int) -> QuantizedRows:
        return QuantizedRows(matrix=self.matrix, outputs_N=self.outputs_N[first : first + count])

    def taking(self, order_N: np.ndarray) -> QuantizedRows:
        """Takes rows in another order: what goes first is row `order_N[0]` of those that are stored."""
        outputs_N = np.empty_like(self.outputs_N)
        outputs_N[order_N] = self.outputs_N
        return QuantizedRows(matrix=self.matrix, outputs_N=outputs_N)

    def fill(self, first: int, groups: Groups) -> None:
        """Takes rows from `first` on, of those that are stored."""
        self.part.fill(self.outputs_N[first : first + len(groups.codes_NI)], groups)
