"""The C kernels for CPUs: compiled once on the user's machine and kept in the cache folder.

Torch does the same work wherever there is no compiler, no instructions that they are written for, or another wish.
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
from penstock.plan.machine import cpu_flags

FOLDER = Path(__file__).parent
FLAGS = ["-O3", "-std=c11", "-fno-math-errno"]
SHARED = ["-shared", "-fPIC"]
COMPILE_TIMEOUT_S = 300  # ten seconds take minutes on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """Instructions that there are kernels for, in folders beside what all share."""

    id: str  # what the setting `cpu_kernels` calls them
    name: str
    machine: str
    needed: frozenset[str]  # as Linux calls what a processor has
    flags: tuple[str, ...]
    folders: tuple[str, ...]
    multiplies_all: bool  # products of any number of rows; torch has its own for bfloat16 otherwise

    def are_had(self, flags: frozenset[str]) -> bool:
        return platform.machine() == self.machine and self.needed <= flags

    def command(self, compiler: str, *more: str) -> list[str]:
        includes = [f"-I{FOLDER / folder}" for folder in ("", *self.folders)]
        return [compiler, *FLAGS, *self.flags, *includes, *map(str, self.files("*.c")), *more]

    def files(self, pattern: str) -> list[Path]:
        return [path for folder in ("", *self.folders) for path in sorted((FOLDER / folder).glob(pattern))]


# The first that the processor has is taken.
INSTRUCTIONS = (
    Instructions(
        id="avx512",
        name="AVX-512 with bfloat16",
        machine="x86_64",
        needed=frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
        folders=("avx512",),
        flags=("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma"),
        multiplies_all=False,
    ),
    Instructions(
        id="avx2",
        name="AVX2 with FMA",
        machine="x86_64",
        needed=frozenset({"avx2", "fma", "f16c"}),
        folders=("avx2", "wide"),
        flags=("-mavx2", "-mfma", "-mf16c"),
        multiplies_all=True,
    ),
    Instructions(
        id="neon",
        name="NEON",
        machine="aarch64",
        needed=frozenset({"asimd"}),
        folders=("neon", "wide"),
        flags=(),
        multiplies_all=True,
    ),
)

_choice = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The library, or None and why there is none."""

    library: Any  # the functions of calls.h
    reason: str
    instructions: Instructions | None = None


def use(choice: str) -> None:
    """`torch` keeps the kernels out of this process; `auto` takes the best that can run; an id, those alone."""
    global _choice
    _choice = choice


def kernels() -> Found:
    return found(_choice)


def can_run(choice: str = "auto") -> bool:
    """Whether this machine has what is chosen, whatever is wanted in this process."""
    return found(choice).library is not None


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
def found(choice: str) -> Found:
    if choice == "torch":
        return Found(library=None, reason="switched off (cpu_kernels is torch)")
    if platform.system() != "Linux":
        return Found(library=None, reason="they need Linux")
    known = [one for one in INSTRUCTIONS if choice in ("auto", one.id)]
    instructions = next((one for one in known if one.are_had(cpu_flags())), None)
    if instructions is None:
        names = " nor ".join(one.name for one in known)
        return Found(library=None, reason=f"this processor has no {names}")
    compiler = _compiler()
    if compiler is None:
        return Found(library=None, reason="there is no C compiler (cc, gcc or clang)")
    try:
        library = ffi().dlopen(str(_built(compiler, instructions)))
    except OSError as error:
        return Found(library=None, reason=f"their library cannot be kept or loaded: {error}")
    except subprocess.SubprocessError as error:
        return Found(library=None, reason=f"{compiler} cannot compile them: {error}")
    if not library.penstock_is_supported():
        return Found(library=None, reason=f"this processor, or its system, has no {instructions.name}")
    return Found(library=library, reason=f"compiled by {compiler}, {instructions.name}", instructions=instructions)


def _compiler() -> str | None:
    asked = os.environ.get("CC")
    return next((path for name in (asked, "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)


def _built(compiler: str, instructions: Instructions) -> Path:
    """The library in the cache folder. Written whole or not at all, so that two processes may build it at once."""
    path = cache_folder("kernels") / f"{_key(compiler, instructions)}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        command = instructions.command(compiler, *SHARED, "-o", str(part))
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        os.replace(part, path)
    return path


def _key(compiler: str, instructions: Instructions) -> str:
    """Hashes the source, the flags and the compiler, whose file stands for its version: it is not run."""
    file = Path(compiler).resolve()
    facts = [str(file), str(file.stat().st_size), str(file.stat().st_mtime_ns), *FLAGS, *instructions.flags]
    text = b"".join(source.read_bytes() for source in (*instructions.files("*.h"), *instructions.files("*.c")))
    return hashlib.sha256("\0".join(facts).encode() + text).hexdigest()[:32]
