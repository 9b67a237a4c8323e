"""The file of answers: one line each, written at once and found again by whoever goes on."""

from __future__ import annotations

import fcntl
import json
import os
import re
from array import array
from pathlib import Path
from typing import Any

from penstock.batch.lines import Line
from penstock.errors import InvalidSetting

_HEAD = re.compile(
    rb'\{"id": "batch_req_(\d+)_([0-9a-f]{16})", "custom_id": (?:null|"(?:[^"\\]|\\.)*"), '
    rb'"response": (?:null|\{"status_code": (\d+),)'
)
MAX_LINES = 1 << 30


class AnswerFile:
    """Answers of earlier runs and of this one. A line that a killed run left half-written is taken away."""

    def __init__(self, path: Path) -> None:
        """Opens the file for one process alone; raises what it holds if that is no answers."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise InvalidSetting(f"{path} cannot be written: {error.strerror}. Name another file.") from None
        try:
            self._lock()
            self._digests = array("Q")  # by the number of the line; 0: not answered
            self.num_failed = self.num_bytes = 0
            self._read()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidSetting(f"Another batch writes {self.path}. Wait for it, or name another file.") from None

    def _read(self) -> None:
        with self.path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                self._take(raw)
                self.num_bytes += len(raw)
        os.truncate(self._file, self.num_bytes)

    def _take(self, raw: bytes) -> None:
        head = _HEAD.match(raw)
        if head is None or not 0 < (number := int(head[1])) < MAX_LINES:
            raise InvalidSetting(f"{self.path} holds something that is no answer of a batch. Name another file.")
        self._note(number, int(head[2], 16))
        self.num_failed += _has_failed(head)

    def _note(self, number: int, digest: int) -> None:
        if number >= len(self._digests):
            self._digests.extend([0] * (number + 1 - len(self._digests)))
        self._digests[number] = digest

    def has(self, line: Line) -> bool:
        """Whether the line is answered; an answer to another line of that number is refused."""
        known = self._digests[line.number] if line.number < len(self._digests) else 0
        if known not in (0, line.digest):
            raise InvalidSetting(
                f"{self.path} has the answer to another line {line.number}: it belongs to another input. "
                "Name another file, or remove it."
            )
        return known != 0

    def write(self, line: Line, custom_id: str | None, status: int, body: bytes) -> None:
        """Adds what a route answered."""
        name = answer_name(line)
        response = b'{"status_code": %d, "request_id": %s, "body": %s}' % (status, _json(name), body)
        self._append(name, custom_id, response, b"null", is_failed=status >= 400)

    def write_error(self, line: Line, custom_id: str | None, message: str) -> None:
        """Adds why a line could not be asked."""
        error = _json({"code": "invalid_line", "message": message})
        self._append(answer_name(line), custom_id, b"null", error, is_failed=True)

    def _append(self, name: str, custom_id: str | None, response: bytes, error: bytes, *, is_failed: bool) -> None:
        parts = {b"id": _json(name), b"custom_id": _json(custom_id), b"response": response, b"error": error}
        text = b"{" + b", ".join(b'"%s": %s' % part for part in parts.items()) + b"}\n"
        self.num_bytes += len(text)
        while text:  # a disk that is nearly full takes a part
            text = text[os.write(self._file, text) :]
        self.num_failed += is_failed

    def close(self) -> None:
        os.close(self._file)


def is_failed(raw: bytes) -> bool:
    """Tells whether a line of answers is one of failure."""
    head = _HEAD.match(raw)
    return head is None or _has_failed(head)


def _has_failed(head: re.Match[bytes]) -> bool:
    return head[3] is None or int(head[3]) >= 400


def answer_name(line: Line) -> str:
    return f"batch_req_{line.number}_{line.digest:016x}"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
