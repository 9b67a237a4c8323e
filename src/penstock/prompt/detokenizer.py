"""Text from ids that arrive one by one, equal to decoding them together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.prompt.cuts import flat

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

# These look at one token at a time, and at whether it is the first or the last.
_TOKEN_BY_TOKEN = frozenset({"BPEDecoder", "ByteFallback", "ByteLevel", "Metaspace", "Replace", "Strip", "WordPiece"})


def decodes_by_token(spec: dict[str, Any] | None) -> bool:
    """Whether text once decoded stays as it is when more tokens follow, unless it ends within a character."""
    fused = False
    for step in flat(spec, "decoders"):
        kind = step["type"]
        if fused and not (kind == "Strip" and step["start"] <= 1 and step["stop"] == 0):
            return False
        if kind not in _TOKEN_BY_TOKEN and kind != "Fuse":
            return False
        fused = fused or kind in ("Fuse", "ByteLevel")
    return True


@dataclass(slots=True, kw_only=True)
class Detokenizer:
    """Push ids, get text; what is pushed and then flushed is the text of all ids together.

    New ids are decoded behind a few that already gave text, so that nothing is taken for the start of the answer.
    """

    decode: Callable[[Sequence[int]], str]
    token: Callable[[int], str | None]
    by_token: bool
    _context: list[int] = field(default_factory=list)
    _pending: list[int] = field(default_factory=list)

    def push(self, token_id: int) -> str:
        """The text that is certain from now on; empty within a character, or within a run of single bytes."""
        token = self.token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        # A run of byte tokens is decoded as one: a later bad byte changes the text of earlier good ones.
        if not self.by_token or _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self.decode(self._context + self._pending)
        return "" if text.endswith(_REPLACEMENT) else self._settle(text)

    def flush(self) -> str:
        return self._settle(self.decode(self._context + self._pending)) if self._pending else ""

    def _settle(self, text: str) -> str:
        new = text[len(self.decode(self._context)) :]
        if new:
            self._context, self._pending = self._pending, []
        return new
