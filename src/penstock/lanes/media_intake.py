"""Prompts with images on their way into a lane: processed, held to the limits, then encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import InvalidMedia, MemoryTooSmall
from penstock.lanes.media import MediaModel, MediaPrompt
from penstock.lanes.media_features import PIXELS, split_media
from penstock.lanes.media_processor import MediaProcessor
from penstock.lanes.signature import read_signature
from penstock.plan.memory import MB


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What a prompt with images is held to before they are encoded."""

    refuse_too_long: Callable[[int], None]  # given its number of tokens
    free_bytes: int  # that the encoder may take besides its own


class MediaIntake:
    """What lanes that read images share. `processor` is None where none could be made; `why_no_images` then says why,
    and text is still read."""

    def __init__(
        self, media: MediaModel, *, processor: MediaProcessor | None, why_no_images: str = "", encoder_bytes: int
    ) -> None:
        self.media = media
        self.model = media.model
        self.processor = processor
        self.why_no_images = why_no_images
        self.encoder_bytes = encoder_bytes
        self.signature = read_signature(media.model)

    def prompt(
        self, text: str, images: Sequence[Any], limits: PromptLimits, *, add_special_tokens: bool
    ) -> MediaPrompt:
        """The processor runs once, here. What is too long or too large is refused; the images are not encoded yet."""
        if self.processor is None:
            raise InvalidMedia(f"{len(images)} image(s) given, and they cannot be read: {self.why_no_images}")
        inputs = self.inputs(self.processor.inputs(text, images, add_special_tokens=add_special_tokens))
        limits.refuse_too_long(inputs["input_ids"].shape[1])
        self._refuse_too_large(inputs, limits.free_bytes)
        return MediaPrompt.begun(self.media, inputs, encoder_bytes=self.encoder_bytes)

    def text_prompt(self, tokens: Sequence[int]) -> MediaPrompt:
        return MediaPrompt.of(self.media, {"input_ids": torch.tensor([tokens], device=self.model.device)})

    def inputs(self, processed: dict[str, Any]) -> dict[str, Any]:
        """What the forward or the tower takes of a processor's output, where and how the model computes."""
        known = {
            name: torch.as_tensor(value)
            for name, value in processed.items()
            if value is not None and (self.signature.accepts(name) or name in self.media.tower.takes)
        }
        return {
            name: tensor.to(self.model.device, self.model.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in known.items()
        }

    def _refuse_too_large(self, inputs: dict[str, Any], free_bytes: int) -> None:
        if inputs.get(PIXELS) is None:
            return
        allowed = self.encoder_bytes + max(0, free_bytes)
        for number, medium in enumerate(split_media(self.media.tower, inputs), 1):
            needed = self.media.tower.call_bytes([medium])
            if needed > allowed:
                raise MemoryTooSmall(
                    f"Encoding image {number} ({medium.num_patches} patches) takes {needed / MB:,.0f} MB; the memory "
                    f"budget leaves {allowed / MB:,.0f} MB. Scale it down or raise --memory."
                )
