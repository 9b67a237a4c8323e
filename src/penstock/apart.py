"""Work on what strangers made, in a process of its own, which is ended when it takes too long or too much memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pkgutil import resolve_name
from threading import Lock
from typing import Any

from penstock.errors import PenstockError

IDLE_S = 60  # after which the process ends by itself; the next ask starts another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    cpu_s: float  # of one ask: a busy machine refuses no more than an idle one
    max_bytes: int
    niceness: int = 0


class Apart:
    """Asks a process to work, one ask after the other. The first one starts it; values go there and back as JSON."""

    def __init__(self, maker: str, given: Callable[[], Any], *, bounds: Bounds, refusal: PenstockError) -> None:
        """`maker`: module:function that makes of what is given, without bounds, what answers asks. `refusal`: of what
        passes the bounds."""
        self._maker, self._given, self._bounds, self._refusal = maker, given, bounds, refusal
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()

    def ask(self, value: Any) -> Any:
        """Returns what came of it; what is refused there is raised here."""
        with self._lock:
            told = self._exchange(value) or self._exchange(value)  # again, where it had ended for being idle
        if "refused" in told:
            raise resolve_name(f"penstock.errors:{told['refused']}")(told["message"])
        return told["answer"]

    def close(self) -> None:
        """Ends the process, and with it what it is doing."""
        if (process := self._process) is not None:
            process.kill()

    def _exchange(self, value: Any) -> dict[str, Any]:
        """Returns nothing where the process had been idle for too long."""
        if self._process is None:
            self._process = self._started()
            self._passed(self._process, self._given())
        return self._passed(self._process, value)

    def _started(self) -> subprocess.Popen[str]:
        # Nothing is imported from the folder that the user is in.
        command = [sys.executable, "-P", "-m", __name__, self._maker, json.dumps(asdict(self._bounds))]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def _passed(self, process: subprocess.Popen[str], value: Any) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()
        if line := process.stdout.readline():
            return json.loads(line)
        self._process = None
        with suppress(BrokenPipeError):
            process.communicate()
        if process.returncode == -signal.SIGALRM:
            return {}
        if process.returncode > 0:
            raise RuntimeError(f"the process for {self._maker} failed with {process.returncode}")
        raise self._refusal


def serve(maker: str, bounds: Bounds) -> None:
    """Answers lines of standard input until it ends; the system ends this process where it passes its bounds."""
    os.nice(bounds.niceness)
    resource.setrlimit(resource.RLIMIT_DATA, (bounds.max_bytes, bounds.max_bytes))
    work: Callable[[Any], Any] | None = None
    for line in sys.stdin:
        signal.alarm(0)
        if work is None:
            work = resolve_name(maker)(json.loads(line))
            told: dict[str, Any] = {}
        else:
            signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
            told = _told(work, json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(told), flush=True)
        signal.alarm(IDLE_S)


def _told(work: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    try:
        return {"answer": work(value)}
    except PenstockError as error:
        return {"refused": type(error).__name__, "message": str(error)}
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)
        raise


if __name__ == "__main__":
    serve(sys.argv[1], Bounds(**json.loads(sys.argv[2])))
