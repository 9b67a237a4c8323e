"""Text and images to a model's inputs: a processor, probed once, and images, checked before it sees them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InvalidMedia, UnsupportedModel
from penstock.foreign.signature import ForwardSignature

MAX_IMAGE_PIXELS = 64_000_000
MAX_PROMPT_PIXELS = 256_000_000  # of all images of a prompt, which lie in memory together, in 3 bytes each
MEGAPIXEL = 1e6


class MediaProcessor:
    """Calls a processor of transformers once per prompt, with the arguments that it takes."""

    def __init__(self, processor: Any) -> None:
        if not callable(processor):
            raise UnsupportedModel(f"The processor is a {type(processor).__name__}, which cannot be called.")
        self.processor = processor
        self.placeholder = _placeholder(processor)  # None: not known, and counted only after expansion
        self._takes = _parameters(processor)
        if not self._accepts("text") or not self._accepts("images"):
            raise UnsupportedModel(f"{type(processor).__name__} does not take text and images.")

    def inputs(self, text: str, images: Sequence[Any] = (), *, add_special_tokens: bool = True) -> dict[str, Any]:
        """Tensors of one prompt, placeholders expanded. An image is a path, the bytes of a file, or a PIL image."""
        opened = open_images(images)
        self._require_placeholders(text, len(opened))
        arguments: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
        if opened:
            arguments["images"] = opened
        if not add_special_tokens:
            arguments["add_special_tokens"] = False
        accepted = {name: value for name, value in arguments.items() if self._accepts(name)}
        try:
            output = self.processor(**accepted)
        except (ValueError, TypeError, IndexError, KeyError, RuntimeError, StopIteration) as error:
            problem = " ".join(str(error).split())[:200] or type(error).__name__
            raise InvalidMedia(f"The processor refused the prompt with {len(opened)} image(s): {problem}") from error
        return _as_dict(output)

    def _accepts(self, name: str) -> bool:
        return self._takes is None or name in self._takes

    def _require_placeholders(self, text: str, num_images: int) -> None:
        if self.placeholder is None:
            return
        num_placeholders = text.count(self.placeholder)
        if num_placeholders != num_images:
            raise InvalidMedia(
                f"The prompt has {num_placeholders} image placeholder(s) {self.placeholder} and {num_images} image(s). "
                f"Give one image for each placeholder."
            )


def open_images(sources: Sequence[Any]) -> list[Any]:
    """Opens the images of a prompt; those that have too many pixels together are refused before any is decoded."""
    names = [f"image {number}" for number in range(1, len(sources) + 1)]
    sizes = [open_image(one, name=name, is_decoded=False).size for one, name in zip(sources, names, strict=True)]
    if (total := sum(width * height for width, height in sizes)) > MAX_PROMPT_PIXELS:
        raise InvalidMedia(
            f"The {len(sizes)} images have {total / MEGAPIXEL:.0f} megapixels together; the limit is "
            f"{MAX_PROMPT_PIXELS / MEGAPIXEL:.0f}. Scale them down, or give fewer."
        )
    return [open_image(one, name=name) for one, name in zip(sources, names, strict=True)]


def open_image(source: Any, *, name: str = "the image", is_decoded: bool = True) -> Any:
    """An RGB image of PIL. What is not an image, or has too many pixels, is refused before it is decoded."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InvalidMedia("Reading images needs Pillow; install it with pip install pillow.") from None

    label = f"{name} ({source})" if isinstance(source, (str, Path)) else name
    try:
        if isinstance(source, Image.Image):
            image = source
        else:
            image = Image.open(io.BytesIO(source) if isinstance(source, (bytes, bytearray)) else Path(source))
        if image.format == "EPS":  # to read it, Pillow starts Ghostscript on what may be a stranger's program
            raise InvalidMedia(f"{label} is PostScript, which is a program. Convert it to PNG or JPEG.")
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise InvalidMedia(
                f"{label} has {width} x {height} pixels; the limit is {MAX_IMAGE_PIXELS / MEGAPIXEL:.0f} megapixels. "
                f"Scale it down."
            )
        return image.convert("RGB") if is_decoded else image
    except FileNotFoundError:
        raise InvalidMedia(f"{label} does not exist.") from None
    except Image.DecompressionBombError:
        limit = MAX_IMAGE_PIXELS / MEGAPIXEL
        raise InvalidMedia(
            f"{label} has too many pixels; the limit is {limit:.0f} megapixels. Scale it down."
        ) from None
    except UnidentifiedImageError:  # whose own words name an address in memory
        raise InvalidMedia(f"{label} is not an image that can be read: its format is not known.") from None
    except (OSError, SyntaxError, ValueError, TypeError) as error:
        problem = " ".join(str(error).split())[:120]
        raise InvalidMedia(f"{label} is not an image that can be read ({problem}).") from None


def _placeholder(processor: Any) -> str | None:
    """What stands for an image in the text: where an image begins with a token of its own, that one."""
    for name in ("boi_token", "image_token"):
        token = getattr(processor, name, None)
        token = getattr(token, "content", token)
        if isinstance(token, str) and token:
            return token
    return None


def _parameters(processor: Any) -> frozenset[str] | None:
    """None: it takes anything, or does not say."""
    try:
        signature = ForwardSignature.of(processor)
    except (TypeError, ValueError):
        return None
    return None if signature.takes_others else signature.names


def _as_dict(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping) or (hasattr(output, "keys") and hasattr(output, "__getitem__")):
        return {name: output[name] for name in output.keys()}  # noqa: SIM118, PERF: mapping-like, not a dict
    raise InvalidMedia(f"The processor returned a {type(output).__name__}, not names with tensors.")
