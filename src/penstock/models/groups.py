"""Values in groups of 32 that share a scale: made from floats, or taken as GGUF's blocks have them."""

# N rows, G groups of a row

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from penstock.models.quantization import GROUP, Format

MAX_CODE = {Format.INT8: 127, Format.INT4: 15}
SUPERBLOCK = 256  # of Q4_K


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A value is its code times the scale, plus the lowest value of its group."""

    codes_NGI: np.ndarray  # int8, or uint8 of four bits
    scales_NG: np.ndarray  # float16
    lowest_NG: np.ndarray | None  # float16; None in eight bits

    @property
    def values(self) -> np.ndarray:
        values = self.codes_NGI.astype(np.float32) * self.scales_NG.astype(np.float32)[..., None]
        if self.lowest_NG is not None:
            values += self.lowest_NG.astype(np.float32)[..., None]
        return values.reshape(len(values), -1)

    def rows(self, order: np.ndarray) -> Groups:
        lowest = None if self.lowest_NG is None else self.lowest_NG[order]
        return Groups(codes_NGI=self.codes_NGI[order], scales_NG=self.scales_NG[order], lowest_NG=lowest)


def grouped(values_NI: np.ndarray, quantized: Format) -> Groups:
    """The nearest codes; scales are rounded to float16 first, so that codes make up for it."""
    values = values_NI.astype(np.float32).reshape(len(values_NI), -1, GROUP)
    most = MAX_CODE[quantized]
    if quantized is Format.INT8:
        scales = (np.abs(values).max(-1) / most).astype(np.float16)
        codes = np.rint(values * _inverse(scales)[..., None]).clip(-most, most).astype(np.int8)
        return Groups(codes_NGI=codes, scales_NG=scales, lowest_NG=None)
    lowest = values.min(-1).astype(np.float16)
    scales = ((values.max(-1) - lowest.astype(np.float32)) / most).astype(np.float16)
    codes = (values - lowest.astype(np.float32)[..., None]) * _inverse(scales)[..., None]
    return Groups(codes_NGI=np.rint(codes).clip(0, most).astype(np.uint8), scales_NG=scales, lowest_NG=lowest)


def _inverse(scales: np.ndarray) -> np.ndarray:
    wide = scales.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def from_gguf(blocks_NB: np.ndarray, stored: GGMLQuantizationType, quantized: Format) -> Groups:
    """Rows of a GGUF's bytes: its own codes where the format holds them, else the nearest."""
    num_rows = len(blocks_NB)
    if quantized is Format.INT8 and stored == GGMLQuantizationType.Q8_0:
        blocks = blocks_NB.reshape(num_rows, -1, 2 + GROUP)
        return Groups(codes_NGI=blocks[..., 2:].view(np.int8), scales_NG=_halves(blocks, 0), lowest_NG=None)
    if quantized is Format.INT4 and stored == GGMLQuantizationType.Q4_1:
        blocks = blocks_NB.reshape(num_rows, -1, 4 + GROUP // 2)
        return Groups(codes_NGI=_nibbles(blocks[..., 4:]), scales_NG=_halves(blocks, 0), lowest_NG=_halves(blocks, 2))
    if quantized is Format.INT4 and stored == GGMLQuantizationType.Q4_0:
        blocks = blocks_NB.reshape(num_rows, -1, 2 + GROUP // 2)
        scales = _halves(blocks, 0)
        return Groups(codes_NGI=_nibbles(blocks[..., 2:]), scales_NG=scales, lowest_NG=scales * np.float16(-8))
    if quantized is Format.INT4 and stored == GGMLQuantizationType.Q4_K:
        return _from_q4_k(blocks_NB)
    return grouped(dequantize(blocks_NB, stored), quantized)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """The low halves of the bytes come first."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _from_q4_k(blocks_NB: np.ndarray) -> Groups:
    """Eight groups of 32 share two float16 factors; each has a scale and a lowest value of six bits."""
    num_rows = len(blocks_NB)
    blocks = blocks_NB.reshape(num_rows, -1, 16 + SUPERBLOCK // 2)
    packed, codes = blocks[..., 4:16], blocks[..., 16:].reshape(num_rows, -1, 4, GROUP)
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], -1).astype(np.float32)
    lowest = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], -1).astype(np.float32)
    scales *= _halves(blocks, 0).astype(np.float32)[..., None]
    lowest *= -_halves(blocks, 2).astype(np.float32)[..., None]
    return Groups(
        codes_NGI=np.stack([codes & 15, codes >> 4], axis=-2).reshape(num_rows, -1, GROUP),
        scales_NG=scales.reshape(num_rows, -1).astype(np.float16),
        lowest_NG=lowest.reshape(num_rows, -1).astype(np.float16),
    )
