"""What weight files hold, as a hash of every byte; remembered as long as nothing about a file has changed. No torch."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.config import cache_folder
from penstock.models.files import ModelFiles

PIECE_BYTES = 16 << 20
READ_BYTES = 1 << 20
NUM_THREADS = 2
SETTLED_S = 2.0  # a file that was changed this shortly ago may be changed again within the same tick of its clock
HEX_DIGITS = 64

Facts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightContent:
    digest: str
    facts: dict[Path, Facts]  # of the files, when they were read

    @classmethod
    def of(cls, files: ModelFiles) -> WeightContent | None:
        """None where a file cannot be read, or changes meanwhile."""
        paths = [*files.weight_files, *([files.adapter.path] if files.adapter is not None else [])]
        try:
            facts = {path: _facts(path) for path in paths}
            digests = [_digest(path, facts[path]) for path in paths]
        except OSError:
            return None
        if not digests:
            return None
        content = cls(hashlib.sha256("\n".join(digests).encode()).hexdigest(), facts)
        return content if content.still_holds else None

    @property
    def still_holds(self) -> bool:
        with suppress(OSError):
            return all(_facts(path) == facts for path, facts in self.facts.items())
        return False


def _facts(path: Path) -> Facts:
    """What changes whenever a file does: nobody can set the time of its last change."""
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _digest(path: Path, facts: Facts) -> str:
    """Hashes a file, or remembers what it was."""
    name = hashlib.sha256(f"{path.resolve()} {facts}".encode()).hexdigest()
    kept = cache_folder("weights") / name
    with suppress(OSError, ValueError):
        if len(digest := kept.read_text(encoding="ascii")) == HEX_DIGITS:
            return digest
    digest = _hashed(path, facts[2])
    if abs(time.time() - facts[-1] / 1e9) > SETTLED_S:
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = kept.with_name(f"{name}.{os.getpid()}")
            part.write_text(digest)
            part.replace(kept)
    return digest


def _hashed(path: Path, num_bytes: int) -> str:
    """Hashes pieces beside each other, and then their hashes."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            pieces = threads.map(lambda start: _piece(file, start), range(0, max(1, num_bytes), PIECE_BYTES))
            return hashlib.sha256(b"".join(pieces)).hexdigest()
    finally:
        os.close(file)


def _piece(file: int, start: int) -> bytes:
    found, read = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    for place in range(start, start + PIECE_BYTES, READ_BYTES):
        found.update(read[: os.preadv(file, [read], place)])
    return found.digest()
