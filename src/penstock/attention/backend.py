"""What attention is given: the packed tensors of one step, and the rule of each layer."""

# T tokens of the step, C chunks

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


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

    @property
    def num_chunks(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Causal by position, always; a window and a softcap where the layer has them."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    name: str

    def begin_step(self, inputs: ForwardInputs) -> None:
        """Prepares what all layers of the step share."""
        ...

    def key_value_rows(self, layer: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Where the step's keys and values are to be written: rows of the step, and views of the pages."""
        ...

    def attend(self, layer: int, q_THD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """[T, H, D]: every token over the tokens of its own sequence up to itself."""
        ...
