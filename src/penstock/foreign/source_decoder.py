"""The answering half of an encoder-decoder model: keys and values of the source, built in tiles, and decoder chunks."""

# B batch, S source tokens, T rows of a tile, M hidden size, K key-value heads, D head size, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.errors import UnsupportedModel
from penstock.foreign.forward import Cached, CachedForward
from penstock.foreign.source_encoder import position_limit


@dataclass(slots=True, kw_only=True)
class CrossStates:
    """What the decoder attends to: per decoder layer, keys and values of the whole source."""

    num_tokens: int
    k_BKSD: list[torch.Tensor] = field(default_factory=list)
    v_BKSD: list[torch.Tensor] = field(default_factory=list)


class SourceDecoder:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = model.get_decoder()
        self._forward = CachedForward(model)
        self.max_positions = position_limit(self.decoder)

    @torch.no_grad()
    def add_keys(self, cross: CrossStates, hidden_BTM: torch.Tensor, start: int) -> None:
        """Keys and values of a tile, made by the decoder's own layers: one token is run over that tile alone."""
        cache = self.new_cache()
        one = torch.zeros(hidden_BTM.shape[0], 1, dtype=torch.long, device=hidden_BTM.device)
        self.decoder(input_ids=one, encoder_hidden_states=hidden_BTM, past_key_values=cache, use_cache=True)
        layers = cache.cross_attention_cache.layers
        if not layers or any(layer.keys.shape[2] != hidden_BTM.shape[1] for layer in layers):
            raise UnsupportedModel("the decoder keeps no keys and values of the source")
        rows = slice(start, start + hidden_BTM.shape[1])
        for index, layer in enumerate(layers):
            for kept, part in ((cross.k_BKSD, layer.keys), (cross.v_BKSD, layer.values)):
                if index == len(kept):
                    batch, heads, _, size = part.shape
                    kept.append(part.new_empty(batch, cross.num_tokens, heads, size).transpose(1, 2))
                kept[index][:, :, rows] = part

    def cache(self, cross: CrossStates) -> Any:
        """A cache whose source part is full and whose own part is empty. The tensors are taken, not copied."""
        cache = self.new_cache()
        for index, (k, v) in enumerate(zip(cross.k_BKSD, cross.v_BKSD, strict=True)):
            cache.cross_attention_cache.update(k[:, :, :0], v[:, :, :0], index)
            layer = cache.cross_attention_cache.layers[index]
            layer.keys, layer.values = k, v
            cache.is_updated[index] = True
        return cache

    @torch.no_grad()
    def logits(self, ids_BT: torch.Tensor, hidden_BSM: torch.Tensor, cache: Any) -> torch.Tensor:
        """[B, V] in float32: what follows the last of the ids, which are added to the cache."""
        from transformers.modeling_outputs import BaseModelOutput

        inputs: dict[str, Any] = {
            "decoder_input_ids": ids_BT,
            "encoder_outputs": BaseModelOutput(last_hidden_state=hidden_BSM),
            "attention_mask": torch.ones(hidden_BSM.shape[:2], dtype=torch.long, device=hidden_BSM.device),
        }
        if self._forward.takes_logit_rows:
            inputs["logits_to_keep"] = 1
        return self._forward.call(inputs, Cached(cache=cache)).logits[:, -1].float()

    def new_cache(self) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(config=self.decoder.config), DynamicCache())
