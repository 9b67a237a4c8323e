"""The lane `optimized-native-multimodal`: image-text models with a native decoder, and what one costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.lanes import generic_images_kind, native_text_kind
from penstock.lanes.lane import Claim, LaneFacts, LaneKind
from penstock.lanes.place import Place
from penstock.models.families import FAMILIES
from penstock.models.generic_spec import num_stored_parameters
from penstock.models.media_spec import NATIVE_MEDIA, in_eight_bits, media_text_config, num_deepstack_layers, text_part
from penstock.plan.memory import MemoryModel
from penstock.proof.verdict import Verdict


def claim(config: Mapping[str, Any]) -> Claim:
    """The decoder's own config may be left to the library in part; then its type alone is known."""
    known = {name: value for name, value in config.items() if name != "quantization_config" or not in_eight_bits(value)}
    model_type, images = config.get("model_type"), generic_images_kind.claim(known)
    if not images.eligible:
        return images
    if model_type not in NATIVE_MEDIA:
        return Claim(eligible=False, reason=f"the decoder of {model_type} is not native")
    text = text_part(config)
    named = (text or config.get("text_config") or {}).get("model_type")
    if named is not None and named not in FAMILIES:
        return Claim(eligible=False, reason=f"{model_type} has a decoder of type {named}, which is not native")
    decoder = None if text is None else native_text_kind.claim(text)
    if decoder is not None and not decoder.eligible:
        return decoder
    reason = f"{model_type} reads text and images; its decoder is native"
    return Claim(eligible=True, reason=reason, gains_from_width=decoder is not None and decoder.gains_from_width)


def price(place: Place, verdict: Verdict | None = None) -> MemoryModel:
    shape = native_text_kind.shape_of(media_text_config(place.files), place)
    shape = dataclasses.replace(shape, num_parameters=num_stored_parameters(place.files) or shape.num_parameters)
    row_bytes = shape.hidden_size * place.item_bytes
    memory = native_text_kind.memory_of(shape, place)
    num_rows = 1 + num_deepstack_layers(place.files.config)
    return generic_images_kind.with_images(memory, num_rows * row_bytes, place)


NATIVE_IMAGES = LaneKind(
    facts=LaneFacts(id="optimized-native-multimodal", reads_images=True, keeps_codes=True),
    claim=claim,
    price=price,
    loader="penstock.lanes.native_images:NativeImagesLoader",
    is_own_kind=True,
)
