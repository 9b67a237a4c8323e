"""Turns a StepPlan into the joined tensors of one step, and runs the lane on them."""

# T tokens of the step, L rows whose logits are wanted, P tokens that are pending

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock.attention.backend import ForwardInputs
from penstock.engine.choices import Choices, RowAsk
from penstock.engine.draws import Draw, draw_tokens, numbers_of
from penstock.engine.sampler import Sampler
from penstock.lanes.lane import Lane
from penstock.request import Chunk, SamplingParams, StepPlan, TokenLogprob
from penstock.request import Sequence as SequenceState


class StepLogits:
    """The logits of a step by sequence, [rows, vocabulary], no row where none was wanted; and what was chosen."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows_by_sequence: Mapping[int, slice],
        pooled: Mapping[int, torch.Tensor],
        asks: Sequence[RowAsk],
        last_tokens: torch.Tensor,
        begun: torch.cuda.Event | None,  # when the device began the step; None: the host computes it itself
    ) -> None:
        self._logits = logits
        self._begun = begun
        self._rows = rows_by_sequence
        self.pooled = pooled  # of the sequences that want an embedding: the sum, or the last, of the chunk's states
        self.place_by_sequence = {ask.sequence.id: place for place, ask in enumerate(asks)}
        last_rows = [rows_by_sequence[ask.sequence.id].stop - 1 for ask in asks]
        if len(last_rows) < len(logits):
            logits = logits[torch.tensor(last_rows, dtype=torch.long, device=logits.device)]
        self._choices = Choices(logits, asks, last_tokens)
        self.tokens_on_device = self._choices.tokens_on_device
        self._is_done: torch.cuda.Event | None = None
        if begun is not None:
            self._is_done = torch.cuda.Event(enable_timing=True)
            self._is_done.record()

    def __getitem__(self, sequence_id: int) -> torch.Tensor:
        return self._logits[self._rows[sequence_id]]

    def wait(self) -> None:
        """Returns when the device is done with the step."""
        if self._is_done is not None:
            self._is_done.synchronize()

    def choice(self, sequence_id: int) -> tuple[int, TokenLogprob | None]:
        """The sequence's next token and its logprob, once the step is done; raises why there is none."""
        return self._choices.of(self.place_by_sequence[sequence_id])

    def device_seconds(self) -> float | None:
        """What the device took for the step, once it is done; None where the host computed it."""
        if self._begun is None or self._is_done is None:
            return None
        return self._begun.elapsed_time(self._is_done) / 1e3


class Runner:
    """A step may begin while the one before it still runs: tokens that nobody has read yet are taken on the device."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self.lane = lane
        self.device = device
        # Which tokens the last step chose, and for whom; its logits are not kept with them.
        self._last: tuple[Mapping[int, int], torch.Tensor] = ({}, torch.empty(0))

    def run(
        self,
        plan: StepPlan,
        sequences: Mapping[int, SequenceState],
        samplers: Mapping[int, Sampler],
        after_layer: Callable[[int, int], None] | None = None,
    ) -> StepLogits:
        """Logits by sequence: of the chunk's last token, or of every token where prompt logprobs are wanted."""
        rows_by_sequence: dict[int, slice] = {}
        found: list[torch.Tensor] = []
        pooled: dict[int, torch.Tensor] = {}
        begun = None
        if self.device.type == "cuda":
            begun = torch.cuda.Event(enable_timing=True)
            begun.record()
        # What goes through all layers has one forward, and each chunk that stops between two its own.
        whole = [chunk for chunk in plan.chunks if chunk.layers is None]
        parts = [*([whole] if whole else []), *([chunk] for chunk in plan.chunks if chunk.layers is not None)]
        for chunks in parts:
            logit_rows: list[int] = []
            row, num_found = 0, sum(map(len, found))
            for chunk in chunks:
                wanted = _logit_rows(chunk, sequences[chunk.sequence_id], row)
                first = num_found + len(logit_rows)
                rows_by_sequence[chunk.sequence_id] = slice(first, first + len(wanted))
                logit_rows += wanted
                row += chunk.num_tokens
            inputs = self._inputs(chunks, sequences, logit_rows, self._pooling(chunks, sequences, pooled))
            found.append(self.lane.run(replace(inputs, after_layer=after_layer, layers=chunks[0].layers)))
        logits = torch.cat(found) if len(found) > 1 else found[0]
        # Masks of grammars are computed here, while the device computes the step.
        choosing = [chunk for chunks in parts for chunk in chunks if chunk.wants_logits]
        asks = [self._ask(c, sequences[c.sequence_id], samplers[c.sequence_id]) for c in choosing]
        step = StepLogits(logits, rows_by_sequence, pooled, asks, self._last[1], begun)
        self._last = (step.place_by_sequence, step.tokens_on_device)
        return step

    def warm_up(self, vocab_size: int) -> None:
        """Compiles what draws tokens, for few rows and for many."""
        if self.device.type == "cuda":
            drawn = Draw.of(SamplingParams(temperature=1.0, top_p=0.5), 0, 0)
            for num_rows in (1, 17, 65):
                numbers_FL = torch.from_numpy(numbers_of([drawn] * num_rows)).to(self.device)
                draw_tokens(torch.zeros(num_rows, vocab_size, device=self.device), numbers_FL, [drawn] * num_rows)

    def _ask(self, chunk: Chunk, sequence: SequenceState, sampler: Sampler) -> RowAsk:
        is_pending = len(sequence.tokens) < chunk.end
        place = self._last[0][sequence.id] if is_pending else None
        num_written = chunk.end - sequence.num_prompt_tokens
        return RowAsk(sequence=sequence, sampler=sampler, num_written=num_written, pending_place=place)

    def _pooling(
        self, chunks: Sequence[Chunk], sequences: Mapping[int, SequenceState], pooled: dict[int, torch.Tensor]
    ) -> Callable[[torch.Tensor], None] | None:
        if not any(sequences[chunk.sequence_id].request.sampling.pooling for chunk in chunks):
            return None

        def take_hidden(hidden_TM: torch.Tensor) -> None:
            end = 0
            for chunk in chunks:
                end += chunk.num_tokens
                sequence = sequences[chunk.sequence_id]
                # Rows of an overlap were counted before.
                first = end - (chunk.end - max(chunk.start, sequence.num_computed))
                if sequence.request.sampling.pooling == "mean":
                    pooled[sequence.id] = hidden_TM[first:end].sum(0, dtype=torch.float32)
                elif sequence.request.sampling.pooling == "last":
                    pooled[sequence.id] = hidden_TM[end - 1].float()

        return take_hidden

    def _inputs(
        self,
        chunks: Sequence[Chunk],
        sequences: Mapping[int, SequenceState],
        logit_rows: list[int],
        take_hidden: Callable[[torch.Tensor], None] | None,
    ) -> ForwardInputs:
        place_by_sequence, last_tokens = self._last
        asks_others = len(logit_rows) != sum(chunk.wants_logits for chunk in chunks)  # for prompt logprobs
        query_starts = [0]
        for chunk in chunks:
            query_starts.append(query_starts[-1] + chunk.num_tokens)
        ids = np.zeros(query_starts[-1], np.int64)
        positions = np.empty(query_starts[-1], np.int64)
        pending_rows: list[int] = []
        places: list[int] = []  # of the pending tokens among those that the last step chose
        for row, chunk in zip(query_starts, chunks, strict=False):
            tokens = sequences[chunk.sequence_id].tokens[chunk.start : chunk.end]
            ids[row : row + len(tokens)] = tokens
            positions[row : row + chunk.num_tokens] = np.arange(chunk.start, chunk.end)
            if len(tokens) < chunk.num_tokens:
                pending_rows.append(row + len(tokens))
                places.append(place_by_sequence[chunk.sequence_id])
        parts = self._tensors(ids, positions, logit_rows, pending_rows, places)
        ids_T, positions_T, logit_rows_L, pending_rows_P, places_P = parts
        if pending_rows:
            ids_T[pending_rows_P] = last_tokens[places_P]
        states = [chunk.state for chunk in chunks if chunk.state]
        requests = [sequences[chunk.sequence_id].request for chunk in chunks]
        return ForwardInputs(
            ids_T=ids_T,
            positions_T=positions_T,
            query_starts=tuple(query_starts),
            context_lens=tuple(chunk.end for chunk in chunks),
            block_table=tuple(tuple(sequences[chunk.sequence_id].block_ids) for chunk in chunks),
            rotary_variants=tuple(request.rotary for request in requests),
            sequence_ids=tuple(chunk.sequence_id for chunk in chunks),
            logit_rows=logit_rows_L,
            asks_last=None if asks_others else tuple(chunk.wants_logits for chunk in chunks),
            state_slots=tuple(state.slot for state in states),
            state_loads=tuple((state.source, state.slot) for state in states if state.source != state.slot),
            state_saves=tuple((state.slot, state.save_to) for state in states if state.save_to is not None),
            take_hidden=take_hidden,
            source_lens=tuple(0 if request.source is None else request.source.num_tokens for request in requests),
        )

    def _tensors(self, *parts: Sequence[int] | np.ndarray) -> list[torch.Tensor]:
        """Puts the parts on the device in one copy; from pinned memory it is not waited for."""
        sizes = [len(part) for part in parts]
        packed = torch.empty(sum(sizes), dtype=torch.long, pin_memory=self.device.type == "cuda")
        for part, place in zip(parts, packed.split(sizes), strict=True):
            place.numpy()[:] = part
        return list(packed.to(self.device, non_blocking=True).split(sizes))


def _logit_rows(chunk: Chunk, sequence: SequenceState, first_row: int) -> list[int]:
    if sequence.request.sampling.prompt_logprobs is not None and sequence.num_generated == 0:
        # Rows of an overlap were counted with the chunk before.
        num_again = max(0, sequence.num_computed - chunk.start)
        return list(range(first_row + num_again, first_row + chunk.num_tokens))
    return [first_row + chunk.num_tokens - 1] if chunk.wants_logits else []
