"""Messages with images in them: where each image goes, and what the chat template sees of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidMedia, InvalidPrompt

Message = Mapping[str, Any]
IMAGE_PART = {"type": "image"}


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


def in_parts(message: Message) -> dict[str, Any]:
    """Shows a text as the only part of its message."""
    content = message.get("content")
    return dict(message) | ({"content": content_parts(message)} if isinstance(content, str) else {})


def image_parts(message: Message) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        yield from (part for part in content if isinstance(part, Mapping) and part.get("type") == "image")


def images_of(messages: Sequence[Message]) -> Iterator[Any]:
    yield from (part["image"] for message in messages for part in image_parts(message))


def bare(message: Message) -> dict[str, Any]:
    """Shows a message as the template sees it: where images are, not what they are."""
    parts = [IMAGE_PART if part["type"] == "image" else part for part in message["content"]]
    return dict(message) | {"content": parts}
