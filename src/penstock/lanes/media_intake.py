"""Prompts with images on their way into a lane: processed, held to the limits, then encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.config import MB
from penstock.errors import InvalidMedia, MemoryTooSmall, UnsupportedModel
from penstock.foreign.features import Encoding, FeatureCache
from penstock.foreign.images import MediaModel, MediaPrompt, Sight, media_model
from penstock.foreign.pretrained import load_processor
from penstock.foreign.processor import MediaProcessor
from penstock.foreign.signature import read_signature
from penstock.lanes.generic_images_kind import image_shares
from penstock.lanes.lane import Asked, Lane, PromptLimits
from penstock.lanes.loading import Loading
from penstock.models.files import ModelFiles
from penstock.plan.memory import MemoryModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader:
    """The processor of a model; without one text is still read."""

    processor: MediaProcessor | None
    why_no_images: str = ""  # why there is no processor; empty where there is one

    @classmethod
    def of(cls, files: ModelFiles) -> ImageReader:
        try:
            return cls(processor=MediaProcessor(load_processor(files)))
        except UnsupportedModel as error:
            return cls(processor=None, why_no_images=str(error))

    @property
    def chat_template(self) -> str | None:
        """The processor's own knows where images go; the tokenizer's may know text only."""
        source: Any = getattr(self.processor.processor, "chat_template", None) if self.processor is not None else None
        if isinstance(source, dict):
            source = source.get("default")
        return source if isinstance(source, str) else None

    def media(
        self, model: Any, loading: Loading, memory: MemoryModel, *, sight: Sight | None = None
    ) -> tuple[MediaModel, int]:
        """Probes a loaded model: (what it offers, with room for features; bytes for one call of its encoder)."""
        media = media_model(model, sight=sight)
        if media is None:
            raise UnsupportedModel(
                f"{type(model).__name__} has no get_image_features; its images cannot be read in chunks. Give "
                "--text-only to read its text."
            )
        encoder_bytes, kept_bytes = image_shares(memory, loading.place)
        return dataclasses.replace(media, features=FeatureCache(kept_bytes)), encoder_bytes


class MediaIntake(Lane):
    """What lanes that read images share."""

    def __init__(self, media: MediaModel, *, reader: ImageReader, encoder_bytes: int) -> None:
        self.media = media
        self.model = media.model
        self.placeholder = media.image_token_id
        self.processor = reader.processor
        self.why_no_images = reader.why_no_images
        self.encoder_bytes = encoder_bytes
        self.signature = read_signature(media.model)

    def read(self, ask: Asked) -> Asked:
        """Runs the processor, once for each prompt."""
        if not ask.images or ask.processed is not None:
            return ask
        if self.processor is None:
            raise InvalidMedia(f"{len(ask.images)} image(s) given, and they cannot be read: {self.why_no_images}")
        processed = self.processor.inputs(ask.text, ask.images, add_special_tokens=ask.adds_special_tokens)
        return dataclasses.replace(ask, processed=processed)

    def prompt(self, ask: Asked, limits: PromptLimits) -> MediaPrompt:
        """What is too long or too large is refused; the images are not encoded yet."""
        if not ask.images:
            super().prompt(ask, limits)  # refuses what no lane of text takes
            return self.text_prompt(ask.tokens)
        inputs = self.inputs({**(self.read(ask).processed or {})})
        limits.refuse_too_long(inputs["input_ids"].shape[1])
        prompt = MediaPrompt.begun(self.media, inputs, encoder_bytes=self.encoder_bytes, scope=ask.scope)
        self._refuse_too_large(prompt.encoding, limits.free_bytes)
        return prompt

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

    def _refuse_too_large(self, encoding: Encoding | None, free_bytes: int) -> None:
        allowed = self.encoder_bytes + max(0, free_bytes)
        for number, medium in enumerate(encoding.media if encoding is not None else (), 1):
            needed = self.media.tower.call_bytes([medium])
            if needed > allowed:
                raise MemoryTooSmall(
                    f"Encoding image {number} ({medium.num_patches} patches) takes {needed / MB:,.0f} MB; the memory "
                    f"budget leaves {allowed / MB:,.0f} MB. Scale it down or raise --memory."
                )
