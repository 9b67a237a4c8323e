"""Logits of transformers in float64: the truth that float32 arithmetic is measured against.

Rotary angles stay those of float32. At position 2,600 they are rounded by up to 1.2e-4, and a model of float32 is
one with these angles: with others its logits move further than all other rounding together moves them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
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


def _angles_of(rotary: nn.Module) -> Callable[..., tuple[torch.Tensor, ...]]:
    def cos_sin(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        with torch._C.DisableTorchFunction():
            return tuple(values.double() for values in rotary(x.float(), *args, **kwargs))

    return cos_sin


@torch.no_grad()
def float64_logits(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[tokens, vocabulary] of the whole prompt in one call."""
    wide: Any = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"  # the grouped product of experts knows no float64
    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            wide.get_submodule(name).forward = _angles_of(module)
    torch.set_default_dtype(torch.float64)
    try:
        wide_inputs = {
            name: values.double() if values.is_floating_point() else values for name, values in inputs.items()
        }
        with _Float64():
            logits = wide(**wide_inputs, use_cache=False).logits[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits.dtype == torch.float64
    return logits
