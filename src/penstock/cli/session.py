"""Conversations in files: what `chat --session`, `/save` and `/load` write and read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.document import Document
from penstock.errors import InvalidSetting

MAX_BYTES = 64 << 20


class SavedMessages(Document):
    model: str  # that answered, as it was named
    messages: list[dict[str, Any]]  # of the conversation; pictures by their paths


def read_messages(path: Path) -> list[dict[str, Any]]:
    """Reads a conversation; refuses what is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidSetting(f"{path} has more than {MAX_BYTES >> 20} MiB, the limit of a conversation.")
        return SavedMessages.model_validate_json(path.read_bytes()).messages
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    except ValidationError as error:
        first = error.errors()[0]["msg"][:200]
        raise InvalidSetting(f"{path} is no conversation of this program ({first}). Name another.") from error


def write_messages(path: Path, model: str, messages: list[dict[str, Any]], write: Callable[[bytes], object]) -> None:
    """Writes a conversation; `write`: puts the bytes to the path."""
    try:
        write(SavedMessages(model=model, messages=messages).model_dump_json(indent=1).encode())
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be written: {error.strerror}. Name another file.") from error
