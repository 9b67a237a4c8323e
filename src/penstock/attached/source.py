"""The sources of an attached encoder-decoder model, read in exact tiles, and decoder prompts, read in chunks."""

# B batch, S tokens of the source, M hidden size

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock.attached.memory import held_bytes
from penstock.attached.reading import ChunkBounds, Chunks, Reading
from penstock.config import MIB
from penstock.errors import InvalidSetting, PromptTooLong, UnsupportedModel
from penstock.foreign.forward import Cached, CachedForward, TextCall, cache_in, num_tokens, read_in_chunks
from penstock.foreign.source_encoder import read_source
from penstock.models.seq2seq_spec import seq2seq_shape, seq2seq_spec
from penstock.plan.memory import AttentionTiling, MemoryModel
from penstock.proof.source import check_decoder, check_encoder

TILING = AttentionTiling(query_rows=512, key_rows=1024)
REFUSED = {
    "output_hidden_states": "keeps every layer's states of the whole source",
    "output_attentions": "keeps every layer's weights of the whole source",
    "global_attention_mask": "names tokens that see the whole source, which no tile has",
}


class SourceReader:
    """Reads the sources that `generate` hands to the model's encoder, and long prompts of its decoder."""

    def __init__(self, model: Any, bounds: ChunkBounds) -> None:
        found = check_encoder(model, is_loaded=True)
        if not found.exact:
            raise UnsupportedModel(
                f"The source of {type(model).__name__} cannot be read in tiles: {found.reason}. Use it without attach."
            )
        self.model = model
        self.encoder = model.get_encoder()
        self.bounds = bounds
        shape = seq2seq_shape(seq2seq_spec(model.config.to_dict()), model.dtype.itemsize, num_parameters=0)
        self.memory = MemoryModel(shape=shape, tiling=TILING, runtime_bytes=0, block_size=1)  # beside what is held
        self.reading: Reading | None = None
        self._forward = CachedForward(model, forward=model.forward)
        self._request_id = 0
        self._is_decoder_proven = False

    def begin(self, request_id: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        self._request_id = request_id
        return kwargs

    def end(self) -> None:
        """Keeps nothing of a call."""

    def takes(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a call is a decoder prompt of more than a chunk, over a source that is read."""
        is_decoder = inputs.get("decoder_input_ids") is not None and inputs.get("encoder_outputs") is not None
        return is_decoder and num_tokens(inputs) > self.bounds.chunk_size

    def read(self, inputs: Mapping[str, Any]) -> Any:
        self._require_exact_decoder()
        return read_in_chunks(
            self._forward,
            TextCall.of(inputs),
            Cached(cache=cache_in(inputs)),
            chunk_limit=lambda start: self.bounds.chunk_size,
            num_logit_rows=1,
        )

    def _require_exact_decoder(self) -> None:
        """Checked when the first long decoder prompt comes, because most answers begin with one token."""
        if self._is_decoder_proven:
            return
        found = check_decoder(self.model)
        if not found.exact:
            raise UnsupportedModel(
                f"The decoder prompt of {type(self.model).__name__} cannot be read in chunks: {found.reason}. Shorten "
                f"it to {self.bounds.chunk_size} tokens, or detach the model."
            )
        self._is_decoder_proven = True

    def read_source(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **others: Any
    ) -> Any:
        """Gives what the encoder's forward gives for these of its arguments."""
        from transformers.modeling_outputs import BaseModelOutput

        if input_ids is None:
            raise InvalidSetting("inputs_embeds of a source cannot be read in tiles. Give input_ids, or detach.")
        for name, why in REFUSED.items():
            value = others.get(name)
            if value is not None and bool(value.any() if isinstance(value, torch.Tensor) else value):
                raise InvalidSetting(f"{name} {why}. Leave it out, or detach.")
        batch, length = input_ids.shape
        tile, adjustments = self._tile(batch, length)
        chunks = Chunks(
            request_id=self._request_id,
            num_tokens=length,
            num_cached=0,
            device=self.model.device,
            on_progress=self.bounds.on_progress,
            adjustments=adjustments,
            predicted_bytes=held_bytes(self.model.device) + self._added_bytes(batch, length, tile),
        )

        def note(done: int, total: int) -> None:
            """Counts progress in tokens of the source; the passes over it count alike."""
            chunks.add(max(0, done - tile), done, num_done=int(length * (done / total)))

        states_BSM = read_source(self.model, input_ids, attention_mask, tile=tile, on_progress=note)
        self.reading = chunks.reading(f"read in tiles of {tile}", applied=tile < length)
        return BaseModelOutput(last_hidden_state=states_BSM)

    def _tile(self, batch: int, num_tokens: int) -> tuple[int, list[str]]:
        """The rows of a tile, and what is said where the budget lowers them."""
        wanted = min(self.bounds.chunk_size, num_tokens)
        if self.bounds.budget_bytes is None:
            return wanted, []
        free = self.bounds.budget_bytes - held_bytes(self.model.device)
        allowed = self.memory.largest_chunk(start=num_tokens, budget_bytes=free // batch, upper=wanted)
        if allowed < 1:
            least = self._added_bytes(batch, num_tokens, 1)
            raise PromptTooLong(
                f"A source of {num_tokens} tokens needs at least {least / MIB:.0f} MiB beside what is held; the budget "
                f"leaves {max(0, free) / MIB:.0f} MiB. Shorten it or raise memory."
            )
        if allowed == wanted:
            return wanted, []
        return allowed, [f"tiles have {allowed} rows instead of {wanted}, to stay within memory"]

    def _added_bytes(self, batch: int, num_tokens: int, tile: int) -> int:
        return self.memory.peak_bytes(chunk=tile, context=num_tokens) * batch
