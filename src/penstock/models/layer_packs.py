"""Files that layers are read from past the page cache, and layers kept on disk as memory has them. No torch."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config import MB, cache_folder
from penstock.errors import InvalidModelFile, MemoryTooSmall
from penstock.models.files import ModelFiles
from penstock.plan.placement import NUM_READERS, PAGE, READ_BYTES

FORMAT = 3  # of the memory of a layer; another one is another folder
O_DIRECT = getattr(os, "O_DIRECT", 0)  # of Linux
MEASURED_READS = 12


class LayerFile:
    """A file that stays open, and must stay what it was: layers of two versions would give tokens of neither."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_direct = bool(O_DIRECT)
        try:
            self._file = open(path, "rb", buffering=0, opener=self._opened)  # noqa: SIM115 - open as long as the model
        except OSError as error:
            raise self._unreadable(error) from error
        self._facts = self._stat()

    def _opened(self, path: str, flags: int) -> int:
        try:
            return os.open(path, flags | O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_direct = False  # of this filesystem
            return os.open(path, flags)

    def _stat(self) -> tuple[int, int]:
        facts = os.fstat(self._file.fileno())
        return facts.st_size, facts.st_mtime_ns

    def require_unchanged(self) -> None:
        if self._stat() != self._facts:
            raise InvalidModelFile(f"{self.path} has changed since it was loaded; load the model again.")

    def read(self, offset: int, target: memoryview, buffer: memoryview) -> None:
        """Fills `target`, at most READ_BYTES; `buffer` holds two pages more and begins with a page."""
        try:
            if self.is_direct:
                skipped = offset % PAGE
                num_needed = skipped + len(target)
                self._fill(buffer[: -(-num_needed // PAGE) * PAGE], offset - skipped, num_needed)
                target[:] = buffer[skipped:num_needed]
            else:
                self._fill(target, offset, len(target))
                os.posix_fadvise(self._file.fileno(), offset, len(target), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._unreadable(error) from error

    def read_pages(self, offset: int, target: memoryview) -> None:
        """Fills whole pages with whole pages, without a copy."""
        try:
            self._fill(target, offset, len(target))
        except OSError as error:
            raise self._unreadable(error) from error

    def _fill(self, memory: memoryview, offset: int, num_needed: int) -> None:
        done = 0
        while done < num_needed:
            count = os.preadv(self._file.fileno(), [memory[done:]], offset + done)
            if count == 0:
                raise InvalidModelFile(f"{self.path} ends at byte {offset + done}; download it again.")
            done += count
            if self.is_direct and done < num_needed:
                done -= done % PAGE  # such reads begin with a page

    def _unreadable(self, error: OSError) -> InvalidModelFile:
        return InvalidModelFile(f"{self.path} cannot be read: {error.strerror}; check the disk and its permissions.")


def read_buffer() -> memoryview:
    """Makes what a reader puts pages into."""
    return memoryview(mmap.mmap(-1, READ_BYTES + 2 * PAGE))


def read_speed(path: Path) -> float | None:
    """Measures bytes per second past the page cache; None where that cannot be done."""
    with suppress(OSError, InvalidModelFile):
        file = LayerFile(path)
        num_bytes = path.stat().st_size // PAGE * PAGE
        if not file.is_direct or num_bytes < MEASURED_READS * READ_BYTES:
            return None
        step = (num_bytes - READ_BYTES) // MEASURED_READS // PAGE * PAGE
        buffers = [read_buffer()[:READ_BYTES] for _ in range(NUM_READERS)]

        def read(reader: int) -> None:
            for index in range(reader, MEASURED_READS, NUM_READERS):
                file.read_pages(index * step, buffers[reader])

        began = time.perf_counter()
        with ThreadPoolExecutor(NUM_READERS) as readers:
            list(readers.map(read, range(NUM_READERS)))
        return MEASURED_READS * READ_BYTES / (time.perf_counter() - began)
    return None


class PackFolder:
    """Layers whose stored bytes are not those of memory: laid out once, and kept where their source is a file."""

    def __init__(self, files: ModelFiles | None, *settings: Any) -> None:
        """`files`: None for what is new each time. `settings`: all else that the bytes depend on."""
        self._root = cache_folder("packs")
        self._name: str | None = None
        if files is not None and files.adapter is None and files.weight_files:
            paths = [str(path.resolve()) for path in files.weight_files]
            facts = [os.stat(path) for path in paths]
            of_files = [(f.st_size, f.st_mtime_ns, f.st_ctime_ns, f.st_ino) for f in facts]
            self._model = _digest(paths, settings)
            self._name = f"{self._model}-{_digest(of_files, files.config, FORMAT)}"

    def layer(self, index: int, memory: memoryview, make: Callable[[], None]) -> LayerFile:
        """A file with what `make` puts into `memory`, which is called where there is none yet."""
        try:
            return self._layer(index, memory, make)
        except OSError as error:
            raise MemoryTooSmall(
                f"Layers that stream are laid out in {self._root}, and {len(memory) / MB:,.0f} MB of layer {index} "
                f"cannot be written there: {error.strerror}. Free some, name another folder in XDG_CACHE_HOME, or "
                "raise --memory."
            ) from error

    def _layer(self, index: int, memory: memoryview, make: Callable[[], None]) -> LayerFile:
        folder = self._root / (self._name or "")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{index}.layer"
        if self._name is not None and path.is_file() and path.stat().st_size == len(memory):
            return LayerFile(path)
        self._remove_older()
        make()
        handle, name = tempfile.mkstemp(dir=folder, prefix=f"{index}-")
        part = Path(name)
        try:
            with open(handle, "wb", buffering=0) as file:
                done = 0
                while done < len(memory):
                    done += file.write(memory[done : done + READ_BYTES])
                os.fsync(handle)  # before the name says that it is whole
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            if self._name is None:
                return LayerFile(part)
            os.replace(part, path)
            return LayerFile(path)
        finally:
            part.unlink(missing_ok=True)

    def _remove_older(self) -> None:
        """Removes what was laid out of files that have changed since."""
        if self._name is None:
            return
        for folder in self._root.glob(f"{self._model}-*"):
            if folder.name != self._name:
                for path in folder.iterdir():
                    path.unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
