"""Real model files, where `scripts/fetch_weights.py` has put them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("PENSTOCK_WEIGHTS", "~/.cache/penstock-weights")).expanduser()
GGUF_NAMES = ("gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


def real_file(name: str) -> str:
    path = FOLDER / (f"{name}.gguf" if name in GGUF_NAMES else name)
    if not path.exists():
        pytest.skip(f"{name} is not there; `.venv/bin/python scripts/fetch_weights.py {name}` fetches it")
    return str(path)


def penstock(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Calls the command in a process of its own, whose peak is its own too."""
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)
