"""The experts of a layer that streams: where each one lies, among all others in the ring or in a slot of its own."""

# T tokens, A experts of a token, P matrices of an expert, E experts

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock.models.quantized import QuantizedMatrix, Weight

LINE = 64  # bytes; kernels read whole lines


def tensors_of(weights: Sequence[Weight]) -> list[torch.Tensor]:
    """Lists the memory of matrices: gates, what they gate, and what follows."""
    parts = [[one] if isinstance(one, torch.Tensor) else [part.bytes for part in one.parts] for one in weights]
    return [tensor for of_one in parts for tensor in of_one]


class StreamedExperts:
    """Matrices are made over the ring; for an expert that lies elsewhere, places say how far from the first one's."""

    def __init__(
        self, index: int, memory: torch.Tensor, matrices: Sequence[torch.Tensor], num_experts: int, take: Callable
    ) -> None:
        """`matrices`: each with all experts. `take`: reads experts of this layer that rows have chosen."""
        self.index = index  # of the layer
        self._memory, self._take = memory, take
        self._firsts_P = np.array([one.data_ptr() - memory.data_ptr() for one in matrices])
        self._sizes_P = np.array([one.nbytes // num_experts for one in matrices])
        ends_P = np.cumsum(-(-self._sizes_P // LINE) * LINE)
        self._inside_P = np.concatenate([[0], ends_P[:-1]])  # of a slot
        self.slot_bytes = int(ends_P[-1])
        self._in_ring_PE = self._sizes_P[:, None] * np.arange(num_experts)
        self._places_PE = self._in_ring_PE.copy()  # from the first expert's matrix

    @property
    def addresses(self) -> list[int]:
        """Lists where C finds the places of each matrix."""
        return [row_E.ctypes.data for row_E in self._places_PE]

    def take(self, experts_TA: torch.Tensor) -> None:
        self._take(self, experts_TA.unique().tolist())

    def move(self, expert: int, place: int) -> None:
        """Says that an expert lies in the slot there."""
        self._places_PE[:, expert] = place + self._inside_P - self._firsts_P

    def move_back(self) -> None:
        """Says that all experts lie in the ring."""
        self._places_PE[:] = self._in_ring_PE

    def parts(self, expert: int) -> Iterator[tuple[int, int, int]]:
        """Yields (place in the ring, bytes, place in a slot) of its matrices."""
        firsts_P = self._firsts_P + self._in_ring_PE[:, expert]
        yield from zip(firsts_P.tolist(), self._sizes_P.tolist(), self._inside_P.tolist(), strict=True)

    def moved(self, expert: int, weights: tuple[Weight, Weight]) -> tuple[Weight, Weight]:
        """Gives the matrices of an expert where they lie now."""
        places = iter((self._firsts_P + self._places_PE[:, expert]).tolist())

        def moved(one: torch.Tensor) -> torch.Tensor:
            place = next(places)
            return self._memory[place : place + one.nbytes].view(one.dtype).view(one.shape)

        def weight(one: Weight) -> Weight:
            if isinstance(one, torch.Tensor):
                return moved(one)
            return QuantizedMatrix(parts=tuple(replace(part, bytes=moved(part.bytes)) for part in one.parts))

        return weight(weights[0]), weight(weights[1])
