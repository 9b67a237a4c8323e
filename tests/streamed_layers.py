"""Layers of tiny models stream where they are told to: no budget is so small that they would by themselves."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from penstock.lanes.native_text_kind import NATIVE_TEXT
from penstock.lanes.table import LANES
from penstock.models.shapes import layer_bytes, mixture_of
from penstock.models.spec import decoder_spec
from penstock.plan.placement import Placement


def streaming(
    patch: pytest.MonkeyPatch,
    pick: Callable[[int], Sequence[int]] = range,
    *,
    experts_alone: bool = False,
    cache_bytes: int = 0,
) -> None:
    """Models loaded from now on stream the layers that `pick` chooses of so many."""

    def price(place, verdict=None):
        memory = NATIVE_TEXT.price(place, verdict)
        model = decoder_spec(place.files.config), place.dtype, place.quantization
        sizes, mixture = layer_bytes(*model), mixture_of(*model)
        streamed = tuple(pick(len(sizes)))
        if experts_alone:
            assert mixture is not None
            sizes = [mixture.layer_bytes(index) for index in range(len(sizes))]
            streamed = tuple(index for index in streamed if sizes[index])
        placement = Placement(
            streamed=streamed,
            num_layers=len(sizes),
            pass_bytes=sum(sizes[index] for index in streamed),
            slot_bytes=-(-max(sizes) // 4096) * 4096,
            mixture=mixture,
            streams_experts_alone=experts_alone,
            cache_bytes=cache_bytes,
        )
        return replace(memory, placement=placement)

    patch.setitem(LANES, NATIVE_TEXT.id, replace(NATIVE_TEXT, price=price))
