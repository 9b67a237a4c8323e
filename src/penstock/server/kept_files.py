"""Files that clients put on the server for its batches, and those that batches leave there."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, ValidationError

from penstock.errors import InvalidSetting
from penstock.server.problems import Refused

MAX_FILES = 10_000
LOCK = "lock"
COPIED_BYTES = 1 << 20
Purpose = Literal["batch", "batch_output"]


class FileObject(BaseModel):
    """Describes a file, as OpenAI's API does."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class _Record(BaseModel):
    scope: str  # whose it is: that of the API key, where keys are kept apart
    file: FileObject


class KeptFiles:
    """Keeps files in a folder within a number of bytes; what is over is refused, and nothing is forgotten for it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Takes up what an earlier server left in the folder, and removes what it had not finished."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_file = self._locked()
        self._records = {record.file.id: record for record in self._found()}
        self._num_bytes = sum(record.file.bytes for record in self._records.values())
        known = {LOCK} | {name for file_id in self._records for name in (file_id, f"{file_id}.json")}
        for path in folder.iterdir():
            if path.name not in known:
                path.unlink()

    def _locked(self) -> BinaryIO:
        """Opens the file that one server alone may hold."""
        file = (self._folder / LOCK).open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InvalidSetting(
                f"Another server keeps its files in {self._folder.parent}. Name another folder."
            ) from None
        return file

    def _found(self) -> Iterable[_Record]:
        for path in self._folder.glob("file-*.json"):
            try:
                record = _Record.model_validate_json(path.read_bytes())
            except ValidationError:
                continue
            if self.path(record.file.id).is_file() and path.stem == record.file.id:
                yield record

    def path(self, file_id: str) -> Path:
        return self._folder / file_id

    def add(self, scope: str, source: BinaryIO, name: str, purpose: Purpose) -> FileObject:
        """Copies a file that fits; one that does not leaves nothing behind."""
        file_id = f"file-{secrets.token_hex(12)}"
        part, num_bytes = self._folder / f"{file_id}.part", 0
        try:
            with part.open("xb") as file:
                while piece := source.read(COPIED_BYTES):
                    self._take(len(piece))
                    num_bytes += len(piece)
                    file.write(piece)
            return self._keep(scope, part, file_id, num_bytes, name, purpose)
        except BaseException:
            with self._lock:
                self._num_bytes -= num_bytes
            part.unlink(missing_ok=True)
            raise

    def adopt(self, scope: str, path: Path, name: str) -> FileObject:
        """Takes over a file that a batch wrote, whatever its size: its answers are not to be lost."""
        file_id, num_bytes = f"file-{secrets.token_hex(12)}", path.stat().st_size
        with self._lock:
            self._num_bytes += num_bytes
        part = Path(shutil.move(path, self._folder / f"{file_id}.part"))
        return self._keep(scope, part, file_id, num_bytes, name, "batch_output")

    def _keep(self, scope: str, part: Path, file_id: str, num_bytes: int, name: str, purpose: Purpose) -> FileObject:
        found = FileObject(id=file_id, bytes=num_bytes, created_at=int(time.time()), filename=name, purpose=purpose)
        record = _Record(scope=scope, file=found)
        os.rename(part, self.path(file_id))
        write_whole(self._folder / f"{file_id}.json", record.model_dump_json())
        with self._lock:
            self._records[file_id] = record
        return found

    def _take(self, num_bytes: int) -> None:
        with self._lock:
            if len(self._records) >= MAX_FILES:
                raise Refused(f"{MAX_FILES:,} files are kept, the most there may be. Delete some.", status=413)
            if self._num_bytes + num_bytes > self._max_bytes:
                raise Refused(
                    f"The file does not fit: {self._num_bytes:,} of {self._max_bytes:,} bytes are taken. "
                    "Delete files, or start the server with a higher --max-files-mib.",
                    status=413,
                )
            self._num_bytes += num_bytes

    def has_room(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._max_bytes

    def find(self, scope: str, file_id: str) -> FileObject:
        with self._lock:
            record = self._records.get(file_id)
        if record is None or record.scope != scope:
            raise Refused(f"There is no file {file_id[:80]!r}. List those that there are at /v1/files.", status=404)
        return record.file

    def listed(self, scope: str) -> list[FileObject]:
        """Lists files, the newest first."""
        with self._lock:
            own = [record.file for record in self._records.values() if record.scope == scope]
        return sorted(own, key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, scope: str, file_id: str) -> None:
        found = self.find(scope, file_id)
        with self._lock:
            if self._records.pop(file_id, None) is None:
                return
            self._num_bytes -= found.bytes
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a small file that is there whole or not at all, whenever the process ends."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
