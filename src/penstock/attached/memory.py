"""What a chunk of a transformers forward adds to the bytes that are held already, and the largest chunk that fits."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.config import MB
from penstock.errors import MemoryTooSmall
from penstock.models.generic_spec import generic_spec
from penstock.models.shapes import generic_shape
from penstock.plan.machine import resident_bytes
from penstock.plan.memory import AttentionTiling, MemoryModel, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMemory:
    shape: ModelShape
    keeps_scores: bool  # eager attention holds the scores of all heads

    def added_bytes(self, *, batch: int, chunk: int, context: int) -> int:
        """Activations, mask, keys and values of `chunk` tokens per sequence that end at `context`."""
        shape = self.shape
        tiling = AttentionTiling(query_rows=chunk, key_rows=context)
        model = MemoryModel(shape=shape, tiling=tiling, runtime_bytes=0, block_size=1)
        layer_kv = 2 * shape.num_kv_heads * shape.head_size * shape.dtype_bytes
        mask = chunk * context * (2 + shape.dtype_bytes)
        # Every layer's keys and values are copied into longer tensors; the holes of the shorter ones do not fit them.
        concatenated = (context - chunk) * shape.kv_bytes_per_token
        repeated = context * layer_kv * (shape.num_heads // shape.num_kv_heads)
        scores = shape.num_heads * chunk * context * (4 + 2 * shape.dtype_bytes) if self.keeps_scores else 0
        per_sequence = model.activation_bytes(chunk, context) + mask + concatenated + repeated + scores
        return batch * (per_sequence + chunk * shape.kv_bytes_per_token + model.logits_bytes(1))

    def largest_chunk(self, *, batch: int, start: int, free_bytes: int, upper: int) -> int:
        """0 if not even one token fits."""

        def added(chunk: int) -> int:
            return self.added_bytes(batch=batch, chunk=chunk, context=start + chunk)

        return bisect_right(range(1, upper + 1), free_bytes, key=added)

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
    config = model.config.get_text_config(decoder=True)
    sizes = config.to_dict()
    usual = {name: sizes[own] for name, own in config.attribute_map.items() if own in sizes}
    shape = generic_shape(
        generic_spec(sizes | usual),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        item_bytes=model.dtype.itemsize,
        keeps_own_cache=True,
    )
    # Copies are counted by `added_bytes`, and no library joins the matrices of a gated MLP here.
    shape = replace(shape, copied_bytes_per_token=0, largest_matrix=shape.hidden_size * shape.intermediate_size)
    return ForwardMemory(shape=shape, keeps_scores=config._attn_implementation == "eager")


def held_bytes(device: torch.device) -> int:
    """What the device's allocator has handed out on a GPU, the resident process elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
