"""What a model may run on, and in which dtype: the processor, an NVIDIA card by its driver, or a GPU of Apple."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config import FREE_MEMORY_MARGIN, GIB
from penstock.errors import InvalidSetting
from penstock.plan.machine import has_fast_bfloat16

LARGEST_CONTEXT_BYTES = GIB
# Attributes of a device, by their numbers in cuda.h.
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a GPU, asked before any weight is loaded."""

    total_bytes: int
    free_bytes: int
    name: str = ""
    capability: tuple[int, int] | None = None  # None: it was not asked

    @property
    def runtime_bytes(self) -> int:
        """The CUDA context and its libraries. What else is taken belongs to other processes."""
        return min(self.total_bytes - self.free_bytes, LARGEST_CONTEXT_BYTES)

    @property
    def default_budget(self) -> int:
        return int(self.runtime_bytes + self.free_bytes * (1 - FREE_MEMORY_MARGIN))


def cuda_memory() -> DeviceMemory | None:
    """Asks the driver itself, without torch, for the memory of torch's first GPU; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if importlib.metadata.version("torch").endswith("+cpu"):
            return None
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    calls = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        lambda: driver.cuDeviceGetName(name, len(name), device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device),
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: driver.cuCtxSetCurrent(context),
        lambda: driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
    )
    is_known = all(call() == 0 for call in calls)
    if context:
        driver.cuDevicePrimaryCtxRelease_v2(device)
    if not is_known:
        return None
    return DeviceMemory(
        total_bytes=total.value,
        free_bytes=free.value,
        name=name.value.decode(errors="replace"),
        capability=(major.value, minor.value),
    )


def choose_dtype(
    asked: str,
    model_config: Mapping[str, Any],
    device: str = "cpu",
    has_kernels: Callable[[], bool] = lambda: False,  # for all that such a model computes in bfloat16
) -> str:
    """The checkpoint's own, but float32 where this processor has no fast bfloat16, in instructions or in kernels."""
    if asked != "auto":
        return asked
    stored = str(model_config.get("dtype") or model_config.get("torch_dtype") or "float32")
    if stored == "float32":
        return stored
    is_fast = device == "cuda" or (device == "cpu" and (has_fast_bfloat16() or has_kernels()))
    return "bfloat16" if is_fast else "float32"


def require_device(name: str, *, has_cuda: bool) -> str:
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if name == "cuda" and not has_cuda:
        raise InvalidSetting("Device 'cuda' is not there: torch or the driver finds no GPU; use --device cpu.")
    if name == "mps" and not has_apple_gpu():
        raise InvalidSetting("Device 'mps' is not there: this is no Mac with Apple silicon; use --device cpu.")
    return name


def has_apple_gpu() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def device_warnings(device: str) -> list[str]:
    """What to say of a device that nobody here has: its memory is the machine's, and torch computes all of it."""
    return ["device mps was never tried; check its answers against --device cpu"] if device == "mps" else []
