"""Matrices kept in few bits. Rows are multiplied with the codes themselves, in C; without it with dequantized tiles."""

# T tokens, I inputs, O outputs, B blocks of 16 outputs, G groups of 32 inputs

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kernels.calls import c_kernels
from penstock.models.groups import Groups
from penstock.models.quantization import GROUP, LANES, Format, matrix_bytes, tile_outputs

# A block holds 16 outputs side by side, a lane each. In eight bits: [pair of inputs, lane, input of the pair]. In
# four: words of four codes, of four pairs after one another, [four pairs, lane, input of the pair].
BLOCKS = {
    Format.INT8: np.dtype([("codes", "i1", (16, LANES, 2)), ("scales", "<f2", LANES)]),
    Format.INT4: np.dtype([("codes", "<u2", (4, LANES, 2)), ("scales", "<f2", LANES), ("lowest", "<f2", LANES)]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    format: Format
    num_outputs: int
    num_inputs: int
    bytes: torch.Tensor  # uint8

    @classmethod
    def empty(cls, quantized: Format, num_outputs: int, num_inputs: int) -> QuantizedMatrix:
        # Outputs past the last one are zeros.
        memory = torch.zeros(matrix_bytes(quantized, num_outputs, num_inputs), dtype=torch.uint8)
        return cls(format=quantized, num_outputs=num_outputs, num_inputs=num_inputs, bytes=memory)

    def __len__(self) -> int:
        return self.num_outputs

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs

    def fill(self, first: int, groups: Groups) -> None:
        """Rows from `first` on."""
        outputs = np.arange(first, first + len(groups.scales_NG))
        blocks, block, lane = self._blocks(), outputs // LANES, outputs % LANES
        codes = groups.codes_NGI.reshape(*groups.scales_NG.shape, GROUP // 2, 2)
        if self.format is Format.INT4:
            four = codes.reshape(*groups.scales_NG.shape, 4, 4, 2).astype(np.uint16)
            codes = four[..., 0, :] | four[..., 1, :] << 4 | four[..., 2, :] << 8 | four[..., 3, :] << 12
            assert groups.lowest_NG is not None
            blocks["lowest"][block, :, lane] = groups.lowest_NG
        blocks["codes"][block, :, :, lane, :] = codes
        blocks["scales"][block, :, lane] = groups.scales_NG

    def values(self, outputs: np.ndarray) -> np.ndarray:
        """Gives those rows in float32."""
        blocks, block, lane = self._blocks(), outputs // LANES, outputs % LANES
        codes, lowest = blocks["codes"][block, :, :, lane, :], None
        if self.format is Format.INT4:
            codes = np.stack([codes >> shift & 15 for shift in (0, 4, 8, 12)], axis=-2)
            lowest = blocks["lowest"][block, :, lane]
        codes = codes.reshape(len(outputs), -1, GROUP)
        return Groups(codes_NGI=codes, scales_NG=blocks["scales"][block, :, lane], lowest_NG=lowest).values

    def rows(self, ids_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows by their numbers, as embeddings are looked up."""
        if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < self.num_outputs:
            raise IndexError(f"rows {int(ids_T.min())} to {int(ids_T.max())} of {self.num_outputs}")
        kernels = c_kernels() if dtype == torch.bfloat16 else None
        if kernels is None:
            return torch.from_numpy(self.values(ids_T.numpy())).to(dtype)
        ids_T = ids_T.contiguous()
        out = torch.empty(len(ids_T), self.num_inputs, dtype=dtype)
        places = {"blocks": self.bytes.data_ptr(), "ids": ids_T.data_ptr(), "out": out.data_ptr()}
        sizes = {"bits": self.format.bits, "num_rows": len(out), "num_inputs": self.num_inputs}
        kernels.run("penstock_unpack_rows", "struct unpacking *", places | sizes)
        return out

    def tiles(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields (outputs, their rows) for the whole matrix, where the C kernels cannot multiply."""
        step = tile_outputs(self.num_outputs, self.num_inputs)
        for first in range(0, self.num_outputs, step):
            outputs = slice(first, min(first + step, self.num_outputs))
            yield outputs, torch.from_numpy(self.values(np.arange(first, outputs.stop))).to(dtype)

    def _blocks(self) -> np.ndarray:
        return self.bytes.numpy().view(BLOCKS[self.format]).reshape(-1, self.num_inputs // GROUP)


Weight = torch.Tensor | QuantizedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """Says where a stored tensor goes: outputs [start, end) of a matrix."""

    matrix: QuantizedMatrix
    start: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.start, self.matrix.num_inputs
