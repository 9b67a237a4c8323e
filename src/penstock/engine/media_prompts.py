"""Prompts with images: from text, messages and pictures to what the multimodal lane reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.feed import TokenFeed
from penstock.engine.prompts import Message, joined_text, parts_with_text
from penstock.errors import InvalidMedia, InvalidPrompt
from penstock.lanes.media import MediaPrompt
from penstock.lanes.multimodal import MultimodalLane
from penstock.prompt.render import ChatTemplate
from penstock.prompt.source import TextPart
from penstock.prompt.tokens import Tokenizer

IMAGE_PART = {"type": "image"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPromptReader:
    """`bos_token`: a rendered chat that begins with it is not given another."""

    lane: MultimodalLane
    tokenizer: Tokenizer
    template: ChatTemplate | None
    bos_token: str | None

    def read(self, prompt: str | Sequence[int] | Sequence[Message], images: Sequence[Any], free_bytes: int) -> Any:
        """The prompt, its images encoded. A text has a placeholder for each image; messages have image parts."""
        if isinstance(prompt, str):
            return self._of_text(prompt, images, add_special_tokens=True, free_bytes=free_bytes)
        messages = [item for item in prompt if isinstance(item, Mapping)]
        if messages and len(messages) == len(prompt):
            text, found = self._rendered(messages, images)
            adds = not (self.bos_token and text.startswith(self.bos_token))
            return self._of_text(text, found, add_special_tokens=adds, free_bytes=free_bytes)
        if images:
            raise InvalidMedia(f"{len(images)} image(s) given with token ids. Give a text or messages with them.")
        return prompt

    def chat_feed(self, parts: Sequence[TextPart], *, system: str | None) -> TokenFeed:
        """One user message of text. Templates of image-text models look into their content: it is rendered whole."""
        messages = [{"role": "system", "content": system}] if system else []
        content = "".join(joined_text(parts_with_text(parts)))
        tokens = self.read([*messages, {"role": "user", "content": content}], (), 0)
        note = "the chat template of an image-text model inspects its content: rendered whole, not streamed"
        return TokenFeed(batches=iter([tokens]), num_total=len(tokens), adjustments=(note,))

    def _of_text(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool, free_bytes: int
    ) -> MediaPrompt | list[int]:
        """Text alone goes to the tokenizer, so that it is read where no processor can be made."""
        if not images:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self.lane.prompt(text, images, add_special_tokens=add_special_tokens, free_bytes=free_bytes)

    def _rendered(self, messages: Sequence[Message], images: Sequence[Any]) -> tuple[str, list[Any]]:
        if self.template is None:
            raise InvalidPrompt("The model has no chat template, so messages cannot be rendered. Give a text instead.")
        opened = with_images(messages, images)
        return self.template.render([bare(message) for message in opened]), list(images_of(opened))


def refuse_media(prompt: Any, images: Sequence[Any], lane_id: str) -> None:
    """Of a model that reads text only."""
    is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    parts = (
        [part for message in prompt if isinstance(message, Mapping) for part in image_parts(message)] if is_chat else []
    )
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
