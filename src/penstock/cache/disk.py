"""The slabs of one namespace on disk: written whole or not at all, read with proof; any damage is a miss. No torch."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from penstock.cache.folder import SUFFIX, TEMPORARY, CacheFolder, taken_bytes
from penstock.cache.slabs import (
    PAGE,
    DamagedSlab,
    Pieces,
    Slab,
    SlabLayout,
    checksum,
    decode_header,
    encode_header,
    header_bytes,
    require_slab,
    size_of_header,
)

MAX_PIECES = 512  # of one call to the system
REST_S = 60.0  # after a write failed, before the next is tried


@dataclass(slots=True)
class DiskTier:
    """Several threads may read; one writes."""

    folder: CacheFolder
    namespace: bytes
    layout: SlabLayout
    budget_bytes: int
    note: Callable[[str], None] = print  # is told once why nothing is stored
    clock: Callable[[], float] = time.monotonic
    path: Path = field(init=False)
    _rests_until: float = field(init=False, default=0.0)
    _is_noted: bool = field(init=False, default=False)
    _seen: int = field(init=False, default=0)  # when the folder had changed at the last look

    def __post_init__(self) -> None:
        self.path = self.folder.root / self.namespace.hex()

    def open(self, about: dict[str, str]) -> None:
        """Makes the folder, and counts what lies there; one that cannot be written is read."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            said = self.path / "about.json"
            if not said.exists():
                said.write_text(json.dumps(about))
            with self.folder.locked() as room:
                self.folder.recount(room)
                self.folder.make_room(room, 0, self.budget_bytes, ())
        except OSError as error:
            self._rest(error)

    def name(self, slab: Slab) -> str:
        return self.folder.name(slab.name_key)

    def names(self) -> Iterator[str]:
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                name, dot, suffix = entry.name.partition(".")
                if dot + suffix == SUFFIX:
                    yield name

    @property
    def has_changed(self) -> bool:
        """Tells whether any process wrote or removed something since this was last asked."""
        with suppress(OSError):
            changed_at = self.path.stat().st_mtime_ns
            has_changed, self._seen = changed_at != self._seen, changed_at
            return has_changed
        return False

    def read(self, slab: Slab, sections: Sequence[Pieces], used_at: float) -> bool:
        """Reads a slab to where its sections are to lie; False on any doubt, and then nothing of them holds."""
        path = self._file(slab)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            self._read_proven(file, slab, sections)
        except (DamagedSlab, OSError):
            with suppress(OSError):
                os.unlink(path)  # it can be stored again
            return False
        finally:
            os.close(file)
        with suppress(OSError, OverflowError):
            os.utime(path, (used_at, used_at))
        return True

    def write(self, slab: Slab, sections: Sequence[Pieces], used_at: float, spared: Collection[str]) -> bool:
        """Stores a slab, unless there is no room for it. Steps and reads go on meanwhile."""
        if self.clock() < self._rests_until:
            return False
        path = self._file(slab)
        sizes = self.layout.sections(slab)
        header = encode_header(slab, self.namespace, sizes, [checksum(pieces) for pieces in sections])
        needed = taken_bytes(len(header) + sum(sizes))
        try:
            with self.folder.locked() as room:
                if path.exists():
                    return True
                if not self.folder.make_room(room, needed, self.budget_bytes, spared):
                    return False
                before = room.total or 0
                room.set_total(before + needed)
                pieces = [memoryview(header), *(piece for section in sections for piece in section)]
                try:
                    _write_whole(path, pieces, used_at)
                except OSError:
                    room.set_total(before)
                    raise
        except OSError as error:
            self._rest(error)
            return False
        return True

    def keep(self, name: str, data: bytes) -> None:
        """Keeps a small file beside the slabs, where there is room for it."""
        with suppress(OSError):
            self.folder.write(self.path / name, data, self.budget_bytes)

    def _file(self, slab: Slab) -> Path:
        return self.path / f"{self.name(slab)}{SUFFIX}"

    def _read_proven(self, file: int, slab: Slab, sections: Sequence[Pieces]) -> None:
        sizes = self.layout.sections(slab)
        length = header_bytes(len(slab.tokens), len(sizes))
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != length + sum(sizes):
            raise DamagedSlab("a file of another length")
        header = decode_header(os.pread(file, length, 0))
        require_slab(header, slab, self.namespace, sizes)
        _read_all(file, length, [piece for pieces in sections for piece in pieces])
        for pieces, expected in zip(sections, header.checksums, strict=True):
            if checksum(pieces) != expected:
                raise DamagedSlab("values that do not match their checksum")

    def _rest(self, error: OSError) -> None:
        self._rests_until = self.clock() + REST_S
        if not self._is_noted:
            self._is_noted = True
            self.note(
                f"nothing is stored in the cache folder for now: {error.strerror}. Requests go on; free some space, or "
                "give --cache-dir a folder that can be written"
            )


def verified(path: Path, folder: CacheFolder) -> bool:
    """Tells whether a slab is what its name and its checksums say, whoever wrote it."""
    try:
        data = memoryview(path.read_bytes())
        length = size_of_header(bytes(data[:PAGE]))
        header = decode_header(bytes(data[:length]))
    except (OSError, DamagedSlab):
        return False
    is_named = path.stem == folder.name(header.slab.name_key) and path.parent.name == header.namespace.hex()
    ends = list(accumulate(header.sections, initial=length))
    parts = [checksum([data[start:end]]) for start, end in pairwise(ends)]
    return is_named and ends[-1] == len(data) and tuple(parts) == header.checksums


def _write_whole(path: Path, pieces: Sequence[memoryview], used_at: float) -> None:
    temporary = path.with_suffix(TEMPORARY)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            _write_all(file, pieces)
        finally:
            os.close(file)
        os.utime(temporary, (used_at, used_at))
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _write_all(file: int, pieces: Sequence[memoryview]) -> None:
    for first in range(0, len(pieces), MAX_PIECES):
        left = list(pieces[first : first + MAX_PIECES])
        while left:
            left = _rest_of(left, os.writev(file, left))


def _read_all(file: int, offset: int, pieces: Sequence[memoryview]) -> None:
    for first in range(0, len(pieces), MAX_PIECES):
        left = list(pieces[first : first + MAX_PIECES])
        while left:
            num_read = os.preadv(file, left, offset)
            if not num_read:
                raise DamagedSlab("a file that ends early")
            offset += num_read
            left = _rest_of(left, num_read)


def _rest_of(pieces: list[memoryview], num_done: int) -> list[memoryview]:
    """What is left of the pieces after so many bytes; nothing is copied."""
    for index, piece in enumerate(pieces):
        if num_done < len(piece):
            return [piece[num_done:], *pieces[index + 1 :]]
        num_done -= len(piece)
    return []
