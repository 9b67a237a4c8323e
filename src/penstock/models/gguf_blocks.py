"""Codes and factors out of the blocks of a GGUF, each type as the gguf package reads it."""

# N rows, R blocks of a row, I inputs

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import Q4_K

from penstock.models.groups import Groups, factors, pairs, six_bits
from penstock.models.quantization import GROUP

# Where fields begin and end in a block: of 32 values
SMALL: dict[Type, dict[str, tuple[int, int]]] = {
    Type.Q4_0: {"scale": (0, 2), "codes": (2, 18)},
    Type.Q4_1: {"scale": (0, 2), "lowest": (2, 4), "codes": (4, 20)},
    Type.Q5_0: {"scale": (0, 2), "high": (2, 6), "codes": (6, 22)},
    Type.Q5_1: {"scale": (0, 2), "lowest": (2, 4), "high": (4, 8), "codes": (8, 24)},
    Type.Q8_0: {"scale": (0, 2), "codes": (2, 34)},
    Type.IQ4_NL: {"scale": (0, 2), "codes": (2, 18)},
    Type.MXFP4: {"power": (0, 1), "codes": (1, 17)},
}
# and of 256.
LARGE: dict[Type, dict[str, tuple[int, int]]] = {
    Type.Q2_K: {"scales": (0, 16), "codes": (16, 80), "scale": (80, 82), "lowest": (82, 84)},
    Type.Q3_K: {"high": (0, 32), "codes": (32, 96), "scales": (96, 108), "scale": (108, 110)},
    Type.Q4_K: {"scale": (0, 2), "lowest": (2, 4), "scales": (4, 16), "codes": (16, 144)},
    Type.Q5_K: {"scale": (0, 2), "lowest": (2, 4), "scales": (4, 16), "high": (16, 48), "codes": (48, 176)},
    Type.Q6_K: {"codes": (0, 128), "high": (128, 192), "scales": (192, 208), "scale": (208, 210)},
    Type.IQ4_XS: {"scale": (0, 2), "high_scales": (2, 4), "scales": (4, 8), "codes": (8, 136)},
}


def from_gguf(bytes_NB: np.ndarray, kind: Type) -> Groups:
    """Rows of a GGUF's bytes."""
    num_rows, block_bytes = len(bytes_NB), GGML_QUANT_SIZES[kind][1]
    blocks_NRb = bytes_NB.reshape(num_rows, -1, block_bytes)
    fields = {name: blocks_NRb[..., first:end] for name, (first, end) in (SMALL | LARGE)[kind].items()}
    for name in ("scale", "lowest"):
        if name in fields:
            fields[name] = np.ascontiguousarray(fields[name]).view("<f2")[..., 0]
    codes_NI = (_small_codes if kind in SMALL else _large_codes)(kind, fields).reshape(num_rows, -1)
    plain = {name: fields[name] for name in ("scale", "lowest", "power") if name in fields}
    packed = _scales(kind, fields) if kind in LARGE else {}
    return Groups(kind=kind, codes_NI=codes_NI, factors_NR=factors(kind, **plain, **packed))


def _small_codes(kind: Type, fields: dict[str, np.ndarray]) -> np.ndarray:
    """The low halves of the bytes come first; fifth bits lie together."""
    codes = fields["codes"]
    if kind == Type.Q8_0:
        return codes
    codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    if "high" in fields:
        codes |= np.unpackbits(fields["high"], axis=-1, bitorder="little") << 4
    return codes


def _large_codes(kind: Type, fields: dict[str, np.ndarray]) -> np.ndarray:
    """Bits of several groups share a byte."""
    codes = fields["codes"]
    if kind == Type.IQ4_XS:
        codes = codes.reshape(*codes.shape[:2], -1, GROUP // 2)
        return np.concatenate([codes & 15, codes >> 4], axis=-1)
    if kind in (Type.Q2_K, Type.Q3_K):
        codes = _layers(codes, GROUP, 2)
        return codes if kind == Type.Q2_K else codes | _layers(fields["high"], GROUP, 1) << 2
    width = 2 * GROUP if kind == Type.Q6_K else GROUP
    codes = _layers(codes, width, 4)
    if "high" in fields:
        codes |= _layers(fields["high"], GROUP, 2 if kind == Type.Q6_K else 1) << 4
    return codes


def _layers(bytes_NRb: np.ndarray, width: int, bits: int) -> np.ndarray:
    """`width` bytes hold the lowest bits of as many values, then the next ones of as many more."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    layers = bytes_NRb.reshape(*bytes_NRb.shape[:2], -1, 1, width) >> shifts & np.uint8((1 << bits) - 1)
    return layers.reshape(*bytes_NRb.shape[:2], -1)


def _scales(kind: Type, fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    scales = fields["scales"]
    num_rows, num_blocks, _ = scales.shape
    if kind == Type.Q6_K:
        return {"scales": scales.view(np.int8)}
    if kind == Type.Q2_K:
        first, second = scales[..., ::2], scales[..., 1::2]
        return {"scale_pairs": first & 15 | second << 4, "lowest_pairs": first >> 4 | second & 0xF0}
    if kind == Type.IQ4_XS:
        high = _layers(np.ascontiguousarray(fields["high_scales"]), 1, 2)
        return {"scales": (pairs(scales).reshape(high.shape) | high << 4).view(np.int8) - np.int8(32)}
    if kind == Type.Q3_K:
        both = _layers(scales[..., :8], 8, 4) | _layers(scales[..., 8:], 4, 2) << 4
        return six_bits(both[..., ::2], both[..., 1::2])
    found = Q4_K.get_scale_min(np.ascontiguousarray(scales).reshape(-1, Q4_K.K_SCALE_SIZE))
    return six_bits(*(part.reshape(num_rows, num_blocks, -1) for part in found))
