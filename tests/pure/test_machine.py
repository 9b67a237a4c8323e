"""What is read of the machine."""

import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.plan.machine import peak_resident_bytes, process_age_s, resident_bytes

MIB = 2**20
STATUS = Path("/proc/self/status")


def stated(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="the system has no /proc")
def test_held_memory_is_what_the_system_says():
    before = resident_bytes()
    ballast = mmap.mmap(-1, 64 * MIB)  # pages of its own: what was freed before is not taken again
    ballast.write(b"x" * (64 * MIB))
    assert resident_bytes() - before > 60 * MIB
    assert abs(resident_bytes() - stated("VmRSS")) < MIB
    ballast.close()
    assert peak_resident_bytes() == stated("VmHWM")
    assert peak_resident_bytes() > before + 60 * MIB


def test_a_process_is_as_old_as_its_parent_saw_it_begin():
    program = "import time; time.sleep(0.2); from penstock.plan.machine import process_age_s; print(process_age_s())"
    age_at_begin_s = process_age_s()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    tick_s = 0.02  # the system counts in hundredths
    assert 0.2 - tick_s < float(done.stdout) <= process_age_s() - age_at_begin_s + tick_s
