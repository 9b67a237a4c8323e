"""Without a GPU the kernels run in Triton's interpreter, in a process of their own: it is chosen at Triton's import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

FOLDER = Path(__file__).parent
MATRICES = "head_shapes or page_sizes or half_precision or 40 or 33"
LARGE = "4160 or shape1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the card itself")
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("test_kernels.py", f"not ({MATRICES})"),
        pytest.param("test_kernels.py", MATRICES, marks=pytest.mark.evidence),
        ("test_layers.py", f"not ({LARGE})"),
        pytest.param("test_layers.py", LARGE, marks=pytest.mark.evidence),
        ("test_draws_on_card.py", "100 or told"),
        pytest.param("test_draws_on_card.py", "5003", marks=pytest.mark.evidence),
        pytest.param("test_experts.py", "", marks=pytest.mark.evidence),
        pytest.param("test_packed_decodes.py", "", marks=pytest.mark.evidence),
        pytest.param("test_padded_steps.py", "", marks=pytest.mark.evidence),
        ("test_recurrence.py", "leaves and 97 and (grouped or normed)"),
        pytest.param("test_recurrence.py", "", marks=pytest.mark.evidence),
    ],
)
def test_kernels_in_the_interpreter(name, chosen):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name), "-k", chosen]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
