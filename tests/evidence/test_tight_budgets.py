"""Models under budgets that hardly do: kept, refused with an amount, or told by how much they were not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_weights import real_file
from tiny_chat_model import save_tiny_chat_model
from tiny_seq2seq import save_tiny_seq2seq

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(1800)]
TEXT = Path(__file__).parents[2] / "examples" / "report.txt"
SHARES = (0.93, 1.0, 1.03)  # of the peak that a plan in small chunks has
REAL = ["smollm2", "gemma3-270m", "qwen2.5-coder-0.5b", "flan-t5-small-titles"]
TINY = {"tiny-chat": save_tiny_chat_model, "tiny-t5": lambda folder: save_tiny_seq2seq("t5", folder)}


def called(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def run_under(path: str, memory: str) -> subprocess.CompletedProcess[str]:
    return called("run", path, "-f", TEXT, "-p", "What is it?", "--memory", memory, "--max-tokens", 4, "--json")


@pytest.fixture(params=[*REAL, *TINY])
def model(request, tmp_path):
    name = request.param
    if name in TINY:
        TINY[name](tmp_path)
        return name, str(tmp_path)
    return name, name if name == "smollm2" else real_file(name)


def test_a_budget_is_kept_or_refused_or_it_is_told_by_how_much_it_was_not(model):
    name, path = model
    least = json.loads(called("plan", path, "--prompt-tokens", 700, "--chunk-size", 16, "--json").stdout)["peak_bytes"]
    for share in SHARES:
        budget = int(share * least / 1e6)
        done = run_under(path, f"{budget}MB")
        if done.returncode == 2:
            print(f"{name}, {budget} MB: {done.stderr.strip()}")
            named = re.findall(r"(?:at least|raise --memory to) ([\d.]+[MG]B)", done.stderr)
            assert named, done.stderr
            continue
        report = json.loads(done.stdout)
        peak = report["peak_bytes"]["measured"]
        told = [one for one in report["plan"]["adjustments"] if "above --memory" in one]
        print(
            f"{name}, {budget} MB: peak {peak / 1e6:.1f} MB, predicted {report['peak_bytes']['predicted'] / 1e6:.1f}",
            *told,
        )
        assert (peak > budget * 1e6) == bool(told)
