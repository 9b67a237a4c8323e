"""What is read of the machine."""

import re
from pathlib import Path

import pytest

from penstock.plan.machine import peak_resident_bytes, resident_bytes

MIB = 2**20
STATUS = Path("/proc/self/status")


def stated(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="the system has no /proc")
def test_held_memory_is_what_the_system_says():
    before = resident_bytes()
    ballast = b"x" * (64 * MIB)
    assert resident_bytes() - before > 60 * MIB
    assert abs(resident_bytes() - stated("VmRSS")) < MIB
    del ballast
    assert peak_resident_bytes() == stated("VmHWM")
    assert peak_resident_bytes() > before + 60 * MIB
