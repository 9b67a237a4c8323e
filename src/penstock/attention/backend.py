"""What attention is given: the packed tensors of one step, and the rule of each layer."""

# T tokens of the step, C chunks, H heads, K key-value heads, D head size, R half of the rotated dimensions

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
    source_lens: tuple[int, ...] = ()  # by chunk, tokens of the source that an encoder reads; 0: there is none

    @property
    def num_chunks(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Causal by position, always; a window and a softcap where the layer has them."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosines and sines of the step's positions."""

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


class AttentionBackend(Protocol):
    name: str

    def begin_step(self, inputs: ForwardInputs) -> None:
        """Prepares what all layers of the step share."""
        ...

    def store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """Rotates queries and keys; keys and values go straight to the pages, the queries are returned."""
        ...

    def attend(self, layer: int, q_THD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
        """[T, H, D]: every token over the tokens of its own sequence up to itself."""
        ...
