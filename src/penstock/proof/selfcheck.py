"""Proves that a model read in chunks gives what it gives whole: on a small random copy, by the form of its prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from penstock.errors import UnsupportedModel, first_line
from penstock.proof.forward import check_forward
from penstock.proof.images import check_image_text
from penstock.proof.shrink import remembers, shrunken_models
from penstock.proof.source import check_source
from penstock.proof.text import MakeAttention, check_text, cpu_attention
from penstock.proof.verdict import Finding, Verdict, Way

BLIND = Finding.unmeasured(
    "a small copy forgets its first tokens so soon that a state lost between chunks would not show"
)
NO_COPY = Finding.unmeasured("no small copy of this config could be made")
SMALL_CHUNK_SIZES = (17, 7, 3, 1)  # the first is longer than the windows of a small copy
_attached: dict[tuple[type, str], Finding] = {}  # of this process, because a model may be attached many times


def selfcheck(model: Any) -> Verdict:
    """The verdict of a transformers model in memory. Its weights are not touched: a small copy is checked."""
    return check_class(type(model), model.config, device=model.device)


def check_class(
    model_class: Callable[[Any], Any],
    config: Any,
    *,
    device: torch.device | None = None,
    make_attention: MakeAttention = cpu_attention,
) -> Verdict:
    found = _on_small_copy(model_class, config, device or torch.device("cpu"), _form(config, make_attention))
    if isinstance(found, Verdict):
        return found
    return Verdict(way=Way.OWN_CACHE, packing=found, **found.model_dump())


def check_attached(model: Any) -> Finding:
    """Checks the forward that `attach` cuts: on a small copy, whose windows are within reach, then on the model."""
    key = (type(model), model.config.to_json_string())
    if key not in _attached:
        small_form = partial(check_forward, chunk_sizes=SMALL_CHUNK_SIZES)
        _attached[key] = _on_small_copy(type(model), model.config, model.device, small_form)
    found = _attached[key]
    is_wrong = not found.exact and found.max_difference is not None  # else a copy could not tell
    return found if is_wrong else check_forward(model)


def _on_small_copy(
    model_class: Callable[[Any], Any], config: Any, device: torch.device, check: Callable[[Any], Finding]
) -> Finding:
    """The first copy that can be made and run is judged; later ones are larger, for configs that resist."""
    found = NO_COPY
    for small in shrunken_models(model_class, config, device):
        try:
            is_telling = remembers(small)
            found = check(small)
            return found if is_telling or not found.exact else found.model_copy(update=BLIND.model_dump())
        except UnsupportedModel:
            raise
        except Exception as error:  # a model fails in ways of its own
            found = Finding.unmeasured(f"the small copy fails by itself ({first_line(error)})")
    return found


def _form(config: Any, make_attention: MakeAttention) -> Callable[[Any], Verdict]:
    if config.is_encoder_decoder:
        return check_source
    if getattr(config, "vision_config", None) is not None:
        return partial(check_image_text, make_attention=make_attention)
    return partial(check_text, make_attention=make_attention)
