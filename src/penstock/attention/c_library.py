"""The C kernels for CPUs: compiled once on the user's machine, kept in the cache folder, called through ctypes.

Torch does the same work wherever there is no compiler, no AVX-512 with bfloat16, or another wish.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
SOURCES = [PACKAGE / "attention" / f"cpu_{name}.c" for name in ("attend", "tiles", "splits", "store")]
SOURCES += [PACKAGE / "models" / f"cpu_{name}.c" for name in ("layers", "products", "packed", "steps")]
HEADERS = [PACKAGE / "attention" / name for name in ("cpu_calls.h", "cpu_pages.h", "cpu_vectors.h")]
FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno"]
FLAGS += ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma"]
COMPILE_TIMEOUT_S = 120

_is_wanted = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The library, or None and why there is none."""

    library: ctypes.CDLL | None
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
def _found() -> Found:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return Found(library=None, reason="they need Linux on x86-64")
    compiler = _compiler()
    if compiler is None:
        return Found(library=None, reason="there is no C compiler (cc, gcc or clang)")
    try:
        library = ctypes.CDLL(str(_built(compiler)))
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


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "penstock" / "kernels"


def _built(compiler: str) -> Path:
    """The library in the cache folder. Written whole or not at all, so that two processes may build it at once."""
    path = cache_folder() / f"{_key(compiler)}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        command = [compiler, *FLAGS, f"-I{HEADERS[0].parent}", *map(str, SOURCES), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        os.replace(part, path)
    return path


def _key(compiler: str) -> str:
    """Of the source, the flags and the compiler; its file stands for its version, without running it."""
    file = Path(compiler).resolve()
    facts = [str(file), str(file.stat().st_size), str(file.stat().st_mtime_ns), *FLAGS]
    text = b"".join(source.read_bytes() for source in (*HEADERS, *SOURCES))
    return hashlib.sha256("\0".join(facts).encode() + text).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CKernels:
    library: ctypes.CDLL
    parallel: ctypes.c_void_p  # runs a C function on torch's threads


def c_kernels() -> CKernels | None:
    """None where torch has to do the work."""
    return _c_kernels() if _is_wanted else None


@cache
def _c_kernels() -> CKernels | None:
    library = _found().library
    parallel = _torch_parallel() if library is not None else None
    return None if library is None or parallel is None else CKernels(library=library, parallel=parallel)


@cache
def _torch_parallel() -> ctypes.c_void_p | None:
    """GOMP_parallel of the OpenMP library that torch itself uses: its threads are shared, no second pool is made."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return None
    try:
        torch_cpu = ctypes.CDLL(str(Path(package.origin).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
