"""What the machine offers: memory that is free, cores, processor features. Linux files first, portable calls else."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.config import FREE_MEMORY_MARGIN, KIB

STATUS_BYTES = 16 * 1024  # /proc/self/status has one or two thousand
START_FIELD = 19  # of /proc/self/stat after the name: when the process was started, in ticks since the machine was
IMPORTED_AT_S = time.monotonic()
# glibc's mallopt parameters, by their numbers in malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 * 2**20


def resident_bytes() -> int:
    """What this process holds now."""
    return _status_bytes("VmRSS") or _peak_from_rusage()


def peak_resident_bytes() -> int:
    """The most this process ever held."""
    return _status_bytes("VmHWM") or _peak_from_rusage()


def default_memory_budget() -> int:
    """What this process may hold when no budget was given: its own bytes and the free ones, less a margin."""
    return int(resident_bytes() + available_bytes() * (1 - FREE_MEMORY_MARGIN))


def available_bytes() -> int:
    """Free memory of the machine, or of the control group where that is less."""
    candidates = [_machine_available(), _cgroup_available()]
    return min(value for value in candidates if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    total_bytes: int
    available_bytes: int  # of the control group, where that has less
    swap_bytes: int
    swap_used_bytes: int


def machine_memory() -> MachineMemory:
    table = _meminfo()
    swap = table.get("SwapTotal", 0)
    return MachineMemory(
        total_bytes=table.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_bytes=available_bytes(),
        swap_bytes=swap,
        swap_used_bytes=swap - table.get("SwapFree", swap),
    )


@cache
def cpu_flags() -> frozenset[str]:
    cpu = named_values("/proc/cpuinfo")
    return frozenset((cpu.get("flags") or cpu.get("Features") or "").split())


@cache
def processor_name() -> str:
    cpu = named_values("/proc/cpuinfo")
    return cpu.get("model name") or cpu.get("Model") or platform.processor() or platform.machine()


def forget_peak() -> None:
    """The peak begins anew, so that what is measured of a request is not what a check at load took."""
    with suppress(OSError):  # another system than Linux: the peak stays
        Path("/proc/self/clear_refs").write_text("5")


def keep_freed_memory() -> None:
    """Lets glibc reuse freed activations: returning them to the system after each operation costs far more time
    than the operation itself, and the bytes are needed again in the next layer anyway."""
    if mallopt := _libc_function("mallopt"):
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, 2**30)


def return_freed_memory() -> None:
    """Gives what was freed back to the system."""
    if malloc_trim := _libc_function("malloc_trim"):
        malloc_trim(0)


def return_pages(address: int, num_bytes: int) -> None:
    """Gives the whole pages of a mapping of our own back; they are zeros when they are touched again."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and (madvise := _libc_function("madvise")):
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def _libc_function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def process_age_s() -> float:
    """Tells the seconds since the system started this process; since this module where it does not say."""
    after_name = _first_line("/proc/self/stat", "").rpartition(")")[2].split()
    if not after_name:
        return time.monotonic() - IMPORTED_AT_S
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[START_FIELD]) / os.sysconf("SC_CLK_TCK")


def has_fast_bfloat16() -> bool:
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def num_physical_cores() -> int:
    """Cores this process may use, counting the threads of one core once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {
        _first_line(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", str(cpu)) for cpu in allowed
    }
    return max(1, min(len(siblings), _cgroup_cpus() or len(siblings)))


def _machine_available() -> int:
    return _meminfo().get("MemAvailable") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _meminfo() -> dict[str, int]:
    return {name: int(value.split()[0]) * KIB for name, value in named_values("/proc/meminfo").items()}


def _cgroup_available() -> int | None:
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _first_line(limit_file, ""), _first_line(usage_file, "")
        if limit.isdigit() and usage.isdigit():
            return max(0, int(limit) - int(usage))
    return None


def _cgroup_cpus() -> int | None:
    quota, _, period = _first_line("/sys/fs/cgroup/cpu.max", "max 1").partition(" ")
    return max(1, int(quota) // int(period)) if quota.isdigit() and period.isdigit() else None


def _status_bytes(name: str) -> int:
    """0 where there is no such line. Every step asks: the text is not decoded, nor cut into lines."""
    try:
        status = os.open("/proc/self/status", os.O_RDONLY)
    except OSError:
        return 0
    try:
        text = os.read(status, STATUS_BYTES)
    finally:
        os.close(status)
    _, found, after = text.partition(f"{name}:".encode())
    return int(after.split(maxsplit=1)[0]) * KIB if found else 0


def _peak_from_rusage() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB


def named_values(path: str | Path) -> dict[str, str]:
    """Reads lines `name: value`, of equal names the first; nothing where there is no such file."""
    pairs = [line.partition(":") for line in reversed(_lines(Path(path)))]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _first_line(path: str, default: str) -> str:
    return next(iter(_lines(Path(path))), default).strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
