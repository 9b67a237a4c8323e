"""The C kernels for CPUs: compiled once on the user's machine and kept in the cache folder.

Torch does the same work wherever there is no compiler, no AVX-512 with bfloat16, or another wish.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cffi import FFI

from penstock.config import cache_folder

FOLDER = Path(__file__).parent
SOURCES, HEADERS = sorted(FOLDER.glob("*.c")), sorted(FOLDER.glob("*.h"))
FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno"]
FLAGS += ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma"]
COMPILE_TIMEOUT_S = 120

_is_wanted = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The library, or None and why there is none."""

    library: Any  # the functions of calls.h
    reason: str


def use(choice: str) -> None:
    """`torch` keeps the kernels out of this process; `auto` takes them where they can run."""
    global _is_wanted
    _is_wanted = choice == "auto"


def kernels() -> Found:
    return _found() if _is_wanted else Found(library=None, reason="switched off (cpu_kernels is torch)")


def can_run() -> bool:
    """Whether this machine has them, wanted in this process or not."""
    return _found().library is not None


@cache
def ffi() -> FFI:
    """Reads calls.h: structs, functions, and the numbers that it defines.

    Pointers of a struct to plain values are read as numbers: Python knows addresses of tensors, and a cast costs time.
    """
    text = re.sub(r"/\*.*?\*/|^#(?!define \w+ \d).*?$", "", (FOLDER / "calls.h").read_text(), flags=re.S | re.M)
    found = FFI()
    found.cdef(
        re.sub(r"^    (?:const )?\w+ (\*.*;)", lambda match: "uintptr_t " + match[1].replace("*", ""), text, flags=re.M)
    )
    return found


@cache
def _found() -> Found:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return Found(library=None, reason="they need Linux on x86-64")
    compiler = _compiler()
    if compiler is None:
        return Found(library=None, reason="there is no C compiler (cc, gcc or clang)")
    try:
        library = ffi().dlopen(str(_built(compiler)))
    except OSError as error:
        return Found(library=None, reason=f"their library cannot be kept or loaded: {error}")
    except subprocess.SubprocessError as error:
        return Found(library=None, reason=f"{compiler} cannot compile them: {error}")
    if not library.penstock_is_supported():
        return Found(library=None, reason="this processor has no AVX-512 with bfloat16")
    return Found(library=library, reason=f"compiled by {compiler}, AVX-512 with bfloat16")


def _compiler() -> str | None:
    asked = os.environ.get("CC")
    return next((path for name in (asked, "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)


def _built(compiler: str) -> Path:
    """The library in the cache folder. Written whole or not at all, so that two processes may build it at once."""
    path = cache_folder("kernels") / f"{_key(compiler)}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        command = [compiler, *FLAGS, f"-I{FOLDER}", *map(str, SOURCES), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        os.replace(part, path)
    return path


def _key(compiler: str) -> str:
    """Hashes the source, the flags and the compiler, whose file stands for its version: it is not run."""
    file = Path(compiler).resolve()
    facts = [str(file), str(file.stat().st_size), str(file.stat().st_mtime_ns), *FLAGS]
    text = b"".join(source.read_bytes() for source in (*HEADERS, *SOURCES))
    return hashlib.sha256("\0".join(facts).encode() + text).hexdigest()[:32]
