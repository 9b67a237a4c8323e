"""Metadata of one architecture in a GGUF file, read as what it has to be."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import InvalidModelFile, brief
from penstock.models.gguf import GgufFile


class Keys:
    """Typed reads of one architecture's metadata; a missing or odd value is refused by name."""

    def __init__(self, gguf: GgufFile, prefix: str) -> None:
        self.gguf = gguf
        self.metadata = gguf.metadata
        self.path = gguf.path
        self._prefix = prefix

    def raw(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self._prefix}.{key}", default)

    def refuse(self, key: str, value: object, wanted: str) -> InvalidModelFile:
        shown = "missing" if value is None else brief(value)
        return InvalidModelFile(f"{self.path}: {self._prefix}.{key} is {shown}, not {wanted}; convert the model again.")

    def integer(
        self, key: str, default: int | None = None, *, skips_zeros: bool = False, layer: int | None = None
    ) -> int:
        """Reads one number; of a list, that of all layers or of `layer`. Zeros are of layers that have none."""
        value = self.raw(key, default)
        if isinstance(value, list) and layer is not None:
            value = value[layer] if layer < len(value) else None
        elif isinstance(value, list):
            given = [item for item in value if item != 0 or not skips_zeros]
            value = given[0] if given and all(item == given[0] for item in given) else value
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.refuse(key, value, "one whole number above 0 for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.refuse(key, value, "a number above 0")
        return shortest_float32(value)

    def optional_number(self, key: str) -> float | None:
        """None when the key is absent or 0, which is how converters say `none`."""
        return self.number(key) if self.raw(key) not in (None, 0) else None


def shortest_float32(value: float) -> float:
    """1e-05 rather than the 9.999999747378752e-06 that it became in 32 bits."""
    return float(str(np.float32(value)))
