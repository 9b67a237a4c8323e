"""Which rows of a step advance which slots of recurrent state, on a GPU, where kernels look it up."""

# N rows of all tables: S chunks of one token, P pieces of longer chunks, C longer chunks

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

MOST_CHUNKS = 64  # of more than one token, in a step that was captured


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTables:
    """Kernels look no further than the counts; how many programs are launched depends on the rows of the tables."""

    piece: int  # tokens of a piece: all but the last of a chunk have so many
    values_N4: torch.Tensor  # the counts of each, then all tables one after the other
    sizes: tuple[int, int, int]  # of the tables, as they lie
    used: tuple[int, int, int]  # of their rows, those that launches are made for

    @classmethod
    def of(
        cls, starts: Sequence[int], slots: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> ChunkTables:
        """Makes those of one step, with as many rows as it has."""
        piece = _piece(dtype)
        singles, pieces, chunks = _parts(starts, slots, piece)
        sizes = len(singles), len(pieces), len(chunks)
        values_N4 = torch.empty(1 + sum(sizes), 4, dtype=torch.int32, device=device)
        tables = cls(piece=piece, values_N4=values_N4, sizes=sizes, used=sizes)
        tables.fill(starts, slots)
        return tables

    @classmethod
    def of_padded(cls, num_tokens: int, *, has_longer: bool, dtype: torch.dtype, device: torch.device) -> ChunkTables:
        """Makes those of any step of so many tokens, for captures. `has_longer`: not all chunks are single tokens."""
        sizes = _most(num_tokens, _piece(dtype) if has_longer else 0)
        values_N4 = torch.zeros(1 + sum(sizes), 4, dtype=torch.int32, device=device)
        return cls(piece=_piece(dtype), values_N4=values_N4, sizes=sizes, used=sizes)

    def of_size(self, num_tokens: int) -> ChunkTables:
        """Takes the same memory for captures of fewer tokens, which launch fewer programs."""
        used = _most(num_tokens, self.piece if self.sizes[2] else 0)
        return ChunkTables(piece=self.piece, values_N4=self.values_N4, sizes=self.sizes, used=used)

    @property
    def singles_S4(self) -> torch.Tensor:
        """Lists (row, slot)."""
        return self.values_N4[1 : 1 + self.used[0]]

    @property
    def pieces_P4(self) -> torch.Tensor:
        """Lists (first row, end, longer chunk)."""
        return self.values_N4[1 + self.sizes[0] :][: self.used[1]]

    @property
    def chunks_C4(self) -> torch.Tensor:
        """Lists (first row, end, slot)."""
        return self.values_N4[1 + self.sizes[0] + self.sizes[1] :][: self.used[2]]

    def count(self, table: int) -> torch.Tensor:
        """Says how many rows of that table are there, on the device."""
        return self.values_N4[0, table:]

    def fill(self, starts: Sequence[int], slots: Sequence[int]) -> None:
        """Copies all of them at once, from pinned memory, so that nobody waits for it."""
        found = torch.zeros(self.values_N4.shape, dtype=torch.int32, pin_memory=self.values_N4.is_cuda)
        numbers, first = found.numpy(), 1
        for table, (part, size) in enumerate(zip(_parts(starts, slots, self.piece), self.sizes, strict=True)):
            assert len(part) <= size, "the step has more chunks than the tables hold"
            numbers[0, table] = len(part)
            numbers[first : first + len(part), : part.shape[1]] = part
            first += size
        self.values_N4.copy_(found, non_blocking=True)

    def forget(self) -> None:
        """Names no rows: what runs next advances nothing."""
        self.values_N4[0].zero_()


def num_longer(starts: Sequence[int]) -> int:
    return sum(last - first > 1 for first, last in pairwise(starts))


def _piece(dtype: torch.dtype) -> int:
    """Strict float32 has no tensor cores; small pieces keep it in registers."""
    return 16 if dtype == torch.float32 else 64


def _most(num_tokens: int, piece: int) -> tuple[int, int, int]:
    """Counts the most (single tokens, pieces, longer chunks) of a step; piece 0: only single tokens."""
    num_chunks = min(MOST_CHUNKS, num_tokens // 2) if piece else 0
    return num_tokens, num_tokens // piece + num_chunks if piece else 0, num_chunks


def _parts(starts: Sequence[int], slots: Sequence[int], piece: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    firsts, slots_C = np.array(starts[:-1], np.int32), np.array(slots, np.int32)
    counts = np.diff(np.array(starts, np.int32))
    longer, single = np.flatnonzero(counts > 1), np.flatnonzero(counts == 1)
    ends = firsts[longer] + counts[longer]
    num_pieces = -(-counts[longer] // piece)
    chunk_of_piece = np.repeat(np.arange(len(longer)), num_pieces)
    index = np.arange(len(chunk_of_piece)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts_P = firsts[longer][chunk_of_piece] + index * piece
    return (
        np.stack([firsts[single], slots_C[single]], 1),
        np.stack([starts_P, np.minimum(starts_P + piece, ends[chunk_of_piece]), chunk_of_piece], 1),
        np.stack([firsts[longer], ends, slots_C[longer]], 1),
    )
