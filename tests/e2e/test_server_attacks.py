"""The longer run of scripts/server_attacks.py, with a tiny model: it says itself whether everything held."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "server_attacks.py"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_connections_of_every_way_to_be_slow_stop_nobody(tmp_path):
    save_tiny_model("llama", tmp_path)
    asked = ["--model", str(tmp_path), "--seconds", "60", "--connections", "100", "--attacks", "slow"]
    done = subprocess.run([sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
