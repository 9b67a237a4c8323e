"""Steps with prompt chunks as CUDA graphs: what lies between two attentions is recorded, the attentions are launched.

Attention depends on every chunk's length and context, the rest of a layer on the number of tokens alone.
"""

# M hidden size

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.attention.backend import AttentionRule, ForwardInputs, HeadNorms, Rotation
from penstock.config import GPU_STEP_SIZES
from penstock.lanes.graphs import padded_inputs, without_collection
from penstock.models.decoder import Decoder

if TYPE_CHECKING:
    from penstock.attention.cuda import PiecewiseAttention

MOST_TOKENS = 2048  # larger steps last longer than their launches
SIZES = tuple(size for size in GPU_STEP_SIZES if size <= MOST_TOKENS)


def recorded_size(num_tokens: int) -> int:
    """Of the recording that such a step is padded to; the largest where it has none."""
    return next((size for size in SIZES if size >= num_tokens), SIZES[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    layer: int
    rule: AttentionRule
    sinks_H: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    graph: torch.cuda.CUDAGraph
    then: Attending | None  # None: it is the last piece


class StepPieces:
    """A step is padded to the next size; rows of padding are computed and never read."""

    def __init__(self, decoder: Decoder, attention: PiecewiseAttention) -> None:
        self.decoder = decoder
        self.attention = attention
        self.is_replaying = True  # else every step is launched kernel by kernel, on the same padded inputs
        device = decoder.device
        self._ids = torch.zeros(attention.max_rows, dtype=torch.long, device=device)
        self._positions = torch.zeros(attention.max_rows, dtype=torch.long, device=device)
        self._hidden: torch.Tensor | None = None  # of any recording; None: nothing is recorded
        self._recorded: dict[int, tuple[Piece, ...]] = {}

    def fits(self, inputs: ForwardInputs) -> bool:
        """Only what was recorded ahead of time: recording takes longer than launching once."""
        is_plain = set(inputs.rotary_variants) == {"default"}
        return is_plain and self._size(len(inputs.ids_T)) in self._recorded

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Hidden states of the step's tokens; the next call writes over them."""
        num_tokens = len(inputs.ids_T)
        size = self._size(num_tokens)
        self._ids[:num_tokens].copy_(inputs.ids_T)
        self._positions[:num_tokens].copy_(inputs.positions_T)
        self.attention.begin_step(inputs)
        self.attention.use_slots_of(size)
        if not self.is_replaying:
            inputs = padded_inputs(self._ids[:size], self._positions[:size], "default")
            return self.decoder.forward(inputs, _Launched(self.attention, size))[:num_tokens]
        assert self._hidden is not None, "record_all comes first"
        for piece in self._recorded[size]:
            piece.graph.replay()
            if piece.then is not None:
                self.attention.attend_rows(size, piece.then.layer, piece.then.rule, piece.then.sinks_H)
        return self._hidden[:num_tokens]

    @torch.inference_mode()
    def record_all(self) -> None:
        if self._recorded:
            return
        self.attention.prepare()
        width, dtype = self.decoder.spec.hidden_size, self.decoder.dtype
        self._hidden = torch.empty(self.attention.max_rows, width, dtype=dtype, device=self.decoder.device)
        found: dict[int, tuple[Piece, ...]] = {}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        pool: Any = None  # one pool of memory for all recordings: no two are replayed at once
        with torch.cuda.stream(stream):
            for size in reversed([size for size in SIZES if size <= self.attention.max_rows]):
                self.attention.use_rows(size)
                inputs = padded_inputs(self._ids[:size], self._positions[:size], "default")
                self.decoder.forward(inputs, _Dry(self.attention, size))  # compiles the kernels
                torch.cuda.synchronize()
                recording = _Recording(self.attention, size, pool)
                with without_collection():
                    found[size] = recording.record(self.decoder, inputs, self._hidden[:size])
                pool = recording.pool
        torch.cuda.current_stream().wait_stream(stream)
        self._recorded = found

    def _size(self, num_tokens: int) -> int:
        """0 where the step is larger than any that is recorded."""
        index = bisect_left(SIZES, num_tokens)
        return SIZES[index] if index < len(SIZES) else 0


class _Dry:
    """Takes attention's place without attending."""

    name = "recording"
    failure = None

    def __init__(self, attention: PiecewiseAttention, size: int) -> None:
        self._attention = attention
        self._size = size

    def begin_step(self, inputs: ForwardInputs) -> None:
        raise AssertionError("a recording is no step")

    def store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotation: Rotation | None,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        return self._attention.store(layer, q_THD, k_TKD, v_TKD, rotation, norms)

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._attention.result(self._size)


class _Launched(_Dry):
    """Attends after all, over the rows of a recording."""

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._attention.attend_rows(self._size, layer, rule, sinks_H)
        return super().attend(layer, q_THD, rule, sinks_H)


class _Recording(_Dry):
    """Where a layer attends, one piece ends and the next begins."""

    def __init__(self, attention: PiecewiseAttention, size: int, pool: Any) -> None:
        super().__init__(attention, size)
        self.pool = pool
        self._pieces: list[Piece] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self, decoder: Decoder, inputs: ForwardInputs, out_TM: torch.Tensor) -> tuple[Piece, ...]:
        self._begin()
        try:
            out_TM.copy_(decoder.forward(inputs, self))
        except BaseException:
            self._abandon()
            raise
        self._end(None)
        return tuple(self._pieces)

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._end(Attending(layer=layer, rule=rule, sinks_H=sinks_H))
        self._begin()
        return super().attend(layer, q_THD, rule, sinks_H)

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def _end(self, then: Attending | None) -> None:
        assert self._graph is not None
        self._graph.capture_end()
        self.pool = self._graph.pool()
        self._pieces.append(Piece(graph=self._graph, then=then))

    def _abandon(self) -> None:
        """Ends the recording under way, so that the error is told and not that a recording is under way."""
        assert self._graph is not None
        with suppress(RuntimeError):
            self._graph.capture_end()
