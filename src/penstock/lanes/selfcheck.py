"""Proves that a model read in chunks gives what it gives whole: on a small random copy, by the form of its prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from penstock.errors import UnsupportedModel
from penstock.lanes.comparison import first_line
from penstock.lanes.media_check import check_image_text
from penstock.lanes.shrink import remembers, shrunken_models
from penstock.lanes.source_check import check_source
from penstock.lanes.text_check import MakeAttention, check_text, cpu_attention
from penstock.lanes.verdicts import Finding, Verdict, Way

BLIND = Finding(
    exact=False,
    max_difference=None,
    reason="a small copy forgets its first tokens so soon that a state lost between chunks would not show",
)


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
    """The first copy that can be made and run is judged; later ones are larger, for configs that resist."""
    check = _form(config, make_attention)
    why_not = "no small copy of this config could be made"
    for small in shrunken_models(model_class, config, device or torch.device("cpu")):
        try:
            is_telling = remembers(small)
            verdict = check(small)
            return verdict if is_telling or not verdict.exact else verdict.model_copy(update=BLIND.model_dump())
        except UnsupportedModel:
            raise
        except Exception as error:  # a model fails in ways of its own
            why_not = f"the small copy fails by itself ({first_line(error)})"
    unknown = Finding(exact=False, max_difference=None, reason=why_not)
    return Verdict(way=Way.OWN_CACHE, packing=unknown, **unknown.model_dump())


def _form(config: Any, make_attention: MakeAttention) -> Callable[[Any], Verdict]:
    if config.is_encoder_decoder:
        return check_source
    if getattr(config, "vision_config", None) is not None:
        return check_image_text
    return partial(check_text, make_attention=make_attention)
