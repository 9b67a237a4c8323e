"""The header of a safetensors file: where each tensor lies, checked before any of it is read. No torch."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeGuard

from penstock.errors import InvalidModelFile, brief

MAX_HEADER_BYTES = 100 << 20
# Types that the format knows, also those that we do not compute with: their sizes have to add up.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "C64", "F64"), 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Types, shapes and places of a file's tensors, each of them checked against the file's size."""
    try:
        with path.open("rb", buffering=0) as file:
            num_file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(8)
            num_header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else num_file_bytes
            limit = min(num_file_bytes - 8, MAX_HEADER_BYTES)
            if num_header_bytes > limit:
                raise _bad_header(path, f"its header of {num_header_bytes} bytes exceeds {limit}")
            header = json.loads(file.read(num_header_bytes))
    except OSError as error:
        raise InvalidModelFile(f"{path} cannot be read: {error.strerror}; check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise _bad_header(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _bad_header(path, "its header is not a JSON object")
    data_start = 8 + num_header_bytes
    tensors: dict[str, StoredTensor] = {}
    extents: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _checked_entry(path, name, entry, num_file_bytes - data_start)
        extents.append((begin, end, name))
        tensors[name] = StoredTensor(path=path, dtype=dtype, shape=shape, offset=data_start + begin)
    reached = 0
    for begin, end, name in sorted(extents):
        if begin < reached:
            raise _bad_header(path, f"tensor {brief(name)} overlaps another at byte {data_start + begin}")
        reached = max(reached, end)
    return tensors


def _bad_header(path: Path, what: str) -> InvalidModelFile:
    return InvalidModelFile(f"{path} is not a usable safetensors file: {what}; download it again.")


def _checked_entry(path: Path, name: str, entry: object, num_data_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, place = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(place) or len(place) != 2:
        raise _bad_header(path, f"tensor {brief(name)} lacks a dtype, shape or data_offsets")
    begin, end = place
    if not begin <= end <= num_data_bytes:
        raise _bad_header(path, f"tensor {brief(name)} lies at {begin} to {end} of {num_data_bytes} data bytes")
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is not None and prod(shape) * item_bytes != end - begin:
        raise _bad_header(path, f"tensor {brief(name)} of {brief(dtype)} {brief(shape)} has {end - begin} bytes")
    return dtype, tuple(shape), begin, end


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    is_short = isinstance(value, list) and len(value) <= 16
    return is_short and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
