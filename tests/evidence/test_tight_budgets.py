"""Models under budgets that hardly do: kept, refused with an amount, or told by how much they were not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_weights import real_file
from tiny_generic import MUST_SHOW, save_causal_model
from tiny_vision_models import pictures, save_tiny_vision_model

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(1800)]
TEXT = Path(__file__).parents[2] / "examples" / "report.txt"
SHARES = (1.0, 1.03, 1.06)  # of what a refusal says that a model needs
REAL = ["smollm2", "gemma3-270m", "qwen2.5-coder-0.5b", "flan-t5-small-titles"]
TINY = ["mamba2 by transformers", "llava with a picture"]


def called(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(params=[*REAL, *TINY])
def model(request, tmp_path):
    """Its name, its place, and what is asked beside the report."""
    name, path, asked = request.param, tmp_path / "model", ["-p", "What is it?"]
    path.mkdir()
    if name == "mamba2 by transformers":
        save_causal_model(MUST_SHOW["mamba2"](), path)
    elif name == "llava with a picture":
        save_tiny_vision_model("llava", path)
        pictures(1)[0].save(tmp_path / "picture.png")
        asked += ["--image", tmp_path / "picture.png"]
    else:
        path = name if name == "smollm2" else real_file(name)
    return name, path, asked


def test_a_budget_is_kept_or_refused_or_it_is_told_by_how_much_it_was_not(model, capsys):
    name, path, asked = model

    def run_within(megabytes: int) -> subprocess.CompletedProcess[str]:
        given = ["-f", TEXT, *asked, "--max-tokens", 4, "--context", 8192, "--memory", f"{megabytes}MB", "--json"]
        return called("run", path, *given)

    least = needed_megabytes(run_within(300).stderr)
    for share in SHARES:
        megabytes = int(share * least)
        done = run_within(megabytes)
        if done.returncode == 2:
            row = f"refused, names {needed_megabytes(done.stderr)} MB |"
        else:
            report = json.loads(done.stdout)
            peak, predicted = (report["peak_bytes"][one] / 1e6 for one in ("measured", "predicted"))
            told = [one for one in report["plan"]["adjustments"] if "above --memory" in one]
            row = f"peak {peak:.1f} MB, predicted {predicted:.1f} | {'; '.join(told) or 'kept'} |"
            assert (peak > megabytes) == bool(told)
        with capsys.disabled():
            print(f"\n| {name} | {megabytes} MB | {row}", end="")


def needed_megabytes(refusal: str) -> int:
    """Reads the amount that a refusal names."""
    found = re.search(r"(?:at least|raise --memory to) ([\d.]+)([MG])B", refusal)
    assert found, refusal
    return round(float(found[1]) * (1000 if found[2] == "G" else 1))
