"""The header of a GGUF file: metadata and where each tensor lies. No tensor data is touched."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from penstock.errors import InvalidModelFile, brief

WINDOW_BYTES = 1 << 20
MAX_HEADER_BYTES = 128 << 20
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 1 << 21
MAX_ARRAY_DEPTH = 3
MAX_DIMENSIONS = 4
MAX_NAME_CHARACTERS = 256
MAX_PARTS = 1000
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MAX_KEPT_ITEMS = 1024  # of an array; a longer one stays in the file until it is asked for

SCALAR_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    name: str
    path: Path
    shape: tuple[int, ...]  # torch order: rows first
    quant_type: GGMLQuantizationType
    offset: int  # from the start of its file
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    path: Path  # of the first part, where there are several
    metadata: Mapping[str, Any]
    tensors: dict[str, GgufTensor]
    parts: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredArray:
    """Says where a long array lies, whose items were checked and not kept."""

    kind: GGUFValueType
    count: int
    offset: int


class _Metadata(Mapping[str, Any]):
    """Holds the short values and reads the long ones (a vocabulary, its merges) whenever they are asked for."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, _StoredArray):
            return value
        with _opened(self._path, value.offset) as cursor:
            return cursor.items(value.kind, value.count, f"the value of {key!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Cursor:
    """Walks the header through a small window; no length is believed before it is checked."""

    def __init__(self, file: BinaryIO, path: Path, offset: int = 0) -> None:
        self.path = path
        self._file = file
        self.num_file_bytes = os.fstat(file.fileno()).st_size
        self._window = b""
        self._window_start = file.seek(offset)
        self._at = 0  # within the window

    @property
    def position(self) -> int:
        return self._window_start + self._at

    def invalid(self, what: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self.path} is not a usable GGUF file: {what}; download or convert it again.")

    def require(self, num_bytes: int, what: str) -> None:
        """Refuses a claim that the file, or a sane header, could not hold. Reads nothing."""
        end = self.position + num_bytes
        if end > self.num_file_bytes:
            raise self.invalid(f"{what} needs {end} bytes, the file has {self.num_file_bytes}")
        if end > MAX_HEADER_BYTES:
            raise self.invalid(f"{what} ends at byte {end}, beyond the limit of {MAX_HEADER_BYTES} for a header")

    def _fill(self, num_bytes: int, what: str) -> None:
        """Makes the next `num_bytes` readable at `_at`."""
        if self._at + num_bytes <= len(self._window):
            return
        self.require(num_bytes, what)
        rest = self._window[self._at :]
        self._window_start += self._at
        self._at = 0
        self._window = rest + self._file.read(max(WINDOW_BYTES, num_bytes - len(rest)))
        if len(self._window) < num_bytes:
            raise self.invalid(f"{what} at byte {self.position} is cut off")

    def take(self, num_bytes: int, what: str) -> bytes:
        self._fill(num_bytes, what)
        start = self._at
        self._at += num_bytes
        return self._window[start : self._at]

    def scalar(self, kind: GGUFValueType, what: str) -> Any:
        code = SCALAR_FORMATS[kind]
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def u32(self, what: str) -> int:
        return self.scalar(GGUFValueType.UINT32, what)

    def u64(self, what: str) -> int:
        return self.scalar(GGUFValueType.UINT64, what)

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """The one hot loop: a vocabulary and its merges are some hundred thousand strings."""
        self.require(count * 8, what)
        unpack_length = struct.Struct("<Q").unpack_from
        found: list[str] = []
        window, at, end = self._window, self._at, len(self._window)
        for _ in range(count):
            if at + 8 > end or at + 8 + unpack_length(window, at)[0] > end:
                self._at = at
                self._fill_string(what)
                window, at, end = self._window, self._at, len(self._window)
            stop = at + 8 + unpack_length(window, at)[0]
            try:
                found.append(window[at + 8 : stop].decode())
            except UnicodeDecodeError:
                raise self.invalid(f"{what} at byte {self._window_start + at} is not UTF-8") from None
            at = stop
        self._at = at
        return found

    def _fill_string(self, what: str) -> None:
        self._fill(8, what)
        length = struct.unpack_from("<Q", self._window, self._at)[0]
        if length > MAX_STRING_BYTES:
            raise self.invalid(f"{what} is a string of {length} bytes, the limit is {MAX_STRING_BYTES}")
        self._fill(8 + length, what)

    def value(self, what: str) -> Any:
        kind = self._value_type(what)
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind == GGUFValueType.ARRAY:
            return self._array(what, 1)
        return self.scalar(kind, what)

    def _value_type(self, what: str) -> GGUFValueType:
        number = self.u32(what)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.invalid(f"{what} has the unknown value type {number}") from None

    def _array(self, what: str, depth: int) -> list[Any] | _StoredArray:
        if depth > MAX_ARRAY_DEPTH:
            raise self.invalid(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind = self._value_type(what)
        count = self.u64(what)
        if count > MAX_ARRAY_ITEMS:
            raise self.invalid(f"{what} is an array of {count} items, the limit is {MAX_ARRAY_ITEMS}")
        if kind == GGUFValueType.ARRAY:
            self.require(count * 12, what)
            return [self._array(what, depth + 1) for _ in range(count)]
        stored = _StoredArray(kind=kind, count=count, offset=self.position)
        items = self.items(kind, count, what)
        return items if count <= MAX_KEPT_ITEMS or depth > 1 else stored

    def items(self, kind: GGUFValueType, count: int, what: str) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return self.strings(count, what)
        dtype = np.dtype(SCALAR_FORMATS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype=dtype).tolist()


def is_first(path: Path) -> bool:
    """Whether a file's name is that of a whole model, or of the first of its parts."""
    match = PART.fullmatch(path.name)
    return match is None or int(match[2]) == 1


def read_gguf(path: Path | str) -> GgufFile:
    """Metadata and tensor extents of a GGUF file, or of all its parts; tensor data is neither read nor mapped."""
    path = Path(path)
    match = PART.fullmatch(path.name)
    metadata, tensors = _read_part(path)
    if (count := metadata.get("split.count", 0)) in (0, 1):
        return GgufFile(path=path, metadata=_Metadata(path, metadata), tensors=tensors, parts=(path,))
    if match is None:
        raise InvalidModelFile(
            f"{path} is a part of {brief(count)}, and its name does not say so; name parts as they were made, such as "
            "model-00001-of-00003.gguf."
        )
    count = int(match[3])
    parts = tuple(path.with_name(f"{match[1]}-{1 + i:05d}-of-{match[3]}.gguf") for i in range(min(count, MAX_PARTS)))
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not 1 < count <= MAX_PARTS:
        raise InvalidModelFile(
            f"{path} is one of {count} parts, at most {MAX_PARTS} are read, and missing are {missing[:3] or 'none'}; "
            "download all into one folder."
        )
    return _joined(parts)


def _joined(parts: tuple[Path, ...]) -> GgufFile:
    """The first part has the metadata; each says which it is, and the first how many tensors there are in all."""
    whole: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for index, path in enumerate(parts):
        metadata, found = _read_part(path)
        whole = whole or metadata
        said = metadata.get("split.no"), metadata.get("split.count")
        if said != (index, len(parts)) or found.keys() & tensors.keys():
            raise InvalidModelFile(
                f"{path} says it is part {brief(said[0])} of {brief(said[1])}, counted from 0, or holds tensors of "
                f"another part; it should be {index} of {len(parts)}. Download it again."
            )
        tensors |= found
    if (wanted := whole.get("split.tensors.count")) not in (None, len(tensors)):
        raise InvalidModelFile(
            f"The parts of {parts[0]} hold {len(tensors)} tensors, not {brief(wanted)}; download them again."
        )
    return GgufFile(path=parts[0], metadata=_Metadata(parts[0], whole), tensors=tensors, parts=parts)


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    with _opened(path) as cursor:
        num_tensors, num_keys = _read_preamble(cursor)
        metadata = _read_metadata(cursor, num_keys)
        return metadata, _read_tensors(cursor, num_tensors, metadata)


@contextmanager
def _opened(path: Path, offset: int = 0) -> Generator[_Cursor]:
    try:
        with path.open("rb", buffering=0) as file:
            yield _Cursor(file, path, offset)
    except OSError as error:
        raise InvalidModelFile(
            f"{path} cannot be read: {error.strerror}; check the path and its permissions."
        ) from error


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise cursor.invalid(f"it starts with {magic!r}, not with b'GGUF'")
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = f"big-endian version {swapped}" if swapped in (2, 3) else f"version {version}"
        raise cursor.invalid(f"it is {kind}, and only little-endian versions 2 and 3 are read")
    return cursor.u64("the tensor count"), cursor.u64("the key count")


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    cursor.require(num_keys * 13, f"a table of {num_keys} keys")  # a length, a type and at least one byte each
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"key {index}")
        if key in metadata or len(key) > MAX_NAME_CHARACTERS:
            raise cursor.invalid(f"key {brief(key)} is there twice or longer than {MAX_NAME_CHARACTERS}")
        metadata[key] = cursor.value(f"the value of {key!r}")
    return metadata


def _read_tensors(cursor: _Cursor, num_tensors: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
    cursor.require(num_tensors * 32, f"a table of {num_tensors} tensors")  # name length, rank, a size, type, offset
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.invalid(f"general.alignment is {brief(alignment)}, not a power of two up to {1 << 20}")
    relative = [_read_tensor_info(cursor, index, alignment) for index in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = data_start
    for name, shape, quant_type, offset, num_bytes in sorted(relative, key=lambda info: info[3]):
        start = data_start + offset
        if name in tensors:
            raise cursor.invalid(f"tensor {name!r} is there twice")
        if start < end:
            raise cursor.invalid(f"tensor {name!r} overlaps the one before it at byte {start}")
        end = start + num_bytes
        if end > cursor.num_file_bytes:
            raise InvalidModelFile(
                f"{cursor.path} is truncated: tensor {name!r} ends at byte {end}, the file has "
                f"{cursor.num_file_bytes} bytes; download it again."
            )
        tensors[name] = GgufTensor(
            name=name, path=cursor.path, shape=shape, quant_type=quant_type, offset=start, num_bytes=num_bytes
        )
    return tensors


def _read_tensor_info(
    cursor: _Cursor, index: int, alignment: int
) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
    name = cursor.string(f"the name of tensor {index}")
    if len(name) > MAX_NAME_CHARACTERS:
        raise cursor.invalid(f"tensor name {brief(name)} is longer than {MAX_NAME_CHARACTERS} characters")
    what = f"tensor {name!r}"
    num_dimensions = cursor.u32(what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.invalid(f"{what} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.u64(what) for _ in range(num_dimensions))[::-1]  # stored fastest dimension first
    number, offset = cursor.u32(what), cursor.u64(what)
    try:
        quant_type = GGMLQuantizationType(number)
        block_items, block_bytes = GGML_QUANT_SIZES[quant_type]
    except (ValueError, KeyError):
        raise cursor.invalid(f"{what} has the unknown type {number}") from None
    if 0 in shape or shape[-1] % block_items:
        raise cursor.invalid(f"{what} of shape {shape} does not fill {quant_type.name} blocks of {block_items}")
    if offset % alignment:
        raise cursor.invalid(f"{what} starts at {offset}, not on the alignment of {alignment}")
    return name, shape, quant_type, offset, prod(shape) // block_items * block_bytes
