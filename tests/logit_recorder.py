"""Keeps the logits of an engine's lane, to compare what greedy tokens would hide."""

import torch

from penstock.engine.engine import Engine


class LogitRecorder:
    """Keeps the logits that the lane gives, in the order in which it gives them."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[torch.Tensor] = []
        self._engine = engine
        self._lane = engine.model.lane
        self.facts = self._lane.facts
        self.shape = self._lane.shape
        engine._runner.lane = self

    def run(self, inputs):
        logits = self._lane.run(inputs)
        if len(logits):
            self.steps.append(logits.clone())
        return logits

    def remove(self) -> None:
        self._engine._runner.lane = self._lane

    @property
    def all(self) -> torch.Tensor:
        return torch.cat(self.steps)
