"""What a foreign function takes, read once where it enters; only that is passed to it. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import UnsupportedModel

# What models call the object that carries keys, values and states from one call to the next.
CACHE_NAMES = ("past_key_values", "cache_params", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSignature:
    names: frozenset[str]
    takes_others: bool  # by **kwargs, which models hand down to their layers

    @classmethod
    def of(cls, function: Callable[..., Any]) -> ForwardSignature:
        parameters = inspect.signature(function).parameters.values()
        return cls(
            names=frozenset(one.name for one in parameters if one.kind is not one.VAR_KEYWORD),
            takes_others=any(one.kind is one.VAR_KEYWORD for one in parameters),
        )

    @property
    def cache_name(self) -> str | None:
        """None: the forward takes no cache."""
        return next((name for name in CACHE_NAMES if name in self.names), None)

    def accepts(self, name: str) -> bool:
        return name in self.names

    @property
    def accepts_use_cache(self) -> bool:
        """Some classes leave it to **kwargs and read it further down."""
        return "use_cache" in self.names or self.takes_others


def read_signature(model: Any) -> ForwardSignature:
    forward = getattr(model, "forward", None)
    if not callable(forward):
        raise UnsupportedModel(
            f"{type(model).__name__} has no forward that can be called; give a transformers model with a language head."
        )
    try:
        signature = ForwardSignature.of(forward)
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"The forward of {type(model).__name__} cannot be inspected ({error}), so what it takes is unknown; "
            "give a model whose forward is a Python function."
        ) from error
    if not signature.accepts("input_ids"):
        raise UnsupportedModel(f"The forward of {type(model).__name__} takes no input_ids; it is no text model.")
    return signature
