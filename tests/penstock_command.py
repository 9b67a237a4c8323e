"""The command in processes forked from one that has imported what it needs: most of their time, otherwise."""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from resource import RLIMIT_NOFILE, setrlimit
from typing import Any, NoReturn

OF_BOTH = ("penstock.cli.main", "penstock.engine.engine", "penstock.engine.loading")
IMPORTED = {
    "run": (
        *OF_BOTH,
        *("penstock.cli.reading", "penstock.doctor.report", "penstock.cli.report"),
        *("transformers.modeling_utils", "transformers.generation.utils"),  # what most models need of it
    ),
    "serve": (*OF_BOTH, "penstock.server.run", "penstock.server.app", "penstock.server.service", "uvicorn.lifespan.on"),
}
PENSTOCK = ("-m", "penstock.cli.main")  # what follows the interpreter in its command line
MOST_ASKED_BYTES = 2**17


class Forked:
    """A process of a nursery, as `subprocess.Popen` has those of its own."""

    def __init__(self, args: list[str], ended: socket.socket) -> None:
        self.args = args
        self.returncode: int | None = None
        self._ended = ended
        self.pid = int(ended.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._ended.recv(64))
            self._ended.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(
    arguments: Sequence[str],
    *,
    files: Sequence[int | None],
    kind: str = "run",
    program: Sequence[str] = PENSTOCK,
    folder: Path | None = None,
    max_files: int | None = None,
    environment: dict[str, str] | None = None,
) -> Forked:
    """Starts a process with these as standard input, output and error; None is one that is closed.

    `kind`: what its nursery has imported. `program`: the command line before the arguments.
    """
    ours, theirs = socket.socketpair()
    asked = {"program": program, "arguments": arguments, "folder": str(folder or Path.cwd()), "max_files": max_files}
    asked["environment"] = os.environ | {"HF_HUB_OFFLINE": "1"} | (environment or {})
    asked["closed"] = [number for number, file in enumerate(files) if file is None]
    given = [theirs.fileno(), *(file for file in files if file is not None)]
    with theirs:
        socket.send_fds(_nursery(kind), [json.dumps(asked).encode()], given)
        return Forked([sys.executable, *program, *arguments], ours)


def penstock(
    *arguments: object,
    stdin: bytes | int | None = b"",
    folder: Path | None = None,
    program: Sequence[str] = PENSTOCK,
    **environment: str,
) -> subprocess.CompletedProcess[bytes]:
    """What `penstock` with these arguments prints, and its exit code; `stdin`: text, an open file, or None: closed."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        if isinstance(stdin, bytes):
            given.write(stdin)
            given.seek(0)
        files = [given.fileno() if isinstance(stdin, bytes) else stdin, stdout.fileno(), stderr.fileno()]
        process = forked([*map(str, arguments)], files=files, folder=folder, program=program, environment=environment)
        code = process.wait()
        printed = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in (stdout, stderr)]
    return subprocess.CompletedProcess(process.args, code, *printed)


def penstock_text(*arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    done = penstock(*arguments, stdin=stdin.encode(), **environment)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@cache
def _nursery(kind: str) -> socket.socket:
    """Ends when this process does, which closes its end of the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # read when the library of the hub is imported
    with theirs:
        subprocess.Popen([sys.executable, __file__, kind], stdin=theirs, env=environment)
    return ours


def fork_on_request(kind: str) -> None:
    for module in IMPORTED[kind]:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell had the tests ignore it
    asks = socket.socket(fileno=os.dup(0))
    with selectors.DefaultSelector() as selector:
        selector.register(asks, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not asks:  # a process that has ended
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    pid, teller = key.data
                    teller.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    teller.close()
                    continue
                asked, given, _, _ = socket.recv_fds(asks, MOST_ASKED_BYTES, 4)
                if not asked:
                    return
                child = os.fork()
                if child == 0:
                    asks.close()
                    become_penstock(json.loads(asked), given)
                teller = socket.socket(fileno=given[0])
                teller.send(b"%d" % child)
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, teller))
                for file in given[1:]:
                    os.close(file)


def become_penstock(asked: dict[str, Any], given: list[int]) -> NoReturn:
    code: Any = 1
    try:
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.close(given.pop(0))
        for number in range(3):
            if number in asked["closed"]:
                os.close(number)
            else:
                os.dup2(given[0], number)
                os.close(given.pop(0))
        # The old one may hold what was asked of its parent.
        sys.stdin = None if 0 in asked["closed"] else os.fdopen(0, closefd=False)
        if asked["max_files"] is not None:
            setrlimit(RLIMIT_NOFILE, (asked["max_files"], asked["max_files"]))
        program = asked["program"]
        sys.argv = [program[-1], *asked["arguments"]]
        if tuple(program) == PENSTOCK:
            sys.argv[0] = "penstock"
            importlib.import_module("penstock.cli.main").main()
        else:
            sys.argv = [*program, *asked["arguments"]]
            runpy.run_path(program[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    fork_on_request(sys.argv[1])
