"""Sweeps: a wide step is cut into tiles inside each layer, so that all its tokens pass a layer before the next begins.

A tile is what a chunk of its size would be, with the same kernels, so the numbers are the same. Only hidden states grow
with the step.
"""

# T tokens of the step, M hidden size

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.cache.storage import StateStorage
from penstock.models.cpu_steps import CompiledSteps
from penstock.models.decoder import Decoder, Passage

BESIDE = 16  # a step that is wider than a tile by this part of it is still run as one: decodes beside a chunk


class Sweep:
    """Steps that go through one layer after another, tile by tile in each; one of one chunk may stop after any."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        *,
        width: int,
        steps: CompiledSteps | None,
        states: StateStorage | None,
    ) -> None:
        self.width = width  # of a tile
        self._decoder = decoder
        self._attention = attention
        self._steps = steps
        self._states = states
        self._stopped: dict[int, tuple[torch.Tensor, list[Passage]]] = {}  # hidden states, by sequence

    def takes(self, inputs: ForwardInputs) -> bool:
        """Tells whether a step is too wide for one tile, or some layer has to be waited for."""
        is_wide = inputs.media is None and len(inputs.ids_T) > self.width + self.width // BESIDE
        return is_wide or self._decoder.stream is not None or inputs.layers is not None

    def release(self, sequence_id: int) -> None:
        """Forgets a sequence that may have stopped between two layers."""
        self._stopped.pop(sequence_id, None)

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Hidden states [T, M] of every token of the step, after all layers or those that are asked for."""
        decoder, stream, layers = self._decoder, self._decoder.stream, inputs.layers
        if stream is not None:
            stream.begin(len(inputs.ids_T))
        first, end = (layers.first, layers.end) if layers is not None else (0, len(decoder.layers))
        hidden_TM, passages = self._stopped.pop(inputs.sequence_ids[0]) if first else self._begin(inputs)
        for index in range(first, end):
            with nullcontext() if stream is None else stream.layer(index):
                for passage in passages:
                    self._attention.begin_step(passage.inputs)
                    if self._steps is not None and self._steps.fits(passage.inputs):
                        self._steps.advance(range(index, index + 1), passage)
                    else:
                        decoder.advance(index, passage, self._attention, self._states)
            if inputs.after_layer is not None:
                inputs.after_layer(index + 1, len(decoder.layers))
        if end < len(decoder.layers):
            self._stopped[inputs.sequence_ids[0]] = hidden_TM, passages
        return hidden_TM

    def _begin(self, inputs: ForwardInputs) -> tuple[torch.Tensor, list[Passage]]:
        decoder = self._decoder
        hidden_TM = torch.empty(len(inputs.ids_T), decoder.spec.hidden_size, dtype=decoder.residual_dtype)
        if inputs.layers is not None:  # what is asked is known when the last layer comes
            inputs = replace(inputs, asks_last=None)
        tiles = [inputs] if inputs.media is not None else list(cut(inputs, self.width))
        rows = hidden_TM.split([len(tile.ids_T) for tile in tiles])
        return hidden_TM, [decoder.begin(tile, out_TM) for tile, out_TM in zip(tiles, rows, strict=True)]


def cut(inputs: ForwardInputs, width: int) -> Iterator[ForwardInputs]:
    """Yields the tiles of a step, in the order of its rows: short chunks together, long ones cut from their start."""
    parts: list[tuple[int, int, int]] = []  # (chunk, first row, end row) of the next tile
    for chunk, (first, end) in enumerate(pairwise(inputs.query_starts)):
        if parts and end - parts[0][1] > width:
            yield inputs.cut(parts)
            parts = []
        while end - first > width:
            yield inputs.cut([(chunk, first, first + width)])
            first += width
        parts.append((chunk, first, end))
    yield inputs.cut(parts)
