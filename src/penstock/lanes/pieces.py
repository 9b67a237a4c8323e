"""Steps with prompt chunks as CUDA graphs: what lies between two attentions is captured, the attentions are launched.

Attention depends on every chunk's length and context, the rest of a layer on the number of tokens alone.
"""

# M hidden size

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from penstock.attention.backend import AttentionRule, ForwardInputs
from penstock.attention.chunk_tables import MOST_CHUNKS, num_longer
from penstock.lanes.graphs import PaddedTokens, kept_bytes, or_launched, without_collection
from penstock.models.decoder import Decoder
from penstock.plan.recordings import CHUNK_SIZES as SIZES

if TYPE_CHECKING:
    from penstock.attention.cuda import PiecewiseAttention
    from penstock.cache.storage import StateStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    layer: int
    rule: AttentionRule
    sinks_H: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPiece:
    graph: torch.cuda.CUDAGraph
    then: Attending | None  # None: it is the last piece


class StepPieces:
    """A step is padded to the next size; rows of padding are computed and never read."""

    def __init__(self, decoder: Decoder, attention: PiecewiseAttention, states: StateStorage | None = None) -> None:
        """`states`: those of recurrent layers, which are captured with what is around them; None: there are none."""
        self.decoder = decoder
        self.states = states
        self.attention = attention
        self.is_replaying = True  # else every step is launched kernel by kernel, on the same padded inputs
        self._tokens = PaddedTokens(attention.max_rows, decoder.device, states)
        self._hidden: torch.Tensor | None = None  # of any capture; None: nothing is captured
        self._captured: dict[int, tuple[CapturedPiece, ...]] = {}
        self.kept_bytes = 0  # by what was captured

    def fits(self, inputs: ForwardInputs) -> bool:
        """Tells whether the step was captured ahead of time: capturing takes longer than launching once."""
        is_plain = set(inputs.rotary_variants) == {"default"}
        if self.states is not None and num_longer(inputs.query_starts) > MOST_CHUNKS:
            return False
        return is_plain and self._size(len(inputs.ids_T)) in self._captured

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Hidden states of the step's tokens; the next call writes over them."""
        num_tokens = len(inputs.ids_T)
        size = self._size(num_tokens)
        self._tokens.fill(inputs)
        self._tokens.fill_tables(inputs)
        self.attention.begin_step(inputs)
        self.attention.use_slots_of(size)
        if not self.is_replaying:
            launched = _Launched(self.attention, size)
            return self.decoder.forward(self._tokens.inputs(size), launched, self.states)[:num_tokens]
        assert self._hidden is not None, "capture_all comes first"
        for piece in self._captured[size]:
            piece.graph.replay()
            if piece.then is not None:
                self.attention.attend_rows(size, piece.then.layer, piece.then.rule, piece.then.sinks_H)
        return self._hidden[:num_tokens]

    @torch.inference_mode()
    def capture_all(self) -> None:
        if not self._captured:
            with or_launched("steps with prompt chunks", self.decoder.device):
                self._captured = self._capture_all()

    def _capture_all(self) -> dict[int, tuple[CapturedPiece, ...]]:
        self.attention.prepare()
        self._tokens.forget_tables()
        width, dtype = self.decoder.spec.hidden_size, self.decoder.dtype
        self._hidden = torch.empty(self.attention.max_rows, width, dtype=dtype, device=self.decoder.device)
        found: dict[int, tuple[CapturedPiece, ...]] = {}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        pool: Any = None  # one pool of memory for all captures: no two are replayed at once
        with torch.cuda.stream(stream):
            for size in reversed([size for size in SIZES if size <= self.attention.max_rows]):
                self.attention.use_rows(size)
                inputs = self._tokens.inputs(size)
                self.decoder.forward(inputs, _Dry(self.attention, size), self.states)  # compiles the kernels
                torch.cuda.synchronize()
                capture = _Capture(self.attention, size, pool)
                with without_collection():
                    forward = partial(self.decoder.forward, inputs, capture, self.states)
                    found[size] = capture.capture(forward, self._hidden[:size])
                pool = capture.pool
        torch.cuda.current_stream().wait_stream(stream)
        self.kept_bytes = kept_bytes(pool, sum(map(len, found.values())))
        return found

    def _size(self, num_tokens: int) -> int:
        """0 where the step is larger than any that is captured."""
        index = bisect_left(SIZES, num_tokens)
        return SIZES[index] if index < len(SIZES) else 0


class _Dry:
    """Takes attention's place without attending."""

    name = "capture"
    failure = None
    store: Callable[..., torch.Tensor]  # as attention has it

    def __init__(self, attention: PiecewiseAttention, size: int) -> None:
        self._attention = attention
        self._size = size
        self.store = attention.store

    def begin_step(self, inputs: ForwardInputs) -> None:
        raise AssertionError("a capture is no step")

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._attention.result(self._size, layer)


class _Launched(_Dry):
    """Attends after all, over the rows of a capture."""

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._attention.attend_rows(self._size, layer, rule, sinks_H)
        return super().attend(layer, q_THD, rule, sinks_H)


class _Capture(_Dry):
    """Captures a step: where a layer attends, one piece ends and the next begins."""

    def __init__(self, attention: PiecewiseAttention, size: int, pool: Any) -> None:
        super().__init__(attention, size)
        self.pool = pool
        self._pieces: list[CapturedPiece] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, forward: Callable[[], torch.Tensor], out_TM: torch.Tensor) -> tuple[CapturedPiece, ...]:
        self._begin()
        try:
            out_TM.copy_(forward())
        except BaseException:
            assert self._graph is not None
            with suppress(RuntimeError):  # so that the error is told and not that a capture is under way
                self._graph.capture_end()
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
        self._pieces.append(CapturedPiece(graph=self._graph, then=then))
