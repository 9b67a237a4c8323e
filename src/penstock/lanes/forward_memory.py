"""What a chunk of a transformers forward adds to the bytes that are held already, and the largest chunk that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import MemoryTooSmall
from penstock.plan.machine import resident_bytes
from penstock.plan.memory import MB, AttentionTiling, MemoryModel, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMemory:
    shape: ModelShape
    keeps_scores: bool  # eager attention holds the scores of all heads

    def added_bytes(self, *, batch: int, chunk: int, context: int) -> int:
        """Activations, mask, keys and values of `chunk` tokens per sequence that end at `context`."""
        shape = self.shape
        tiling = AttentionTiling(query_rows=chunk, key_rows=context)
        model = MemoryModel(shape=shape, tiling=tiling, runtime_bytes=0, block_size=1)
        layer_kv = shape.kv_bytes_per_token // shape.num_layers
        mask = chunk * context * (2 + shape.dtype_bytes)
        # Every layer's keys and values are copied into longer tensors; the holes of the shorter ones do not fit them.
        concatenated = (context - chunk) * shape.kv_bytes_per_token
        repeated = context * layer_kv * (shape.num_heads // shape.num_kv_heads)
        scores = shape.num_heads * chunk * context * (4 + 2 * shape.dtype_bytes) if self.keeps_scores else 0
        per_sequence = model.activation_bytes(chunk, context) + mask + concatenated + repeated + scores
        return batch * (per_sequence + chunk * shape.kv_bytes_per_token + model.logits_bytes(1))

    def largest_chunk(self, *, batch: int, start: int, free_bytes: int, upper: int) -> int:
        """0 if not even one token fits."""
        low, high = 0, upper
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.added_bytes(batch=batch, chunk=middle, context=start + middle) <= free_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def require_room(self, *, batch: int, start: int, end: int, held_bytes: int, budget_bytes: int) -> None:
        """The keys and values of the whole prompt, and its last token, must fit."""
        rest = batch * (end - start - 1) * self.shape.kv_bytes_per_token
        needed = held_bytes + rest + self.added_bytes(batch=batch, chunk=1, context=end)
        if needed > budget_bytes:
            raise MemoryTooSmall(
                f"Reading tokens {start} to {end} of {batch} prompt(s) needs {needed / MB:.0f} MB even one by one; "
                f"memory is {budget_bytes / MB:.0f} MB. Shorten the prompt or raise memory."
            )


def forward_memory(model: Any) -> ForwardMemory:
    config = model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters())
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None) or 1
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    shape = ModelShape(
        num_layers=max(1, sum("attention" in kind and "linear" not in kind for kind in kinds)),  # that keep tokens
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=intermediate,
        vocab_size=config.vocab_size,
        num_parameters=weights,
        largest_matrix=config.hidden_size * intermediate,
        dtype_bytes=model.dtype.itemsize,
        max_context=getattr(config, "max_position_embeddings", 0),
    )
    return ForwardMemory(shape=shape, keeps_scores=config._attn_implementation == "eager")


def held_bytes(device: torch.device) -> int:
    """What the device's allocator has handed out on a GPU, the resident process elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
