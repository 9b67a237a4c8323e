"""Prompts with images: from text, messages and pictures to what a lane for images reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.feed import TokenFeed
from penstock.engine.prompts import Message, joined_text, parts_with_text
from penstock.errors import InvalidMedia, InvalidPrompt
from penstock.lanes.media import MediaPrompt
from penstock.lanes.media_intake import PromptLimits
from penstock.lanes.multimodal import MultimodalLane
from penstock.lanes.native_media import NativeMultimodalLane
from penstock.prompt.render import ChatTemplate
from penstock.prompt.source import TextPart
from penstock.prompt.tokens import Tokenizer

IMAGE_PART = {"type": "image"}
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPromptReader:
    """`bos_token`: a rendered chat that begins with it is not given another."""

    lane: MultimodalLane | NativeMultimodalLane
    tokenizer: Tokenizer
    template: ChatTemplate | None
    bos_token: str | None

    def read(self, prompt: Prompt, images: Sequence[Any], limits: PromptLimits) -> MediaPrompt | Sequence[Any]:
        """With images encoded; without them, token ids: text is read where no processor can be made.

        A text has a placeholder for each image; messages have image parts.
        """
        messages = [] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, Mapping)]
        if isinstance(prompt, str):
            text, found, adds_special = prompt, list(images), True
        elif messages and len(messages) == len(prompt):
            text, found, adds_special = self._rendered(messages, images)
        elif images:
            raise InvalidMedia(f"{len(images)} image(s) given with token ids. Give a text or messages with them.")
        else:
            return prompt
        if not found:
            return self.tokenizer.encode(text, add_special_tokens=adds_special)
        return self.lane.prompt(text, found, limits, add_special_tokens=adds_special)

    def chat_feed(self, parts: Sequence[TextPart], *, system: str | None) -> TokenFeed:
        """One user message of text. Templates of image-text models look into their content: it is rendered whole."""
        messages = [{"role": "system", "content": system}] if system else []
        content = "".join(joined_text(parts_with_text(parts)))
        text, _, adds_special = self._rendered([*messages, {"role": "user", "content": content}], ())
        tokens = self.tokenizer.encode(text, add_special_tokens=adds_special)
        note = "the chat template of an image-text model inspects its content: rendered whole, not streamed"
        return TokenFeed(batches=iter([tokens]), num_total=len(tokens), adjustments=(note,))

    def _rendered(self, messages: Sequence[Message], images: Sequence[Any]) -> tuple[str, list[Any], bool]:
        """(text, its images in order, whether special tokens are to be added)."""
        if self.template is None:
            raise InvalidPrompt("The model has no chat template, so messages cannot be rendered. Give a text instead.")
        opened = with_images(messages, images)
        text = self.template.render([bare(message) for message in opened])
        begins_with_bos = bool(self.bos_token) and text.startswith(str(self.bos_token))
        return text, list(images_of(opened)), not begins_with_bos


def refuse_media(prompt: Any, images: Sequence[Any], lane_id: str) -> None:
    """Of a model that reads text only."""
    is_chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
    messages = [message for message in prompt if isinstance(message, Mapping)] if is_chat else []
    parts = [part for message in messages for part in image_parts(message)]
    if num_images := len(images) or len(parts):
        raise InvalidMedia(
            f"{num_images} image(s) given; this model runs on {lane_id}, which reads text only. Leave them out or "
            "take an image-text model."
        )


def with_images(messages: Sequence[Message], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Each image in its part: in those that are empty, or where there is none, first in the last user message."""
    opened = [dict(message) | {"content": content_parts(message)} for message in messages]
    empty = [part for message in opened for part in image_parts(message) if "image" not in part]
    if not images and not empty:
        return opened
    if images and not any(True for message in opened for _ in image_parts(message)):
        place = next((message for message in reversed(opened) if message.get("role") == "user"), None)
        if place is None:
            raise InvalidMedia(f"{len(images)} image(s) given, and no user message that they could be part of.")
        place["content"] = [*({**IMAGE_PART, "image": image} for image in images), *place["content"]]
        return opened
    if len(empty) != len(images):
        raise InvalidMedia(
            f"The messages have {len(empty)} image part(s) without an image, and {len(images)} image(s) were given. "
            "Give one image for each."
        )
    for part, image in zip(empty, images, strict=True):
        part["image"] = image
    return opened


def content_parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise InvalidPrompt(
            f"The content of a message is a {type(content).__name__}; give a text, or a list of text and image parts."
        )
    unknown = next((part.get("type") for part in content if part.get("type") not in ("text", "image")), None)
    if unknown is not None:
        raise InvalidMedia(f"A message has a part of type {unknown!r}; only text and image parts are read.")
    return [dict(part) for part in content]


def image_parts(message: Message) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        yield from (part for part in content if isinstance(part, Mapping) and part.get("type") == "image")


def images_of(messages: Sequence[Message]) -> Iterator[Any]:
    yield from (part["image"] for message in messages for part in image_parts(message))


def bare(message: Message) -> dict[str, Any]:
    """As the template sees it: where images are, not what they are."""
    parts = [IMAGE_PART if part["type"] == "image" else part for part in message["content"]]
    return dict(message) | {"content": parts}
