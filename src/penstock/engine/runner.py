"""Turns a StepPlan into the packed tensors of one step, and runs the lane on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from penstock.attention.backend import ForwardInputs
from penstock.lanes.lane import Lane
from penstock.request import Chunk, Sequence, StepPlan


class StepLogits(Mapping[int, torch.Tensor]):
    """The logits of a step by sequence: [rows, vocabulary], no row where none was wanted."""

    def __init__(
        self, logits: torch.Tensor, rows_by_sequence: Mapping[int, slice], pooled: Mapping[int, torch.Tensor]
    ) -> None:
        self._logits = logits
        self._rows = rows_by_sequence
        self.pooled = pooled  # of the sequences that want an embedding: the sum, or the last, of the chunk's states

    def __getitem__(self, sequence_id: int) -> torch.Tensor:
        return self._logits[self._rows[sequence_id]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def greedy_tokens(self) -> dict[int, int]:
        """The likeliest next token of each sequence that has logits, chosen on the device and read in one go."""
        tokens = self._logits.argmax(-1).tolist() if len(self._logits) else []
        return {
            sequence_id: tokens[rows.stop - 1] for sequence_id, rows in self._rows.items() if rows.stop > rows.start
        }


class Runner:
    def __init__(self, lane: Lane, device: torch.device) -> None:
        self.lane = lane
        self.device = device

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepLogits:
        """Logits by sequence: of the chunk's last token, or of every token where prompt logprobs are wanted."""
        rows_by_sequence: dict[int, slice] = {}
        logit_rows: list[int] = []
        row = 0
        for chunk in plan.chunks:
            wanted = _logit_rows(chunk, sequences[chunk.sequence_id], row)
            rows_by_sequence[chunk.sequence_id] = slice(len(logit_rows), len(logit_rows) + len(wanted))
            logit_rows += wanted
            row += chunk.num_tokens
        pooled: dict[int, torch.Tensor] = {}
        logits = self.lane.run(self._inputs(plan, sequences, logit_rows, self._pooling(plan, sequences, pooled)))
        return StepLogits(logits, rows_by_sequence, pooled)

    def _pooling(
        self, plan: StepPlan, sequences: Mapping[int, Sequence], pooled: dict[int, torch.Tensor]
    ) -> Callable[[torch.Tensor], None] | None:
        if not any(sequences[chunk.sequence_id].request.sampling.pooling for chunk in plan.chunks):
            return None

        def take_hidden(hidden_TM: torch.Tensor) -> None:
            end = 0
            for chunk in plan.chunks:
                end += chunk.num_tokens
                sequence = sequences[chunk.sequence_id]
                first = end - (chunk.end - sequence.num_computed)  # rows of an overlap were counted before
                if sequence.request.sampling.pooling == "mean":
                    pooled[sequence.id] = hidden_TM[first:end].sum(0, dtype=torch.float32)
                elif sequence.request.sampling.pooling == "last":
                    pooled[sequence.id] = hidden_TM[end - 1].float()

        return take_hidden

    def _inputs(
        self,
        plan: StepPlan,
        sequences: Mapping[int, Sequence],
        logit_rows: list[int],
        take_hidden: Callable[[torch.Tensor], None] | None,
    ) -> ForwardInputs:
        ids: list[int] = []
        positions: list[int] = []
        query_starts = [0]
        for chunk in plan.chunks:
            ids += sequences[chunk.sequence_id].tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            query_starts.append(len(ids))
        return ForwardInputs(
            ids_T=self._tensor(ids),
            positions_T=self._tensor(positions),
            query_starts=tuple(query_starts),
            context_lens=tuple(chunk.end for chunk in plan.chunks),
            block_table=tuple(tuple(sequences[chunk.sequence_id].block_ids) for chunk in plan.chunks),
            rotary_variants=tuple(sequences[chunk.sequence_id].request.rotary for chunk in plan.chunks),
            sequence_ids=tuple(chunk.sequence_id for chunk in plan.chunks),
            logit_rows=self._tensor(logit_rows),
            state_slots=tuple(chunk.state.slot for chunk in plan.chunks if chunk.state),
            state_loads=tuple(
                (chunk.state.source, chunk.state.slot)
                for chunk in plan.chunks
                if chunk.state and chunk.state.source != chunk.state.slot
            ),
            state_saves=tuple(
                (chunk.state.slot, chunk.state.save_to)
                for chunk in plan.chunks
                if chunk.state and chunk.state.save_to is not None
            ),
            take_hidden=take_hidden,
            source_lens=tuple(_num_source(sequences[chunk.sequence_id]) for chunk in plan.chunks),
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        """On the device; a copy from pinned memory is not waited for."""
        is_gpu = self.device.type == "cuda"
        return torch.tensor(values, dtype=torch.long, pin_memory=is_gpu).to(self.device, non_blocking=True)


def _num_source(sequence: Sequence) -> int:
    source = sequence.request.source
    return 0 if source is None else source.num_tokens


def _logit_rows(chunk: Chunk, sequence: Sequence, first_row: int) -> list[int]:
    if sequence.request.sampling.prompt_logprobs is not None and sequence.num_generated == 0:
        # Rows of an overlap were counted with the chunk before.
        return list(range(first_row + sequence.num_computed - chunk.start, first_row + chunk.num_tokens))
    return [first_row + chunk.num_tokens - 1] if chunk.wants_logits else []
