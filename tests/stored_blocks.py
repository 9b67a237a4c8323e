"""Blocks of every type that a GGUF keeps in few bits: random bytes with factors of a sane size."""

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize

from penstock.models.gguf_blocks import LARGE, SMALL


def sane_blocks(kind: Type, num_rows: int, num_inputs: int, *, seed: int = 0, size: float = 0.05) -> np.ndarray:
    """Rows of bytes whose values are about as large as `size`, in any type that the gguf package reads."""
    if kind not in SMALL | LARGE:
        values = np.random.default_rng(seed).normal(0, size, (num_rows, num_inputs)).astype(np.float32)
        return quants.quantize(values, kind)
    found = dequantize(random_blocks(kind, num_rows, num_inputs, seed=seed, size=1.0), kind).std()
    if "power" in (SMALL | LARGE)[kind]:
        return random_blocks(kind, num_rows, num_inputs, seed=seed)
    return random_blocks(kind, num_rows, num_inputs, seed=seed, size=size / found)


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
