"""An attached encoder-decoder model: its `generate` has the source read in exact tiles, a decoder prompt in chunks."""

# B batch, S tokens of the source, M hidden size

from __future__ import annotations

import inspect
import time
from importlib import import_module
from typing import Any, Self

import torch

from penstock.errors import InvalidSetting, PromptTooLong, UnsupportedModel
from penstock.lanes.attached_prompt import OnProgress, Reading
from penstock.lanes.forward_call import CACHE_NAMES, DecoderCall, read_in_chunks
from penstock.lanes.forward_memory import held_bytes
from penstock.lanes.seq2seq_spec import seq2seq_shape, seq2seq_spec
from penstock.lanes.source_check import check_decoder, check_encoder
from penstock.lanes.source_encoder import read_source
from penstock.plan.memory import AttentionTiling, MemoryModel
from penstock.request import ChunkRecord, PrefillProgress

TILING = AttentionTiling(query_rows=512, key_rows=1024)
MIB = 2**20
REFUSED = ("output_hidden_states", "output_attentions")


class SourceAttachment:
    """What stands in front of a model's `forward` and its encoder's while `generate` runs. As a context manager it
    detaches at the end."""

    def __init__(
        self, model: Any, *, chunk_size: int, budget_bytes: int | None, on_progress: OnProgress | None
    ) -> None:
        found = check_encoder(model, is_loaded=True)
        if not found.exact:
            raise UnsupportedModel(
                f"The source of {type(model).__name__} cannot be read in tiles: {found.reason}. Use it without attach."
            )
        self.model = model
        self.encoder = model.get_encoder()
        self.chunk_size = chunk_size
        self.budget_bytes = budget_bytes
        shape = seq2seq_shape(seq2seq_spec(model.config.to_dict()), model.dtype.itemsize, num_parameters=0)
        self.memory = MemoryModel(shape=shape, tiling=TILING, runtime_bytes=0, block_size=1)  # beside what is held
        self.on_progress = on_progress
        self.reading: Reading | None = None  # None: nothing has been read yet
        self._num_generates = 0
        self._depth = 0  # of generate calls that run now
        self._is_reading = False  # tiles go through the encoder's own forward
        self._is_decoder_proven = False
        self._generate, self._forward, self._encode = model.generate, model.forward, self.encoder.forward
        self._output: Any = import_module("transformers.modeling_outputs").BaseModelOutput

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def restore(self) -> None:
        del self.model.generate, self.model.forward, self.encoder.forward

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
            return self._encode(*args, **kwargs)
        input_ids = args[0] if args else kwargs.get("input_ids")
        if input_ids is None:
            raise InvalidSetting("inputs_embeds of a source cannot be read in tiles. Give input_ids, or detach.")
        for name in REFUSED:
            if kwargs.get(name):
                raise InvalidSetting(f"{name} keeps every layer's states of the whole source. Leave it out, or detach.")
        return self._read(input_ids, kwargs.get("attention_mask"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the model's forward: a decoder prompt that is longer than a chunk is read in chunks."""
        prompt = None if self._depth == 0 or args else DecoderCall.of(kwargs)
        if prompt is None or prompt.num_tokens <= self.chunk_size:
            return self._forward(*args, **kwargs)
        self._require_exact_decoder()
        return read_in_chunks(
            self._forward,
            prompt,
            model=self.model,
            cache=(CACHE_NAMES[0], kwargs.get(CACHE_NAMES[0])),
            chunk_limit=lambda start: self.chunk_size,
            num_logit_rows=1,
            takes_logit_rows="logits_to_keep" in inspect.signature(self._forward).parameters,
            on_chunk=lambda start, end, reason: None,
        )

    def _require_exact_decoder(self) -> None:
        """Checked when the first long decoder prompt comes, because most answers begin with one token."""
        if self._is_decoder_proven:
            return
        depth, self._depth = self._depth, 0  # the check's own forwards are the model's
        try:
            found = check_decoder(self.model)
        finally:
            self._depth = depth
        if not found.exact:
            raise UnsupportedModel(
                f"The decoder prompt of {type(self.model).__name__} cannot be read in chunks: {found.reason}. Shorten "
                f"it to {self.chunk_size} tokens, or detach the model."
            )
        self._is_decoder_proven = True

    def _read(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor | None) -> Any:
        tile, adjustments = self._tile(*ids_BS.shape)
        peak_bytes = held_bytes(self.model.device) + self._added_bytes(*ids_BS.shape, tile)
        chunks: list[ChunkRecord] = []
        began = last = time.perf_counter()

        def note(done: int, total: int) -> None:
            nonlocal last
            now = time.perf_counter()
            chunks.append(ChunkRecord(start=max(0, done - tile), end=done, ms=(now - last) * 1e3))
            last = now
            if self.on_progress is not None:
                self.on_progress(self._progress(ids_BS.shape[1], done / total, now - began, peak_bytes))

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
        allowed = self.memory.largest_chunk(start=num_tokens, budget_bytes=free // batch, upper=wanted)
        if allowed < 1:
            least = self._added_bytes(batch, num_tokens, 1)
            raise PromptTooLong(
                f"A source of {num_tokens} tokens needs at least {least / MIB:.0f} MiB beside what is held; the budget "
                f"leaves {max(0, free) / MIB:.0f} MiB. Shorten it or raise memory."
            )
        if allowed == wanted:
            return wanted, ()
        return allowed, (f"tiles have {allowed} rows instead of {wanted}, to stay within memory",)

    def _added_bytes(self, batch: int, num_tokens: int, tile: int) -> int:
        return self.memory.peak_bytes(chunk=tile, context=num_tokens) * batch

    def _progress(self, num_tokens: int, share: float, elapsed_s: float, peak_bytes: int) -> PrefillProgress:
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
            predicted_peak_bytes=peak_bytes,
        )
