"""Values in groups of 32 that share a scale, or two: as their codes and factors say, or made from floats."""

# N rows, I inputs, G groups of a row, R sets of factors of a row, H halves of a group that have their own, or 1

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import MXFP4

from penstock.models.quantization import GROUP, HALF_LOWEST, LAYOUTS, POWER, SIX_LOWEST

MAX_CODE = {Type.Q8_0: 127, Type.Q4_1: 15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A value is what its code stands for times the scale, plus the lowest value of its group, if the type has one."""

    kind: Type
    codes_NI: np.ndarray  # uint8
    factors_NR: np.ndarray  # with the fields of the layout

    @property
    def values(self) -> np.ndarray:
        layout = LAYOUTS[self.kind]
        numbers_NI = self.codes_NI.view(np.int8) - np.int8(layout.offset)
        if layout.book:
            numbers_NI = np.array(layout.book, np.int8)[self.codes_NI]
        scales_NGH, lowest_NGH = scales_and_lowest(self.kind, self.factors_NR)
        values = numbers_NI.reshape(*scales_NGH.shape, -1) * scales_NGH[..., None]
        if lowest_NGH is not None:
            values += lowest_NGH[..., None]
        return values.reshape(numbers_NI.shape)


def scales_and_lowest(kind: Type, factors_NR: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Gives both in float32, of each group or of its halves."""
    fields, names = LAYOUTS[kind].factors, factors_NR.dtype.names or ()
    if fields == POWER:
        return MXFP4.e8m0_to_fp32_half(factors_NR["power"])[..., None], None
    scales = lowest = np.ones(1, np.int8)
    if "low" in names:
        first, second = _six_bits(factors_NR["low"], factors_NR["high"])
        pair = np.stack([first, second], -1).astype(np.int8) - np.int8(32)
        scales, lowest = (first, -second.astype(np.int8)) if fields == SIX_LOWEST else (pair, lowest)
    elif "scales" in names:
        scales = factors_NR["scales"]
    elif fields != HALF_LOWEST and "lowest" in names:
        scales, lowest = pairs(factors_NR["scale_pairs"]), -pairs(factors_NR["lowest_pairs"]).astype(np.int8)
    return (_spread(factors_NR["scale"], scales), _spread(factors_NR["lowest"], lowest) if "lowest" in names else None)


def _spread(factor_NR: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Multiplies a factor with the whole numbers of its groups, or halves of them."""
    num_rows, num_regions = factor_NR.shape
    num_groups = 1 if parts.ndim == 1 else parts.shape[2]
    wide = factor_NR.astype(np.float32)[..., None] * parts.reshape(*(parts.shape[:2] if parts.ndim > 1 else ()), -1)
    return wide.reshape(num_rows, num_regions * num_groups, -1)


def pairs(bytes_: np.ndarray) -> np.ndarray:
    """Numbers of four bits, two of a byte in a dimension of their own; the low half comes first."""
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1)


def _six_bits(low_NRG: np.ndarray, high_NRg: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high_NRG = pairs(high_NRg).reshape(low_NRG.shape)
    return low_NRG & 15 | (high_NRG & 3) << 4, low_NRG >> 4 | (high_NRG >> 2) << 4


def six_bits(first_NRG: np.ndarray, second_NRG: np.ndarray) -> dict[str, np.ndarray]:
    """Packs two numbers of six bits for each group."""
    high = first_NRG >> 4 | second_NRG >> 4 << 2
    return {"low": first_NRG & 15 | (second_NRG & 15) << 4, "high": high[..., ::2] | high[..., 1::2] << 4}


def factors(kind: Type, **fields: np.ndarray) -> np.ndarray:
    """Puts fields of [N, R, ...] side by side."""
    shape = next(iter(fields.values())).shape[:2]
    found = np.empty(shape, LAYOUTS[kind].factor_dtype())
    for name, values in fields.items():
        found[name] = values.reshape(found[name].shape)
    return found


def grouped(values_NI: np.ndarray, kind: Type) -> Groups:
    """The nearest codes, of Q8_0 or Q4_1; scales are rounded to float16 first, so that codes make up for it."""
    values = values_NI.astype(np.float32).reshape(len(values_NI), -1, GROUP)
    most = MAX_CODE[kind]
    if kind == Type.Q8_0:
        scales = (np.abs(values).max(-1) / most).astype(np.float16)
        codes = np.rint(values * _inverse(scales)[..., None]).clip(-most, most).astype(np.int8).view(np.uint8)
        return Groups(kind=kind, codes_NI=codes.reshape(values_NI.shape), factors_NR=factors(kind, scale=scales))
    lowest = values.min(-1).astype(np.float16)
    scales = ((values.max(-1) - lowest.astype(np.float32)) / most).astype(np.float16)
    codes = (values - lowest.astype(np.float32)[..., None]) * _inverse(scales)[..., None]
    codes = np.rint(codes).clip(0, most).astype(np.uint8).reshape(values_NI.shape)
    return Groups(kind=kind, codes_NI=codes, factors_NR=factors(kind, scale=scales, lowest=lowest))


def _inverse(scales: np.ndarray) -> np.ndarray:
    wide = scales.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
