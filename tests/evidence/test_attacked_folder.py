"""Processes with a cache folder that die, find damaged files, or ask in random order: tokens as without it."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "disk_cache.py"
PARTS = {
    "mixed": ("--tokens", "4096"),
    "kills": ("--tokens", "900", "--number", "10"),
    "damage": ("--tokens", "900", "--number", "40"),
    "killed": ("--tokens", "4000"),
    "budget": ("--tokens", "4000", "--number", "30", "--most", "17000000"),
}

pytestmark = pytest.mark.evidence


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed-windows", "bamba"])
def test_a_folder_gives_the_same_tokens_whatever_happens_to_it(part, name, tmp_path, capsys):
    save_tiny_model(name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, SCRIPT, part, tmp_path / name, *PARTS[part]], capture_output=True, text=True, check=False
    )
    with capsys.disabled():
        print(f"\n{done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
