"""Rotary tables that depend on the length of the prompt, fixed at that length while its chunks are read."""

# B batch, T tokens, D head size

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

LENGTH_DEPENDENT = ("dynamic", "longrope")


@contextmanager
def rotary_fixed_at(model: torch.nn.Module, last_token: Mapping[str, Any]) -> Generator[None]:
    """A table is chosen by the largest position of a call: every chunk's call gets the prompt's last one, unseen."""
    modules = [module for module in model.modules() if depends_on_length(module)]
    last_position = last_token.get("position_ids")
    if not modules or last_position is None:
        yield
        return

    def add_last_position(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.cat([position_ids, last_position[..., -1:].expand(*position_ids.shape[:-1], 1)], dim=-1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def drop_last_position(module: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> Any:
        return tuple(table_BTD[..., :-1, :] for table_BTD in output)

    handles = [module.register_forward_pre_hook(add_last_position, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(drop_last_position) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def depends_on_length(module: torch.nn.Module) -> bool:
    rope_type = getattr(module, "rope_type", None)  # a name, or a name for each type of layer
    names = rope_type.values() if isinstance(rope_type, Mapping) else [rope_type]
    return any(kind in str(name) for name in names for kind in LENGTH_DEPENDENT)
