"""Which versions a measurement was made with."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock import __version__

LIBRARIES = ("torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    found = {"penstock": __version__, "python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if commit := _commit():
        found["commit"] = commit
    return found


def _commit() -> str:
    """Of the source that runs, where it belongs to a repository."""
    return _git("describe", "--always", "--dirty", "--exclude", "*") if _git("ls-files", Path(__file__).name) else ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return finished.stdout.strip() if finished.returncode == 0 else ""
