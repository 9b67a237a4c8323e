"""Slabs as bytes: keys and values of a run of whole blocks, under a header that proves what they are. No torch."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

from penstock.request import Slab

MAGIC = b"PENSTKV\0"
FORMAT_VERSION = 1
RAW = b"raw\0\0\0\0\0"  # the codec: values as they lie in memory
PAGE = 4096  # headers fill whole pages, so that what follows them is aligned
SLAB_BYTES = 1 << 20  # disks are slow below
MAX_SLAB_TOKENS = 256  # of tiny models: what is shorter than a slab is not found again
MAX_HEADER_BYTES = 16 << 20
DIGEST_BYTES = 16

# magic, version, has_state, codec, namespace, key, previous, first, number of tokens, number of sections
FIXED = struct.Struct("<8sHH8s16s16s16sQII")

Pieces = Sequence[memoryview]  # one section of a slab, as it lies in memory


class DamagedSlab(Exception):
    """What was read is not what was written, or not what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLayout:
    """Says how many bytes the sections of a slab have: keys, then values, of each layer; then states."""

    block_size: int
    row_bytes: tuple[int, ...]  # of one token, for each tensor of keys or values
    state_bytes: tuple[int, ...] = ()  # of one slot, for each tensor of recurrent state

    @property
    def blocks_per_slab(self) -> int:
        """The fewest whole blocks that have SLAB_BYTES, within MAX_SLAB_TOKENS."""
        block_bytes = self.block_size * sum(self.row_bytes)
        most = max(1, MAX_SLAB_TOKENS // self.block_size)
        return min(most, -(-SLAB_BYTES // max(1, block_bytes)))

    @property
    def slab_tokens(self) -> int:
        return self.block_size * self.blocks_per_slab

    def sections(self, slab: Slab) -> tuple[int, ...]:
        rows = tuple(len(slab.tokens) * size for size in self.row_bytes)
        return rows + (self.state_bytes if slab.has_state else ())

    def file_bytes(self, slab: Slab) -> int:
        sections = self.sections(slab)
        return header_bytes(len(slab.tokens), len(sections)) + sum(sections)


def header_bytes(num_tokens: int, num_sections: int) -> int:
    size = FIXED.size + 4 * (num_tokens + 2 * num_sections) + DIGEST_BYTES
    return -(-size // PAGE) * PAGE


def checksum(pieces: Iterable[memoryview]) -> int:
    """Sums up one section."""
    value = 0
    for piece in pieces:
        value = crc32(piece, value)
    return value


def encode_header(slab: Slab, namespace: bytes, sections: Sequence[int], checksums: Sequence[int]) -> bytes:
    size = header_bytes(len(slab.tokens), len(checksums))
    counts = (len(slab.tokens), len(checksums))
    named = (namespace, slab.key, slab.previous, slab.first)
    body = FIXED.pack(MAGIC, FORMAT_VERSION, slab.has_state, RAW, *named, *counts)
    body += b"".join(array("I", numbers).tobytes() for numbers in (slab.tokens, sections, checksums))
    body = body.ljust(size - DIGEST_BYTES, b"\0")
    return body + blake2b(body, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    namespace: bytes
    slab: Slab
    sections: tuple[int, ...]  # the bytes of each
    checksums: tuple[int, ...]


def size_of_header(start: bytes) -> int:
    """Reads how long a header is from its first bytes."""
    if len(start) < FIXED.size:
        raise DamagedSlab("shorter than a header")
    magic, version, _, codec, *_, num_tokens, num_sections = FIXED.unpack_from(start)
    if (magic, version, codec) != (MAGIC, FORMAT_VERSION, RAW):
        raise DamagedSlab("not a slab of this version")
    size = header_bytes(num_tokens, num_sections)
    if size > MAX_HEADER_BYTES:
        raise DamagedSlab("a header without end")
    return size


def decode_header(data: bytes) -> Header:
    if size_of_header(data) != len(data):
        raise DamagedSlab("a header of another length")
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
        raise DamagedSlab("the header does not match its digest")
    _, _, has_state, _, namespace, key, previous, first, num_tokens, num_sections = FIXED.unpack_from(body)
    numbers = array("I", body[FIXED.size : FIXED.size + 4 * (num_tokens + 2 * num_sections)])
    tokens, numbers = tuple(numbers[:num_tokens]), numbers[num_tokens:]
    slab = Slab(key=key, previous=previous, first=first, tokens=tokens, has_state=bool(has_state))
    return Header(
        namespace=namespace, slab=slab, sections=tuple(numbers[:num_sections]), checksums=tuple(numbers[num_sections:])
    )


def require_slab(header: Header, slab: Slab, namespace: bytes, sections: Sequence[int]) -> None:
    """Refuses all but the slab that was asked for: equal token ids, not equal hashes alone."""
    if (header.namespace, header.slab, header.sections) != (namespace, slab, tuple(sections)):
        raise DamagedSlab("another slab than its name says")
