"""Small slabs of known bytes, and every way in which a disk may give back something else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import blake2b

from penstock.cache.slabs import FIXED, Slab, SlabLayout

LAYOUT = SlabLayout(block_size=16, row_bytes=(8, 8, 12, 4), state_bytes=(40, 24))
NAMESPACE = b"a namespace of16"


def slab_at(index: int, **changes) -> Slab:
    """Makes slab `index` of a prefix of random tokens."""
    keys = [blake2b(bytes([number]), digest_size=16).digest() for number in (index, index + 1)]
    drawn = random.Random(index)
    of = {"first": 16 * index, "tokens": tuple(drawn.randrange(2**32) for _ in range(16)), "has_state": False}
    return Slab(**{"key": keys[1], "previous": keys[0], **of, **changes})


def payload(slab: Slab) -> list[list[memoryview]]:
    """Its sections, of bytes that only this slab has; the first in two pieces."""
    drawn = random.Random(slab.name_key)
    parts = [memoryview(drawn.randbytes(size)) for size in LAYOUT.sections(slab)]
    return [[parts[0][:10], parts[0][10:]], *([part] for part in parts[1:])]


def memory(slab: Slab) -> list[list[memoryview]]:
    """Where it may be read to."""
    parts = [memoryview(bytearray(size)) for size in LAYOUT.sections(slab)]
    return [[parts[0][:7], parts[0][7:]], *([part] for part in parts[1:])]


def damages(whole: bytes, number: int, seed: int) -> Iterator[bytes]:
    """Every byte of the header's fields changed, then truncations, bits, zeroed and swapped pages, and lengthened."""
    drawn = random.Random(seed)
    for place in range(min(number, FIXED.size + 200)):
        yield whole[:place] + bytes([whole[place] ^ drawn.randrange(1, 256)]) + whole[place + 1 :]
    for _ in range(number - FIXED.size - 200):
        start, end = sorted((drawn.randrange(len(whole) + 1), drawn.randrange(len(whole) + 1)))
        yield drawn.choice(
            [
                whole[:start],
                whole[:start] + bytes(end - start) + whole[end:],
                whole[:start] + drawn.randbytes(end - start) + whole[end:],
                whole[:start] + whole[end:],
                whole[end:] + whole[:end],
                whole + whole[start:end],
                *[_bit_changed(whole, drawn) for _ in range(3)],
            ]
        )


def _bit_changed(whole: bytes, drawn: random.Random) -> bytes:
    data = bytearray(whole)
    data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    return bytes(data)
