"""An attached encoder-decoder model: its `generate` has the source read in exact tiles."""

# B batch, S tokens of the source, M hidden size

from __future__ import annotations

import time
from importlib import import_module
from typing import Any, Self

import torch

from penstock.errors import InvalidSetting, PromptTooLong, UnsupportedModel
from penstock.lanes.attached_prompt import OnProgress, Reading
from penstock.lanes.forward_memory import held_bytes
from penstock.lanes.seq2seq import tiled_encoder
from penstock.lanes.seq2seq_spec import seq2seq_shape, seq2seq_spec
from penstock.lanes.source_encoder import read_source
from penstock.plan.memory import AttentionTiling, MemoryModel
from penstock.request import ChunkRecord, PrefillProgress

TILING = AttentionTiling(query_rows=512, key_rows=1024)
MIB = 2**20
REFUSED = ("output_hidden_states", "output_attentions")


class SourceAttachment:
    """What stands in front of an encoder's `forward` while `generate` runs. Detaches as a context manager ends."""

    def __init__(
        self, model: Any, *, chunk_size: int, budget_bytes: int | None, on_progress: OnProgress | None
    ) -> None:
        encoder, problem = tiled_encoder(model)
        if encoder is None:
            raise UnsupportedModel(
                f"The source of {type(model).__name__} cannot be read in tiles ({problem}). Use it without attach."
            )
        self.model = model
        self.encoder = model.get_encoder()
        self.chunk_size = chunk_size
        self.budget_bytes = budget_bytes
        self.on_progress = on_progress
        self.reading: Reading | None = None  # None: nothing has been read yet
        self._num_generates = 0
        self._depth = 0  # of generate calls that run now
        self._is_reading = False  # tiles go through the encoder's own forward
        self._generate, self._forward = model.generate, self.encoder.forward
        self._output: Any = import_module("transformers.modeling_outputs").BaseModelOutput

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def restore(self) -> None:
        del self.model.generate, self.encoder.forward

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self._num_generates += self._depth == 0
        self._depth += 1
        try:
            return self._generate(*args, **kwargs)
        finally:
            self._depth -= 1

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the encoder's forward."""
        if self._depth == 0 or self._is_reading:
            return self._forward(*args, **kwargs)
        input_ids = args[0] if args else kwargs.get("input_ids")
        if input_ids is None:
            raise InvalidSetting("inputs_embeds of a source cannot be read in tiles. Give input_ids, or detach.")
        for name in REFUSED:
            if kwargs.get(name):
                raise InvalidSetting(f"{name} keeps every layer's states of the whole source. Leave it out, or detach.")
        return self._read(input_ids, kwargs.get("attention_mask"))

    def _read(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor | None) -> Any:
        tile, adjustments = self._tile(*ids_BS.shape)
        chunks: list[ChunkRecord] = []
        began = last = time.perf_counter()

        def note(done: int, total: int) -> None:
            nonlocal last
            now = time.perf_counter()
            chunks.append(ChunkRecord(start=max(0, done - tile), end=done, ms=(now - last) * 1e3))
            last = now
            if self.on_progress is not None:
                self.on_progress(self._progress(ids_BS.shape[1], done / total, now - began))

        self._is_reading = True
        try:
            states_BSM = read_source(self.model, ids_BS, mask_BS, tile=tile, on_progress=note)
        finally:
            self._is_reading = False
        self.reading = Reading(
            num_tokens=ids_BS.shape[1],
            num_cached=0,
            chunks=tuple(chunks),
            applied=tile < ids_BS.shape[1],
            reason=f"read in tiles of {min(tile, ids_BS.shape[1])}",
            adjustments=adjustments,
        )
        return self._output(last_hidden_state=states_BSM)

    def _tile(self, batch: int, num_tokens: int) -> tuple[int, tuple[str, ...]]:
        """The rows of a tile, and what is said where the budget lowers them."""
        wanted = min(self.chunk_size, num_tokens)
        if self.budget_bytes is None:
            return wanted, ()
        free = self.budget_bytes - held_bytes(self.model.device)
        shape = seq2seq_shape(seq2seq_spec(self.model.config.to_dict()), self.model.dtype.itemsize, num_parameters=0)
        memory = MemoryModel(shape=shape, tiling=TILING, runtime_bytes=0, block_size=1)
        allowed = memory.largest_chunk(start=num_tokens, budget_bytes=free // batch, upper=wanted)
        if allowed < 1:
            least = memory.peak_bytes(chunk=1, context=num_tokens) * batch
            raise PromptTooLong(
                f"A source of {num_tokens} tokens needs at least {least / MIB:.0f} MiB beside what is held; the budget "
                f"leaves {max(0, free) / MIB:.0f} MiB. Shorten it or raise memory."
            )
        if allowed == wanted:
            return wanted, ()
        return allowed, (f"tiles have {allowed} rows instead of {wanted}, to stay within memory",)

    def _progress(self, num_tokens: int, share: float, elapsed_s: float) -> PrefillProgress:
        """In tokens of the source; the passes over it count alike."""
        num_computed = int(num_tokens * share)
        speed = num_computed / elapsed_s if elapsed_s > 0 else 0.0
        return PrefillProgress(
            request_id=self._num_generates,
            num_computed=num_computed,
            num_cached=0,
            num_total=num_tokens,
            num_total_estimate=num_tokens,
            chunk_start=0,
            chunk_end=num_computed,
            elapsed_s=elapsed_s,
            tokens_per_s=speed,
            eta_s=(num_tokens - num_computed) / speed if speed > 0 else 0.0,
            memory_bytes=held_bytes(self.model.device),
            predicted_peak_bytes=0,
        )
