"""Which steps a GPU captures ahead of time, and what their captures keep of its memory. No torch."""

from __future__ import annotations

from bisect import bisect_left

from penstock.config import GPU_STEP_SIZES
from penstock.plan.memory import MemoryModel

LARGEST_DECODES = 256  # sequences of the largest step of decodes
DECODE_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, LARGEST_DECODES + 1, 32))
LARGEST_CHUNKS = 2048  # tokens: larger steps last longer than their launches
CHUNK_SIZES = tuple(size for size in GPU_STEP_SIZES if size <= LARGEST_CHUNKS)
# What the driver keeps for one capture; `benchmarks/h200/held_memory.py` measures it.
DRIVER_BYTES = 160_000


def captured_size(num_tokens: int) -> int:
    """Finds the size that a step with chunks is padded to; the largest where nothing captured holds it."""
    return CHUNK_SIZES[min(bisect_left(CHUNK_SIZES, num_tokens), len(CHUNK_SIZES) - 1)]


def recording_bytes(memory: MemoryModel, *, most_decodes: int, most_chunks: int = 0) -> int:
    """Counts what the captures of all sizes keep: those of one kind share the memory of the widest.

    `most_chunks`: tokens of the widest step with chunks that is captured, in pieces between attentions; 0: none is.
    """
    num_captures = bisect_left(DECODE_SIZES, most_decodes) + 1
    if most_chunks:
        num_sizes = bisect_left(CHUNK_SIZES, most_chunks) + 1
        num_captures += num_sizes * (memory.shape.num_layers - memory.shape.num_recurrent_layers + 1)
    return memory.layer_bytes(most_decodes) + memory.layer_bytes(most_chunks) + num_captures * DRIVER_BYTES
