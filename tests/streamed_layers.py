"""Layers of tiny models stream where they are told to: no budget is so small that they would by themselves."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from penstock.lanes.native_text_kind import NATIVE_TEXT
from penstock.lanes.table import LANES
from penstock.models.shapes import layer_bytes
from penstock.models.spec import decoder_spec
from penstock.plan.placement import Placement


def streaming(patch: pytest.MonkeyPatch, pick: Callable[[int], Sequence[int]] = range) -> None:
    """Models loaded from now on stream the layers that `pick` chooses of so many."""

    def price(place, verdict=None):
        memory = NATIVE_TEXT.price(place, verdict)
        sizes = layer_bytes(decoder_spec(place.files.config), place.dtype, place.quantization)
        streamed = tuple(pick(len(sizes)))
        placement = Placement(
            streamed=streamed,
            num_layers=len(sizes),
            pass_bytes=sum(sizes[index] for index in streamed),
            slot_bytes=-(-max(sizes) // 4096) * 4096,
        )
        return replace(memory, placement=placement)

    patch.setitem(LANES, NATIVE_TEXT.id, replace(NATIVE_TEXT, price=price))
