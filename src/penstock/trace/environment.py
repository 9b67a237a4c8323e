"""Describes where something was recorded or measured: versions, processor, device, threads, commit. No torch."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from functools import cache
from pathlib import Path

from penstock import __version__
from penstock.plan.machine import processor_name
from penstock.trace.document import Environment

SOURCE = Path(__file__).parents[3]  # where the package lies in a clone
LIBRARIES = ("torch", "transformers", "numpy")


def environment(*, device: str, num_threads: int) -> Environment:
    return Environment(
        penstock=__version__,
        commit=source_commit(),
        python=platform.python_version(),
        torch=installed("torch"),
        transformers=installed("transformers"),
        system=f"{platform.system()} {platform.release()}",
        processor=processor_name(),
        device=device,
        num_threads=num_threads,
    )


def versions() -> dict[str, str]:
    """Names what a measurement was made with; what is not there is left out."""
    found = {"penstock": __version__, "python": platform.python_version()}
    found |= {name: number for name in LIBRARIES if (number := installed(name)) is not None}
    return found if (commit := source_commit()) is None else found | {"commit": commit}


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def source_commit() -> str | None:
    """Reads the commit of the source, with "+changes" where the source differs from it."""
    if not (SOURCE / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+changes" if _git("status", "--porcelain", "--", "src") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(SOURCE), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
