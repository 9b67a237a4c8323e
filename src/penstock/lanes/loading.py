"""What a lane's loader is given, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.attention.backend import AttentionBackend
from penstock.cache.storage import StateStorage
from penstock.errors import UnsupportedModel
from penstock.lanes.checks import Checks
from penstock.lanes.lane import Lane, LaneFacts
from penstock.lanes.place import Place
from penstock.models.files import ModelFiles
from penstock.models.weights import WeightSource
from penstock.plan.memory import MemoryModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A model on its way into memory: where it goes, what it costs there, and what its self-check found."""

    place: Place
    memory: MemoryModel
    max_context: int
    checks_so_far: Checks | None = None  # None: the lane is exact by how it is built
    weights: WeightSource | None = None  # in place of those in the files; None: those
    tokenizer: Any = None  # of the library `tokenizers`, for what reads images of a GGUF

    @property
    def device(self) -> torch.device:
        return torch.device(self.place.device)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.place.dtype)

    @property
    def checks(self) -> Checks:
        assert self.checks_so_far is not None, "the lane is checked model by model"
        return self.checks_so_far

    def num_tokens(self, memory: MemoryModel, num_running: int = 0) -> int:
        """Tokens of all sequences that may be resident, of as many as the budget holds; 0 running: as configured."""
        return min(self.place.room(memory), self.max_context * (num_running or self.place.config.max_running))

    def measured(self, memory: MemoryModel, model: Any, **changes: Any) -> MemoryModel:
        """The price with what the loaded model really holds, and as many running sequences as their states allow."""
        num_parameters = sum({one.data_ptr(): one.numel() for one in model.parameters()}.values())
        shape = replace(memory.shape, num_parameters=num_parameters, **changes)
        num_states, _ = self.place.state_slots(shape, has_checkpoints=False)
        return replace(memory, shape=shape, num_running_states=num_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLane:
    """A lane that can run, and what the engine has to know of its model."""

    lane: Lane
    spec: Any  # of the decoder: its vocabulary, and how its rotary table depends on a prompt's length
    memory: MemoryModel
    num_tokens: int  # that the pages hold
    max_context: int | None = None  # positions of a sequence; None: the context
    adjustments: Sequence[str] = ()
    attention: AttentionBackend | None = None  # None: the model's own
    states: StateStorage | None = None  # None: the model has no recurrent state, or keeps it itself
    chat_template: str | None = None  # in place of the tokenizer's; None: that one
    eos_ids: frozenset[int] = frozenset()  # besides the tokenizer's


def require_folder(files: ModelFiles, kind: str) -> None:
    if files.folder is None and files.tower is None:
        raise UnsupportedModel(f"{kind} models are read from safetensors, not from GGUF. Pass the folder.")


def with_boundary(facts: LaneFacts, sight: str) -> LaneFacts:
    """The facts of a lane whose images see themselves, or make the whole prompt see itself."""
    if sight == "prompt":
        return replace(facts, reads_whole=True, reason=f"{facts.reason}; the whole prompt sees itself")
    boundary = "any token outside images, which see themselves"
    return replace(facts, chunk_boundary=boundary) if sight == "span" else facts
