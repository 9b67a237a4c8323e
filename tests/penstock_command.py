"""The command in a process of its own, forked from one that has imported what it needs: most of its time, otherwise."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = ["penstock.cli.main", "penstock.cli.reading", "penstock.doctor.report", "penstock.cli.report"]
IMPORTED += ["penstock.engine.engine", "penstock.engine.loading"]
IMPORTED += ["transformers.modeling_utils", "transformers.generation.utils"]  # what most models need of it


def penstock(
    *arguments: object, stdin: bytes = b"", folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """What `penstock` with these arguments prints, and its exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        files = [str(Path(scratch, name)) for name in ("stdin", "stdout", "stderr")]
        Path(files[0]).write_bytes(stdin)
        asked = {"arguments": [*map(str, arguments)], "files": files, "folder": str(folder or Path.cwd())}
        asked["environment"] = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
        nursery = _nursery()
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(json.dumps(asked) + "\n")
        nursery.stdin.flush()
        code = int(nursery.stdout.readline())
        _, stdout, stderr = (Path(name).read_bytes() for name in files)
    return subprocess.CompletedProcess(asked["arguments"], code, stdout, stderr)


def penstock_text(*arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    done = penstock(*arguments, stdin=stdin.encode(), **environment)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@cache
def _nursery() -> subprocess.Popen[str]:
    """Ends when this process does, which closes its standard input."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # read when the library of the hub is imported
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def fork_on_request() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become_penstock(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become_penstock(asked: dict[str, Any]) -> NoReturn:
    code: Any = 1
    try:
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        for number, name in enumerate(asked["files"]):
            os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT), number)
        sys.stdin = os.fdopen(0, closefd=False)  # the old one may hold what was asked of its parent
        sys.argv = ["penstock", *asked["arguments"]]
        importlib.import_module("penstock.cli.main").main()
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
    fork_on_request()
