"""What a transformers model's forward takes, read once where the model enters; only that is passed to it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import UnsupportedModel

# What models call the object that carries keys, values and states from one call to the next.
CACHE_NAMES = ("past_key_values", "cache_params", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSignature:
    names: frozenset[str]
    takes_others: bool  # by **kwargs, which models hand down to their layers
    cache_name: str | None  # None: the forward takes no cache

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
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"The forward of {type(model).__name__} cannot be inspected ({error}), so what it takes is unknown; "
            "give a model whose forward is a Python function."
        ) from error
    names = frozenset(name for name, value in parameters.items() if value.kind is not value.VAR_KEYWORD)
    if "input_ids" not in names:
        raise UnsupportedModel(f"The forward of {type(model).__name__} takes no input_ids; it is no text model.")
    return ForwardSignature(
        names=names,
        takes_others=any(value.kind is value.VAR_KEYWORD for value in parameters.values()),
        cache_name=next((name for name in CACHE_NAMES if name in names), None),
    )


class WantedRows:
    """Calls a model so that its head runs for the wanted rows only, and what the class does to logits still happens.

    A forward without `logits_to_keep` is served by a hook that cuts the head's input.
    """

    def __init__(self, model: Any, signature: ForwardSignature) -> None:
        self.model = model
        self._takes_rows = signature.accepts("logits_to_keep")
        self._rows: torch.Tensor | None = None
        if not self._takes_rows and (head := _head_of(model)) is not None:
            head.register_forward_pre_hook(self._cut)

    def call(self, rows: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, Any]:
        """(float32 logits [rows, V], the model's whole output) of one packed or single sequence."""
        if self._takes_rows:
            inputs["logits_to_keep"] = rows
        self._rows = rows
        try:
            output = self.model(**inputs)
        finally:
            self._rows = None
        logits = output.logits[0]
        if len(logits) != len(rows):
            logits = logits[rows]  # the head is called in a way of its own: all rows were computed
        return logits.float(), output

    def _cut(self, head: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._rows is None or not arguments or arguments[0].ndim != 3:
            return None
        return (arguments[0][:, self._rows], *arguments[1:])


def _head_of(model: Any) -> torch.nn.Module | None:
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, torch.nn.Linear) else None
