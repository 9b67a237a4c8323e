"""A server as users have it: a process of its own, found by the line it prints when it is ready."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

COMMAND = [sys.executable, "-m", "penstock.cli.main", "serve"]


class ServerProcess:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PENSTOCK_THREADS": "1"},
        )
        self.log: list[str] = []
        self.url = ""
        self._client = httpx.Client(timeout=60)  # kept, because making one takes longer than asking
        self._is_ready = threading.Event()
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"Serving .* at (http://\S+)", line):
                self.url = found[1]
                self._is_ready.set()
        self._is_ready.set()

    def wait(self, timeout_s: float = 180) -> None:
        assert self._is_ready.wait(timeout_s)
        assert self.url, "".join(self.log)

    def terminate(self, timeout_s: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def logs(self, word: str, timeout_s: float = 10) -> bool:
        """Whether a line with that word is written, now or soon."""
        until = time.monotonic() + timeout_s
        while not any(word in line for line in self.log):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def metric(self, name: str) -> float:
        text = self._client.get(f"{self.url}/metrics").text
        found = re.search(rf"^penstock:{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, flags=re.MULTILINE)
        assert found, f"there is no metric {name}"
        return float(found[1])

    def metric_becomes(self, name: str, value: float, timeout_s: float = 60) -> bool:
        return self._waits(lambda: self.metric(name) == value, timeout_s)

    def metric_reaches(self, name: str, value: float, timeout_s: float = 60) -> bool:
        return self._waits(lambda: self.metric(name) >= value, timeout_s)

    def _waits(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True


@contextmanager
def serving(*arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.terminate(20)
        if server.process.poll() is None:
            server.process.kill()


def events(response: httpx.Response) -> Iterator[str]:
    """The data of server-sent events, as they come; comments are given as they are."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        elif line.startswith(":"):
            yield line
