"""Blocks of every type that a GGUF keeps in few bits: random bytes with factors of a sane size."""

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from penstock.models.gguf_blocks import LARGE, SMALL


def random_blocks(kind: Type, num_rows: int, num_inputs: int, *, seed: int = 0, size: float = 0.02) -> np.ndarray:
    """Rows of bytes as a file has them."""
    generator = np.random.default_rng(seed)
    items, block_bytes = GGML_QUANT_SIZES[kind]
    shape = num_rows, num_inputs // items
    blocks = generator.integers(0, 256, (*shape, block_bytes), dtype=np.uint8)
    fields = (SMALL | LARGE)[kind]
    for name in fields.keys() & {"scale", "lowest"}:
        first, end = fields[name]
        blocks[..., first:end] = generator.normal(0, size, shape).astype("<f2")[..., None].view(np.uint8)
    if "power" in fields:
        blocks[..., 0] = generator.integers(112, 122, shape)
    return blocks.reshape(num_rows, -1)
