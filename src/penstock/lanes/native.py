"""The lane `optimized-native-text`: our decoder over our pages."""

from __future__ import annotations

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.cache.storage import StateStorage
from penstock.lanes.graphs import DecodeGraphs
from penstock.lanes.lane import LaneFacts
from penstock.lanes.pieces import StepPieces
from penstock.models.cpu_steps import CompiledSteps
from penstock.models.decoder import Decoder
from penstock.plan.memory import ModelShape


class NativeTextLane:
    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        *,
        shape: ModelShape,
        facts: LaneFacts,
        graphs: DecodeGraphs | None = None,  # None: every decode is launched kernel by kernel
        pieces: StepPieces | None = None,  # None: and every other step
        steps: CompiledSteps | None = None,  # None: every step runs layer by layer
        states: StateStorage | None = None,  # None: the model has no recurrent state
    ) -> None:
        self.decoder = decoder
        self.attention = attention
        self.shape = shape
        self.facts = facts
        self.graphs = graphs
        self.pieces = pieces
        self.steps = steps
        self.states = states

    @torch.inference_mode()
    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        hidden_TM = self._hidden(inputs)
        if inputs.take_hidden is not None:
            inputs.take_hidden(self.decoder.final_norm(hidden_TM, self.decoder.dtype))
        return self.decoder.logits(hidden_TM[inputs.logit_rows])

    def record(self) -> None:
        """Ahead of time, so that no request waits for it."""
        if self.graphs is not None:
            self.graphs.record_all()
            self._use_head(self.graphs.attention.max_rows)
        if self.pieces is not None:
            self.pieces.record_all()

    @torch.inference_mode()
    def _use_head(self, most_rows: int) -> None:
        """A matrix kernel that is used for the first time is loaded first, and that waits for the step that runs."""
        hidden_TM = torch.zeros(
            most_rows, self.decoder.spec.hidden_size, dtype=self.decoder.dtype, device=self.decoder.device
        )
        for num_rows in range(1, most_rows + 1):
            self.decoder.logits(hidden_TM[:num_rows])

    def _hidden(self, inputs: ForwardInputs) -> torch.Tensor:
        for way in (self.graphs, self.pieces, self.steps):
            if way is not None and inputs.media is None and way.fits(inputs):
                return way.forward(inputs)
        return self._forward(inputs)

    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        self.attention.begin_step(inputs)
        if self.states is None:
            return self.decoder.forward(inputs, self.attention)
        for source, target in inputs.state_loads:
            self.states.copy(source, target)
        hidden_TM = self.decoder.forward(inputs, self.attention, self.states)
        for source, target in inputs.state_saves:
            self.states.copy(source, target)
        return hidden_TM

    def release(self, sequence_id: int) -> None:
        """Nothing: what is kept of a sequence are its blocks, and the scheduler gives them back."""
