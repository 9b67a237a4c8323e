"""Rotary position encoding: inverse frequencies of each scaling, and the cosines and sines of a step's positions."""

# T tokens, R half of the rotated dimensions, A position axes

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from penstock.models.spec import RotarySpec


class Rotary:
    """The tables of one RotarySpec, one for each variant."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self.spec = spec
        variants = ("default", "long") if spec.original_context else ("default",)
        self._tables = {variant: _inverse_frequencies(spec, variant) for variant in variants}
        self._tables = {name: (table.to(device), scale) for name, (table, scale) in self._tables.items()}
        self._axis_R = None if not spec.sections else _axes(spec).to(device)

    def cos_sin(self, positions: torch.Tensor, variant: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, R] each, ready to multiply a [T, H, R] half of the heads. Positions are [T], or [A, T] by axis."""
        frequencies_R, scale = self._tables.get(variant, self._tables["default"])
        if positions.ndim == 1:
            angles_TR = positions.to(torch.float32)[:, None] * frequencies_R
        else:
            assert self._axis_R is not None, "positions have several axes, the rotary has one"
            angles_TR = (positions.to(torch.float32)[self._axis_R].T * frequencies_R).contiguous()
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        if scale != 1.0:
            cos_TR, sin_TR = cos_TR * scale, sin_TR * scale
        return cos_TR.to(dtype)[:, None], sin_TR.to(dtype)[:, None]


def _axes(spec: RotarySpec) -> torch.Tensor:
    """Which axis turns each frequency: section after section, or in turns as long as a section lasts."""
    if not spec.is_interleaved:
        return torch.arange(len(spec.sections)).repeat_interleave(torch.tensor(spec.sections))
    num_axes = len(spec.sections)
    axis_R = torch.zeros(spec.num_dims // 2, dtype=torch.long)
    for axis in range(1, num_axes):
        axis_R[axis : spec.sections[axis] * num_axes : num_axes] = axis
    return axis_R


def _inverse_frequencies(spec: RotarySpec, variant: str) -> tuple[torch.Tensor, float]:
    """The frequencies and the factor that cosines and sines are multiplied with."""
    exponents_R = torch.arange(0, spec.num_dims, 2, dtype=torch.float32) / spec.num_dims
    plain_R = 1.0 / (spec.theta**exponents_R)
    parameters = spec.parameters
    if spec.type == "linear":
        return plain_R / float(parameters["factor"]), 1.0
    if spec.type == "proportional":
        num_turned = int(float(parameters.get("partial_rotary_factor", 1.0)) * spec.num_dims // 2)
        plain_R[num_turned:] = 0
        return plain_R / float(parameters.get("factor", 1.0)), 1.0
    if spec.type == "factors":
        return plain_R / torch.tensor(parameters["factors"], dtype=torch.float32), 1.0
    if spec.type == "llama3":
        return _llama3(plain_R, parameters), 1.0
    if spec.type == "yarn":
        return _yarn(plain_R, spec)
    if spec.type == "longrope":
        factors = torch.tensor(parameters["long_factor" if variant == "long" else "short_factor"], dtype=torch.float32)
        return 1.0 / (factors * spec.theta**exponents_R), _longrope_scale(parameters)
    return plain_R, 1.0


def _llama3(plain_R: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns_R = parameters["original_context"] * plain_R / (2 * math.pi)
    share_kept_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return plain_R / factor * (1 - share_kept_R) + plain_R * share_kept_R


def _yarn(plain_R: torch.Tensor, spec: RotarySpec) -> tuple[torch.Tensor, float]:
    parameters = spec.parameters
    original = float(parameters["original_context"])
    factor = float(parameters.get("factor") or parameters["max_context"] / original)

    def dimension_with_turns(turns: float) -> float:
        return spec.num_dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension_with_turns(float(parameters.get("beta_fast") or 32))
    high = dimension_with_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.num_dims - 1)
    steps_R = torch.arange(len(plain_R), dtype=torch.float32)
    share_stretched_R = ((steps_R - low) / ((high - low) or 0.001)).clamp(0, 1)
    frequencies_R = plain_R / factor * share_stretched_R + plain_R * (1 - share_stretched_R)
    return frequencies_R, _yarn_scale(parameters, factor)


def _yarn_scale(parameters: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(float(parameters["mscale"])) / magnitude(float(parameters["mscale_all_dim"]))
    return magnitude(1.0)


def _longrope_scale(parameters: Mapping[str, Any]) -> float:
    original = float(parameters["original_context"])
    factor = float(parameters.get("factor") or parameters["max_context"] / original)
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
