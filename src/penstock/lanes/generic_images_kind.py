"""The lane `transformers-generic-multimodal`: image-text models that transformers runs, and what one costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.config import GIB
from penstock.errors import InvalidModelFile
from penstock.lanes.generic_text_kind import generic_memory, generic_obstacle
from penstock.lanes.lane import Claim, LaneFacts, LaneKind
from penstock.lanes.place import Place
from penstock.models.files import ModelFiles
from penstock.models.generic_spec import GenericSpec, generic_spec
from penstock.plan.memory import MemoryModel
from penstock.proof.verdict import Verdict, Way

IMAGE_TEXT_ENDINGS = ("ForConditionalGeneration", "ForImageTextToText")
# Of what the weights leave: shares for one call of an image encoder and for features that are kept, and their limits.
ENCODER_SHARE, MAX_ENCODER_BYTES = 1 / 8, GIB // 2
FEATURE_SHARE, MAX_FEATURE_BYTES = 1 / 16, GIB // 4


def claim(config: Mapping[str, Any]) -> Claim:
    model_type = config.get("model_type")
    if "vision_config" not in config:
        return Claim(eligible=False, reason=f"{model_type} has no vision_config: it reads no images")
    if (obstacle := generic_obstacle(config)) is not None:
        return Claim(eligible=False, reason=obstacle)
    architectures = config.get("architectures") or []
    if architectures and not any(name.endswith(IMAGE_TEXT_ENDINGS) for name in architectures):
        return Claim(eligible=False, reason=f"{', '.join(architectures)} is no image-text model")
    if config.get("is_encoder_decoder"):
        return Claim(eligible=False, reason=f"{model_type} has images and an encoder beside its decoder")
    return Claim(eligible=True, reason=f"{model_type} reads text and images, run by transformers")


def price(place: Place, verdict: Verdict | None = None) -> MemoryModel:
    spec = image_text_spec(place.files)
    memory = generic_memory(place, spec, has_pages=verdict is not None and verdict.way is Way.PAGED)
    return with_images(memory, spec.hidden_size * place.item_bytes, place)


def image_text_spec(files: ModelFiles) -> GenericSpec:
    """Configs of image-text models may leave sizes to the library's defaults, which are then asked of it."""
    try:
        return generic_spec(files.config)
    except InvalidModelFile:
        from penstock.foreign.pretrained import image_text_class

        return generic_spec(image_text_class(files)[1].to_dict())


def with_images(memory: MemoryModel, bytes_per_token: int, place: Place) -> MemoryModel:
    """Any token may be an image's, whose feature rows are kept as long as it is."""
    shape = dataclasses.replace(memory.shape, state_bytes_per_token=bytes_per_token)
    memory = dataclasses.replace(memory, shape=shape)
    return dataclasses.replace(memory, media_bytes=sum(image_shares(memory, place)))


def image_shares(memory: MemoryModel, place: Place) -> tuple[int, int]:
    """Shares out (bytes for one call of the image encoder, bytes for features that stay for other prompts)."""
    free = max(0, place.budget_bytes - memory.runtime_bytes - memory.shape.weight_bytes)
    encoder, features = int(free * ENCODER_SHARE), int(free * FEATURE_SHARE)
    return min(encoder, MAX_ENCODER_BYTES), min(features, MAX_FEATURE_BYTES)


GENERIC_IMAGES = LaneKind(
    facts=LaneFacts(
        id="transformers-generic-multimodal",
        reads_images=True,
        shares_prefixes=False,
        chunk_mask_mode="the model's own",
    ),
    claim=claim,
    price=price,
    loader="penstock.lanes.generic_images:GenericImagesLoader",
    is_checked=True,
    is_own_kind=True,
)
