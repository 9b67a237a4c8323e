"""Without a GPU the kernels run in Triton's interpreter, in a process of their own: it is chosen at Triton's import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

FOLDER = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the card itself")
@pytest.mark.parametrize(
    "name", ["test_kernels.py", "test_layers.py", "test_packed_decodes.py", "test_padded_steps.py"]
)
def test_kernels_in_the_interpreter(name):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
