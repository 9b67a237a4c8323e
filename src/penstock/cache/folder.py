"""A folder of slabs that several processes share: its secret, its lock, how much it holds and what leaves first."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import struct
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from penstock.cache.slabs import PAGE
from penstock.errors import InvalidSetting

SUFFIX, TEMPORARY = ".kv", ".tmp"
SECRET_BYTES = 32
ENTRY_BYTES = 512  # what a folder may grow by with one more name
COLLECTED_BEYOND = 0.02  # of the budget, so that not every write looks through the folder
TOTAL = struct.Struct("<Q")


def taken_bytes(num_bytes: int) -> int:
    """What a file of that length takes of a disk, at most."""
    return -(-num_bytes // PAGE) * PAGE + ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that the folder holds, while nobody else changes them."""

    lock: int

    @property
    def total(self) -> int | None:
        """None: nobody counted them yet, or the count was damaged."""
        data = os.pread(self.lock, TOTAL.size, 0)
        return TOTAL.unpack(data)[0] if len(data) == TOTAL.size else None

    def set_total(self, num_bytes: int) -> None:
        os.pwrite(self.lock, TOTAL.pack(max(0, num_bytes)), 0)


class CacheFolder:
    """`<folder>/kv`: a folder for each namespace with its slabs, for this user's eyes only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "kv"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.secret = self._secret()
        except OSError as error:
            raise InvalidSetting(
                f"The cache folder {str(folder)!r} cannot be used: {error.strerror}; give --cache-dir another folder."
            ) from error

    def name(self, name_key: bytes) -> str:
        """Names a slab so that a listing does not tell what was read here."""
        return blake2b(name_key, key=self.secret, digest_size=16).hexdigest()

    def namespaces(self) -> list[Path]:
        return sorted(path for path in self.root.iterdir() if path.is_dir())

    def about(self, namespace: Path) -> dict[str, str]:
        """What was said of a namespace when it was opened first; {} where that is lost."""
        try:
            about = json.loads((namespace / "about.json").read_text())
        except (OSError, ValueError):
            return {}
        return {str(name): str(value) for name, value in about.items()} if isinstance(about, dict) else {}

    @contextmanager
    def locked(self) -> Generator[Room]:
        """Waits until no other process writes here. Whoever dies leaves the lock, and a count that is too high."""
        lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Room(lock)
        finally:
            os.close(lock)

    def recount(self, room: Room) -> int:
        """Counts all that lies there. What is half written then was left by a process that is gone, and goes."""
        for path in self._files():
            if path.name.endswith(TEMPORARY):
                with suppress(OSError):
                    os.unlink(path)
        total = sum(size for _, size in self._sizes(self.folder))
        room.set_total(total)
        return total

    def make_room(self, room: Room, num_bytes: int, budget: int, spared: Collection[str]) -> bool:
        """Removes what is of least use until so many bytes more are within the budget; False where they cannot be.

        `spared`: names of slabs that are about to be read.
        """
        total = room.total
        if total is None:
            total = self.recount(room)
        if total + num_bytes <= budget:
            return True
        total, aim = self.recount(room), budget * (1 - COLLECTED_BEYOND) - num_bytes
        ranked = sorted(
            (status.st_mtime_ns, path, _taken(status)) for path, status in self._slabs() if path.stem not in spared
        )
        for _, path, size in ranked:
            if total <= aim:
                break
            with suppress(OSError):
                os.unlink(path)
                total -= size
        room.set_total(total)
        return total + num_bytes <= budget

    def write(self, path: Path, data: bytes, budget: int) -> bool:
        """Writes a small file whole and for good, within the budget; False where there is no room."""
        with self.locked() as room:
            if not self.make_room(room, needed := taken_bytes(len(data)), budget, ()):
                return False
            room.set_total((room.total or 0) + needed)
            temporary = path.with_suffix(TEMPORARY)
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(file)
            os.replace(temporary, path)
            return True

    def clear(self, namespace: Path | None = None) -> int:
        """Removes the slabs of one namespace, or all; returns the bytes that were given back."""
        with self.locked() as room:
            before = self.recount(room)
            for path in self._files():
                if path.suffix == SUFFIX and namespace in (None, path.parent):
                    with suppress(OSError):  # the folders stay: a process that has one open goes on storing there
                        os.unlink(path)
            return before - self.recount(room)

    def _secret(self) -> bytes:
        path = self.root / "secret"
        if not path.exists():
            mine = self.root / f"secret.{os.getpid()}"
            mine.touch(mode=0o600)
            mine.write_bytes(secrets.token_bytes(SECRET_BYTES))
            with suppress(FileExistsError):  # another process was first
                os.link(mine, path)
            mine.unlink()
        return path.read_bytes()[:SECRET_BYTES]

    def _files(self) -> Iterator[Path]:
        for namespace in self.namespaces():
            with suppress(OSError), os.scandir(namespace) as entries:
                yield from [Path(entry.path) for entry in entries]

    def _slabs(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._files():
            if path.suffix == SUFFIX:
                with suppress(OSError):
                    yield path, path.lstat()

    def _sizes(self, folder: Path) -> Iterator[tuple[Path, int]]:
        with suppress(OSError):
            yield folder, _taken(folder.lstat())
        for parent, folders, files in os.walk(folder):
            for name in (*folders, *files):
                with suppress(OSError):
                    path = Path(parent, name)
                    yield path, _taken(path.lstat())


def _taken(status: os.stat_result) -> int:
    """What is allocated, or will be once it is written."""
    return max(status.st_blocks * 512, -(-status.st_size // PAGE) * PAGE)
