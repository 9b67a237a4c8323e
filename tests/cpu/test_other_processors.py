"""The C kernels for aarch64, compiled for it and run in qemu: they give what those of this processor give."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from penstock.kernels import build

DRIVER = Path(__file__).with_name("kernels_driver.c")
COMPILERS = {"avx2": "gcc", "neon": "aarch64-linux-gnu-gcc"}
RUNNERS = {"avx2": [], "neon": ["qemu-aarch64"]}
TIMEOUT_S = 600  # of a compiler or an emulated processor on a busy machine
BY_LANES = ("single", "normed", "gated", "hidden", "routed", "mixed")  # sums in as many parts as a register has lanes


def results(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """What the driver writes, by name; it fails where a row is not the same among other rows."""
    (instructions,) = (one for one in build.INSTRUCTIONS if one.id == kind)
    program = folder / kind
    command = instructions.command(COMPILERS[kind], str(DRIVER), "-static", "-pthread", "-o", str(program))
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    done = subprocess.run([*RUNNERS[kind], str(program)], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found, rest = {}, done.stdout
    while rest:
        header, _, rest = rest.partition(b"\n")
        name, count = header.decode().split()
        found[name], rest = np.frombuffer(rest, np.float32, int(count)), rest[4 * int(count) :]
    return found


@pytest.mark.evidence
def test_neon_gives_what_avx2_gives(tmp_path):
    tools = [*COMPILERS.values(), *RUNNERS["neon"]]
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"without {' and '.join(missing)}")
    if not build.can_run("avx2"):
        pytest.skip("this processor has no AVX2 to compare with")
    expected, found = (results(kind, tmp_path) for kind in ("avx2", "neon"))
    assert expected.keys() == found.keys()
    assert len([name for name in found if name.startswith("product")]) == 14, "thirteen types of codes, and bfloat16"
    for name, values in expected.items():
        assert np.isfinite(values).all()
        assert np.abs(values).max() > 0
        if name.startswith(BY_LANES):
            assert np.abs(found[name] - values).max() <= 2**-8 * np.abs(values).max(), name
        else:
            assert np.array_equal(found[name], values), name
