"""Opens what prompt text comes from: literals, files and standard input, read piece by piece as strict UTF-8."""

from __future__ import annotations

import codecs
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.errors import InvalidPrompt

PIECE_BYTES = 16 * 1024
WAY_OUT = "Give the path of a text file, or - for standard input."
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # text with zeros in it


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """One part of a message: a text, a file, or an open stream that can be read once. Exactly one is set."""

    text: str | None = None
    path: Path | None = None
    stream: BinaryIO | None = None
    name: str = "text"

    @classmethod
    def of_text(cls, text: str) -> TextPart:
        return cls(text=text)

    @classmethod
    def of_file(cls, path: Path) -> TextPart:
        try:
            mode = path.stat().st_mode
            with path.open("rb"):
                pass
        except OSError as error:
            raise InvalidPrompt(f"{path} cannot be read: {error.strerror}. {WAY_OUT}") from None
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            raise InvalidPrompt(f"{path} is not a file. {WAY_OUT}")
        return cls(path=path, name=str(path))

    @property
    def num_bytes(self) -> int | None:
        """None when it can be known only by reading to the end."""
        if self.text is not None:
            return len(self.text.encode("utf-8", errors="surrogatepass"))
        if self.path is not None and stat.S_ISREG(self.path.stat().st_mode):
            return self.path.stat().st_size
        return None

    def pieces(self) -> Iterator[str]:
        if self.text is not None:
            yield self.text
        elif self.stream is not None:
            yield from _decoded(self.stream, self.name)
        elif self.path is not None:
            with self.path.open("rb") as file:
                yield from _decoded(file, self.name)


def _decoded(file: BinaryIO, name: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    read = getattr(file, "read1", file.read)  # a pipe gives what it has instead of waiting for a full piece
    offset = 0
    while True:
        data = read(PIECE_BYTES)
        num_pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            position = offset - num_pending + error.start
            is_binary = 0 in data and not (offset == 0 and data.startswith(UTF16))
            where = f"byte 0x{error.object[error.start]:02x} at offset {position}"
            if is_binary:
                message = f"{name} is not text: it has {where}, and zero bytes. Convert it to text first."
            else:
                message = f"{name} is not valid UTF-8: {where}. Convert it, for example with iconv."
            raise InvalidPrompt(message) from None
        if text:
            yield text
        if not data:
            return
        offset += len(data)
