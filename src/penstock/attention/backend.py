"""What attention is given: the joined tensors of one step, and the rule of each layer."""

# T tokens of the step, C chunks, H heads, K key-value heads, D head size, R half of the rotated dimensions,
# N rows of media, L deepstack layers, A position axes

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from penstock.attention.chunk_tables import ChunkTables
from penstock.request import LayerGroup, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInputs:
    """What a step that reads images has besides ids: features in place of some rows, and what those may see."""

    rows_N: torch.Tensor  # of the step, that features replace
    features_ND: torch.Tensor
    deepstack_LND: tuple[torch.Tensor, ...] = ()  # added to the same rows after each of the first layers
    positions_AT: torch.Tensor | None = None  # None: one axis, as in the step's own positions
    spans: tuple[tuple[Span, ...], ...] = ()  # by chunk: positions that see themselves, in both directions


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """One step. Chunk c holds rows query_starts[c] to query_starts[c + 1] and ends at position context_lens[c]."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_table: tuple[tuple[int, ...], ...]
    rotary_variants: tuple[str, ...]
    sequence_ids: tuple[int, ...]
    logit_rows: torch.Tensor
    asks_last: tuple[bool, ...] | None = None  # by chunk, whether `logit_rows` has its last row; None: others are in it
    state_slots: tuple[int, ...] = ()  # of each chunk, where the model has recurrent state
    state_loads: tuple[tuple[int | None, int], ...] = ()  # (from, to) before the step; from None: zeros
    state_saves: tuple[tuple[int, int], ...] = ()  # (from, to) after it
    take_hidden: Callable[[torch.Tensor], None] | None = None  # gets the last hidden states, [T, M]; None: nobody asks
    after_layer: Callable[[int, int], None] | None = None  # told (layers done, of how many) in a sweep; may end it
    layers: LayerGroup | None = None  # of one chunk that stops between layers; None: all of them
    source_lens: tuple[int, ...] = ()  # by chunk, tokens of the source that an encoder reads; 0: there is none
    media: MediaInputs | None = None  # None: tokens only
    num_real_1: torch.Tensor | None = None  # on the device, of a padded step: tokens before the padding
    chunk_tables: ChunkTables | None = None  # on a GPU, where the model has recurrent state

    @property
    def num_chunks(self) -> int:
        return len(self.context_lens)

    def cut(self, parts: Sequence[tuple[int, int, int]]) -> ForwardInputs:
        """Makes a step of parts alone, (chunk, first row, end row) in order: each chunk ends where its part does."""
        chunks, firsts, ends = zip(*parts, strict=True)
        rows = slice(firsts[0], ends[-1])

        def of_chunks(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[chunk] for chunk in chunks) if values else ()

        lacking = (self.query_starts[chunk + 1] - end for chunk, end in zip(chunks, ends, strict=True))
        asks_last = None
        if self.asks_last is not None:  # of a chunk that goes on nothing is asked
            asks = zip(chunks, ends, strict=True)
            asks_last = tuple(self.asks_last[chunk] and end == self.query_starts[chunk + 1] for chunk, end in asks)
        is_own = (self.logit_rows >= rows.start) & (self.logit_rows < rows.stop)
        return replace(
            self,
            ids_T=self.ids_T[rows],
            positions_T=self.positions_T[rows],
            query_starts=tuple(row - rows.start for row in (*firsts, rows.stop)),
            context_lens=tuple(self.context_lens[chunk] - num for chunk, num in zip(chunks, lacking, strict=True)),
            block_table=of_chunks(self.block_table),
            rotary_variants=of_chunks(self.rotary_variants),
            sequence_ids=of_chunks(self.sequence_ids),
            logit_rows=self.logit_rows[is_own] - rows.start,
            asks_last=asks_last,
            state_slots=of_chunks(self.state_slots),
            source_lens=of_chunks(self.source_lens),
        )

    def of_asked_rows(self) -> ForwardInputs | None:
        """Makes the step of the rows in `logit_rows`, once the last layer has stored all; None: every row is needed.

        What the last layer makes of the others is used by nobody. `logit_rows` are still those of the whole step.
        """
        needs_all = self.asks_last is None or self.media is not None or self.take_hidden is not None
        if needs_all or len(self.logit_rows) == len(self.ids_T):
            return None

        def of_chunks(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(value for value, asks in zip(values, self.asks_last or (), strict=False) if asks)

        return replace(
            self,
            ids_T=self.ids_T[self.logit_rows],
            positions_T=self.positions_T[self.logit_rows],
            query_starts=tuple(range(len(self.logit_rows) + 1)),
            context_lens=of_chunks(self.context_lens),
            block_table=of_chunks(self.block_table),
            rotary_variants=of_chunks(self.rotary_variants),
            sequence_ids=of_chunks(self.sequence_ids),
        )

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first row, first position, end position) of each chunk."""
        for first, last, end in zip(self.query_starts, self.query_starts[1:], self.context_lens, strict=False):
            yield first, end - (last - first), end

    def longer_chunks(self) -> Iterator[tuple[slice, int]]:
        """Yields (rows, state slot) of each chunk of more than one token."""
        for first, last, slot in zip(self.query_starts, self.query_starts[1:], self.state_slots, strict=False):
            if last - first > 1:
                yield slice(first, last), slot

    def single_tokens(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Finds (rows, state slots) of the chunks of one token; None where there is none."""
        pairs = zip(self.query_starts, self.query_starts[1:], self.state_slots, strict=False)
        found = [(first, slot) for first, last, slot in pairs if last - first == 1]
        if not found:
            return None
        rows, slots = torch.tensor(found, device=self.ids_T.device).unbind(1)
        return rows, slots


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Causal by position, always; a window and a softcap where the layer has them."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sees_spans: bool = True  # whether images see themselves in this layer too


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosines and sines of the step's positions, row after row without gaps."""

    cos_T1R: torch.Tensor
    sin_T1R: torch.Tensor

    def apply(self, rows: slice, x_THD: torch.Tensor, out: torch.Tensor) -> None:
        """Writes those rows' heads, rotated, to `out`; dimensions past the rotated ones are copied."""
        cos, sin = self.cos_T1R[rows], self.sin_T1R[rows]
        num_half = cos.shape[-1]
        first, second = x_THD[..., :num_half], x_THD[..., num_half : 2 * num_half]
        out_first, out_second = out[..., :num_half], out[..., num_half : 2 * num_half]
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin)
        if 2 * num_half < x_THD.shape[-1]:
            out[..., 2 * num_half :] = x_THD[..., 2 * num_half :]


class HeadNorm(Protocol):
    """A norm over each head."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Holds the norms of queries and keys, which come before they are rotated."""

    q: HeadNorm
    k: HeadNorm | None  # None: the layer has no keys of its own


class AttentionBackend(Protocol):
    name: str  # what computes it, and why that
    failure: str | None  # what should have computed it and could not

    def begin_step(self, inputs: ForwardInputs) -> None:
        """Prepares what all layers of the step share."""

    def store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor | None,
        v_TKD: torch.Tensor | None,
        rotation: Rotation | None,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Norms and rotates queries and keys; keys and values go to the pages, the queries are returned.

        The three may lie in memory in any way: as views of one product, or transposed. A layer that attends to
        what an earlier one has stored gives queries alone.
        """

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, H, D]: every token over the tokens of its own sequence up to itself, and over all of its own span.

        A sink is a float32 logit per head: it takes its share of the softmax and adds nothing.
        """
