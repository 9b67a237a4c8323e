"""Two pictures in a text, as engines and plain transformers are asked about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tiny_vision_models import KINDS, TEXT, pictures
from transformers import PreTrainedModel

from penstock.engine.engine import Engine
from penstock.request import Output

EXACT = 1e-4
NUM_GENERATED = 32
NUM_ENCODED = dict.fromkeys(KINDS, 2) | {"idefics3": 10}  # two pictures, or each in four tiles and whole
SETTINGS = {"dtype": "float32", "memory": "4GiB", "threads": 1}
SAMPLING = {"max_tokens": NUM_GENERATED, "ignore_eos": True}


def plain(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], num_tokens: int = NUM_GENERATED
) -> tuple[tuple[int, ...], torch.Tensor]:
    """(tokens, logits) that transformers' generate writes greedily, without end."""
    length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "pad_token_id": 0, "eos_token_id": None}
    result: Any = model.generate(**inputs, **length, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return tuple(result.sequences[0, -num_tokens:].tolist()), torch.cat(result.logits)


def answer(
    engine: Engine, images: Sequence[Any] | None = None, *, max_tokens: int = NUM_GENERATED, scope: str = ""
) -> Output:
    return engine.generate(TEXT, images=images or pictures(2), scope=scope, **SAMPLING | {"max_tokens": max_tokens})


def finished(engine: Engine, request_ids: Sequence[int]) -> list[Output]:
    """The outputs of requests that run together."""
    outputs: dict[int, Output] = {}
    while len(outputs) < len(request_ids):
        outputs |= {event.request_id: event.output for event in engine.step() if hasattr(event, "output")}
    return [outputs[request_id] for request_id in request_ids]
