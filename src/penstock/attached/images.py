"""Images of a `generate` call: kept back from it, encoded by us, and read with the prompt that holds their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidSetting
from penstock.foreign.features import DEFAULT_ENCODER_BYTES, PIXELS
from penstock.foreign.forward import ForwardPrompt, TextCall
from penstock.foreign.images import MediaModel, MediaPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedImages:
    """`generate` would encode all images in one call, or repeat them for every beam."""

    inputs: Mapping[str, Any]  # what the tower takes
    batch: int  # prompts, before beams multiply them

    @classmethod
    def taken_from(
        cls, media: MediaModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[AttachedImages | None, dict[str, Any]]:
        """The images, and the arguments without their pixels; sizes and grids stay, because positions need them."""
        ids = next((kwargs[name] for name in ("input_ids", "inputs") if kwargs.get(name) is not None), None)
        ids = args[0] if args else ids
        if kwargs.get(PIXELS) is None or ids is None:
            return None, dict(kwargs)
        names = media.tower.takes | media.tower.settings
        images = cls(inputs={name: kwargs[name] for name in names if name in kwargs}, batch=ids.shape[0])
        return images, {name: value for name, value in kwargs.items() if name != PIXELS}


def media_prompt(
    media: MediaModel, inputs: Mapping[str, Any], images: AttachedImages | None, *, free_bytes: int | None
) -> ForwardPrompt:
    if inputs.get("input_ids") is None:
        _refuse_embeddings(media, inputs)
        return TextCall.of(inputs)
    encoder_bytes = DEFAULT_ENCODER_BYTES if free_bytes is None else free_bytes
    if images is None:
        return MediaPrompt.of(media, inputs, encoder_bytes=encoder_bytes)
    num_copies = inputs["input_ids"].shape[0] // images.batch
    return MediaPrompt.of(media, {**inputs, **images.inputs}, encoder_bytes=encoder_bytes, num_copies=num_copies)


def _refuse_embeddings(media: MediaModel, inputs: Mapping[str, Any]) -> None:
    """Embeddings do not say where spans lie that see themselves, nor where images belong that come beside them."""
    has_images = inputs.get(PIXELS) is not None or bool((inputs.get("mm_encoder_outputs") or {}).get("image"))
    if media.sight != "causal" or has_images:
        raise InvalidSetting(
            "inputs_embeds do not say where the images of this prompt lie. Give input_ids, or detach the model."
        )
