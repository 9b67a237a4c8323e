"""Headers of GGUF files as converters write them, recorded: what they say, and the config that it means."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf

from penstock.models.gguf import GgufFile, GgufTensor

HEADERS = Path(__file__).parent / "pure" / "gguf_headers.json"


@cache
def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(HEADERS.read_text())


def header(case: str) -> GgufFile:
    said = recorded()[case]
    path, kind = Path("model.gguf"), gguf.GGMLQuantizationType.F32
    tensors = {
        name: GgufTensor(name=name, path=path, shape=tuple(shape), quant_type=kind, offset=0, num_bytes=0)
        for name, shape in said["tensors"].items()
    }
    return GgufFile(path=path, metadata=said["metadata"], tensors=tensors, parts=(path,))
