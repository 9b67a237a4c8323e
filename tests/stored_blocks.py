"""Blocks of every type that a GGUF keeps in few bits: random bytes with factors of a sane size."""

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize

from penstock.models.gguf_blocks import LARGE, SMALL

# Where types that nothing multiplies have their scales, and bytes that make them small.
SCALES: dict[Type, dict[int, int]] = {
    **{key: {0: 0, 1: 20} for key in (Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S)},
    Type.IQ1_M: {49: 0x00, 51: 0x00, 53: 0x40, 55: 0x10},
    Type.NVFP4: dict.fromkeys(range(4), 0x18),
    Type.TQ1_0: {52: 0x00, 53: 0x28},
    Type.TQ2_0: {64: 0x00, 65: 0x28},
}


def rare_blocks(kind: Type, num_rows: int, num_inputs: int, *, seed: int = 0) -> np.ndarray:
    """Rows of bytes in a type that is expanded."""
    items, block_bytes = GGML_QUANT_SIZES[kind]
    shape = num_rows, num_inputs // items, block_bytes
    blocks = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    for at, value in SCALES[kind].items():
        blocks[..., at] = value
    return blocks.reshape(num_rows, -1)


def sane_blocks(kind: Type, num_rows: int, num_inputs: int, *, seed: int = 0, size: float = 0.05) -> np.ndarray:
    """Rows of bytes whose values are about as large as `size`, in any type that the gguf package reads."""
    if kind in SCALES:
        return rare_blocks(kind, num_rows, num_inputs, seed=seed)
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
