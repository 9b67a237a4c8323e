"""A server as a process of its own, found by the line it prints when it is ready."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from hang_bound import HANG_S, within
from penstock_command import PENSTOCK, forked


class ServerProcess:
    """`program`: what plays the server, where it is not the command. `is_fresh`: of an interpreter that is its own."""

    def __init__(
        self,
        *arguments: str,
        max_files: int | None = None,
        program: Sequence[str] = PENSTOCK,
        is_fresh: bool = False,
    ) -> None:
        arguments = (*(["serve"] if tuple(program) == PENSTOCK else []), *arguments, "--port", "0")
        environment = {"PENSTOCK_THREADS": "1"}
        reader, writer = os.pipe()
        with open(writer, "wb") as stderr:
            if is_fresh:
                command = [sys.executable, *program, *arguments]
                self.process = subprocess.Popen(command, stderr=stderr, env=os.environ | environment)
            else:
                with open(os.devnull, "rb+", 0) as null:
                    files = [null.fileno(), null.fileno(), writer]
                    options = {"program": program, "max_files": max_files, "environment": environment}
                    self.process = forked(arguments, files=files, kind="serve", **options)
        self._stderr = os.fdopen(reader)
        self.log: list[str] = []
        self.url = ""
        self._client = httpx.Client(timeout=HANG_S)  # kept, because making one takes longer than asking
        self._is_ready = threading.Event()
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_log(self) -> None:
        for line in self._stderr:
            self.log.append(line)
            if found := re.search(r"Serving .* at (http://\S+)", line):
                self.url = found[1]
                self._is_ready.set()
        self._is_ready.set()

    def wait(self) -> None:
        assert self._is_ready.wait(HANG_S)
        assert self.url, "".join(self.log)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_S)

    def logs(self, word: str) -> bool:
        """Whether a line with that word is written, now or soon."""
        return within(HANG_S, lambda: any(word in line for line in self.log))

    def metric(self, name: str) -> float:
        text = self._client.get(f"{self.url}/metrics").text
        found = re.search(rf"^penstock:{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, flags=re.MULTILINE)
        assert found, f"there is no metric {name}"
        return float(found[1])

    def metric_becomes(self, name: str, value: float) -> bool:
        return within(HANG_S, lambda: self.metric(name) == value)

    def metric_reaches(self, name: str, value: float) -> bool:
        return within(HANG_S, lambda: self.metric(name) >= value)


@contextmanager
def serving(*arguments: str, max_files: int | None = None, **others: Any) -> Iterator[ServerProcess]:
    """`max_files`: how many files the process may have open, connections among them."""
    server = ServerProcess(*arguments, max_files=max_files, **others)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.terminate()
        if server.process.poll() is None:
            server.process.kill()


def events(response: httpx.Response) -> Iterator[str]:
    """The data of server-sent events, as they come; comments are given as they are."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        elif line.startswith(":"):
            yield line
