"""Turns a StepPlan into the packed tensors of one step, and runs the lane on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.attention.backend import ForwardInputs
from penstock.lanes.lane import Lane
from penstock.request import Chunk, Sequence, StepPlan


class Runner:
    def __init__(self, lane: Lane, device: torch.device) -> None:
        self.lane = lane
        self.device = device

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> dict[int, torch.Tensor]:
        """Logits by sequence: of the chunk's last token, or of every token where prompt logprobs are wanted."""
        rows_by_sequence: dict[int, slice] = {}
        logit_rows: list[int] = []
        row = 0
        for chunk in plan.chunks:
            wanted = _logit_rows(chunk, sequences[chunk.sequence_id], row)
            rows_by_sequence[chunk.sequence_id] = slice(len(logit_rows), len(logit_rows) + len(wanted))
            logit_rows += wanted
            row += chunk.num_tokens
        logits = self.lane.run(self._inputs(plan, sequences, logit_rows))
        return {sequence_id: logits[rows] for sequence_id, rows in rows_by_sequence.items()}

    def _inputs(self, plan: StepPlan, sequences: Mapping[int, Sequence], logit_rows: list[int]) -> ForwardInputs:
        ids: list[int] = []
        positions: list[int] = []
        query_starts = [0]
        for chunk in plan.chunks:
            ids += sequences[chunk.sequence_id].tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            query_starts.append(len(ids))
        return ForwardInputs(
            ids_T=torch.tensor(ids, device=self.device),
            positions_T=torch.tensor(positions, device=self.device),
            query_starts=tuple(query_starts),
            context_lens=tuple(chunk.end for chunk in plan.chunks),
            block_table=tuple(tuple(sequences[chunk.sequence_id].block_ids) for chunk in plan.chunks),
            rotary_variants=tuple(sequences[chunk.sequence_id].request.rotary for chunk in plan.chunks),
            sequence_ids=tuple(chunk.sequence_id for chunk in plan.chunks),
            logit_rows=torch.tensor(logit_rows, dtype=torch.long, device=self.device),
        )


def _logit_rows(chunk: Chunk, sequence: Sequence, first_row: int) -> list[int]:
    if sequence.request.sampling.prompt_logprobs is not None and sequence.num_generated == 0:
        # Rows of an overlap were counted with the chunk before.
        return list(range(first_row + sequence.num_computed - chunk.start, first_row + chunk.num_tokens))
    return [first_row + chunk.num_tokens - 1] if chunk.wants_logits else []
