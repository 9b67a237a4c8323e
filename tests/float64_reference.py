"""Logits of transformers in float64: the truth that float32 arithmetic is measured against."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


class _Float64(TorchFunctionMode):
    """Models ask for float32 in norms, routers and recurrences; here they get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        widened = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **widened)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@torch.no_grad()
def float64_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] of the whole prompt in one call."""
    wide: Any = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"  # the grouped product of experts knows no float64
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            logits = wide(torch.tensor([tokens]), use_cache=False).logits[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits.dtype == torch.float64
    return logits
