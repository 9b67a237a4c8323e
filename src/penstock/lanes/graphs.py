"""Steps of single tokens captured as CUDA graphs: one launch instead of hundreds, for batches on a ladder of sizes."""

from __future__ import annotations

import gc
import warnings
from bisect import bisect_left
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from penstock.attention.backend import ForwardInputs
from penstock.attention.chunk_tables import ChunkTables
from penstock.plan.recordings import DECODE_SIZES as SIZES
from penstock.plan.recordings import DRIVER_BYTES

if TYPE_CHECKING:
    from penstock.attention.cuda import DecodeAttention
    from penstock.cache.storage import StateStorage
    from penstock.foreign.pages import JoinedForward
    from penstock.models.decoder import Decoder


class DecodeGraphs:
    """A step is padded to the next size; its padding attends to nothing. A size is captured when it is first needed.

    The model's forward gives one row for each token, and asks the device for nothing on the way.
    """

    def __init__(
        self, model: Decoder | JoinedForward, attention: DecodeAttention, states: StateStorage | None = None
    ) -> None:
        """`states`: those of recurrent layers; None: the model has none."""
        self.model = model
        self.attention = attention
        self.is_replaying = True  # else every step is launched kernel by kernel, on the same padded inputs
        self.gave_up = False  # a capture failed, and none is tried again
        more: dict[str, Any] = {} if states is None else {"states": states}
        self._forward = partial(model.forward, **more)
        self._tokens = PaddedTokens(attention.max_rows, model.device, states, has_longer=False)
        self._captured: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        self._rows: torch.Tensor | None = None  # that any capture gives; None: nothing is captured
        self._pool: Any = None  # one pool of memory for all captures
        self._stream: torch.cuda.Stream | None = None  # one for all: the matrix library takes a workspace for each
        self.kept_bytes = 0  # by what was captured

    def fits(self, inputs: ForwardInputs) -> bool:
        num_tokens = len(inputs.ids_T)
        is_decode = inputs.query_starts == tuple(range(num_tokens + 1)) and inputs.num_chunks == num_tokens
        if self.gave_up:
            return False
        return is_decode and 0 < num_tokens <= self.attention.max_rows and len(set(inputs.rotary_variants)) == 1

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """What the model gives for the step's tokens; the next call writes over it."""
        num_tokens = len(inputs.ids_T)
        self._tokens.fill(inputs)
        self.attention.begin_step(inputs)
        size = min(SIZES[bisect_left(SIZES, num_tokens)], self.attention.max_rows)
        key = (size, inputs.rotary_variants[0])
        if self.is_replaying and key not in self._captured:
            with or_launched("decodes", self._tokens.device) as outcome:
                self._captured[key] = self._capture(*key)
            self.gave_up = outcome.has_failed
        if not self.is_replaying or self.gave_up:
            self.attention.use_rows(size)
            self._tokens.fill_tables(inputs)
            return self._forward(self._tokens.inputs(*key), self.attention)[:num_tokens]
        self._tokens.fill_tables(inputs)
        self._captured[key].replay()
        assert self._rows is not None
        return self._rows[:num_tokens]

    @torch.inference_mode()
    def can_capture(self) -> bool:
        """Whether the model asks the device for nothing: what it would then do next cannot be captured."""
        self.attention.forget_rows()
        self.attention.use_rows(1)
        inputs = self._tokens.inputs(1)
        self._forward(inputs, self.attention)  # compiles, and that may ask
        try:
            with _asking_raises():
                self._forward(inputs, self.attention)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return False
        return True

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Captures every size ahead of time, so that no request waits for it."""
        self.attention.forget_rows()  # a capture computes, and would write where the last step wrote
        most = self.attention.max_rows
        with or_launched("decodes", self._tokens.device) as outcome:
            for size in (most, *(size for size in reversed(SIZES) if size < most)):  # smaller ones fit into the pool
                if (size, "default") not in self._captured:
                    self._captured[size, "default"] = self._capture(size, "default")
        self.gave_up = outcome.has_failed

    def _capture(self, size: int, variant: str) -> torch.cuda.CUDAGraph:
        self.attention.use_rows(size)
        self._tokens.forget_tables()
        inputs = self._tokens.inputs(size, variant)
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles the kernels; it writes what the replay will write again
            rows = self._forward(inputs, self.attention)
        torch.cuda.current_stream().wait_stream(stream)
        if self._rows is None:
            self._rows = rows.new_empty(self.attention.max_rows, *rows.shape[1:])
        graph = torch.cuda.CUDAGraph()
        with (
            without_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self._rows[:size].copy_(self._forward(inputs, self.attention))
        self._pool = graph.pool()
        self.kept_bytes = kept_bytes(self._pool, len(self._captured) + 1)
        return graph


def kept_bytes(pool: tuple[int, int], num_captures: int) -> int:
    """Counts what captures keep of the card for their replays, beside what tensors hold."""
    segments = (each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(pool))
    return num_captures * DRIVER_BYTES + sum(each["total_size"] - each["allocated_size"] for each in segments)


@dataclass
class CaptureOutcome:
    has_failed: bool = False


@contextmanager
def or_launched(name: str, device: torch.device) -> Generator[CaptureOutcome]:
    """Says of a capture that fails that its steps are launched kernel by kernel: it found no memory, say."""
    outcome = CaptureOutcome()
    try:
        yield outcome
    except RuntimeError as error:
        outcome.has_failed = True
        if device.type == "cuda":  # the capture left its own stream behind as the current one
            torch.cuda.set_stream(torch.cuda.default_stream(device))
        warnings.warn(f"{name} are launched kernel by kernel: capturing them failed ({error})", stacklevel=3)


class PaddedTokens:
    """Holds the tokens of a step where captures read them; what lies past them is padding."""

    def __init__(
        self, max_rows: int, device: torch.device, states: StateStorage | None = None, *, has_longer: bool = True
    ) -> None:
        self.device = device
        self._ids = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._num_real = torch.full((1,), max_rows, dtype=torch.int32, device=device)
        self._tables: ChunkTables | None = None
        if states is not None:
            dtype = states.dtype
            self._tables = ChunkTables.of_padded(max_rows, has_longer=has_longer, dtype=dtype, device=device)

    def fill(self, inputs: ForwardInputs) -> None:
        num_tokens = len(inputs.ids_T)
        self._ids[:num_tokens].copy_(inputs.ids_T)
        self._positions[:num_tokens].copy_(inputs.positions_T)
        self._num_real.fill_(num_tokens)

    def fill_tables(self, inputs: ForwardInputs) -> None:
        """Comes last before the step runs: what is computed for a capture would advance the states too."""
        if self._tables is not None:
            self._tables.fill(inputs.query_starts, inputs.state_slots)

    def forget_tables(self) -> None:
        if self._tables is not None:
            self._tables.forget()

    def inputs(self, size: int, variant: str = "default") -> ForwardInputs:
        """Makes the inputs of a capture: attention is told when it is replayed which chunks the tokens belong to."""
        return ForwardInputs(
            ids_T=self._ids[:size],
            positions_T=self._positions[:size],
            query_starts=(),
            context_lens=(),
            block_table=(),
            rotary_variants=(variant,),
            sequence_ids=(),
            logit_rows=self._ids[:0],
            num_real_1=self._num_real,
            chunk_tables=None if self._tables is None else self._tables.of_size(size),
        )


@contextmanager
def _asking_raises() -> Generator[None]:
    """Makes asking raise in the whole process; not every way of asking is seen: a capture finds the others."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def without_collection() -> Generator[None]:
    """A forgotten graph that is collected while another is captured would be freed on the capturing stream."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
