"""Which computed prefixes lie in which blocks: a chain of hashes, each over a block's tokens and all before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import takewhile

from penstock.cache.blocks import BlockPool
from penstock.request import HitReason


def root_hash(model_identity: str, rotary: str, scope: str = "") -> bytes:
    """Makes the hash that chains begin with, from what makes equal tokens give different keys and values.

    `scope`: whose prefixes are found; those of another scope are not.
    """
    return hashlib.blake2b("\0".join([model_identity, rotary, scope]).encode(), digest_size=16).digest()


def chain_hash(previous: bytes, tokens: Sequence[int], media: Sequence[bytes] = ()) -> bytes:
    """`media`: hashes of the images that some of the tokens stand for, all of which have the same id."""
    return hashlib.blake2b(b"".join([previous, array("I", tokens).tobytes(), *media]), digest_size=16).digest()


def block_hashes(tokens: Sequence[int], root: bytes, block_size: int) -> Iterator[bytes]:
    """Yields the chained hashes of the whole blocks of a prompt; one token is left to compute."""
    for start in range(0, len(tokens) - block_size, block_size):
        root = chain_hash(root, tokens[start : start + block_size])
        yield root


class PrefixCache:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        pool.on_evict = self._forget
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_by_hash

    @property
    def hashes(self) -> list[bytes]:
        """Lists the prefixes that would be found now."""
        return list(self._block_by_hash)

    def take(self, block_hash: bytes) -> int | None:
        """The block with that prefix, held once more; None when nobody computed it."""
        block = self._block_by_hash.get(block_hash)
        if block is not None:
            self.pool.retain(block)
        return block

    def put(self, block_hash: bytes, block: int) -> None:
        """`block` now holds that prefix. The first of two equal blocks stays the one that is found."""
        if block_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash
            self.pool.keep_content(block)

    def known(self, tokens: Sequence[int], root: bytes, block_size: int) -> list[bytes]:
        """The hashes of the whole blocks that somebody computed, from the first on."""
        return list(takewhile(self.__contains__, block_hashes(tokens, root, block_size)))

    def why_kept(self, block_hash: bytes) -> HitReason:
        return self.pool.why_kept(self._block_by_hash[block_hash])

    def pin(self, prefix: Sequence[bytes], *, until: float, most: int) -> None:
        """Spares the blocks of a known prefix; `most` in all."""
        self.pool.pin([self._block_by_hash[block_hash] for block_hash in prefix], until=until, most=most)

    def clear(self) -> None:
        """Forgets every prefix that no running sequence holds."""
        self.pool.drop_cached()

    def _forget(self, block: int) -> None:
        del self._block_by_hash[self._hash_by_block.pop(block)]
