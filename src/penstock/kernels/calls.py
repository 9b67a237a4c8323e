"""Calls of the C kernels. What a call is given is said in calls.h alone: structs are filled by its names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penstock.kernels import build

_ffi = build.ffi()


@dataclass(frozen=True, slots=True, kw_only=True)
class CKernels:
    library: Any
    instructions: build.Instructions
    parallel: Any  # runs a C function on torch's threads

    def run(self, function: str, struct: str, fields: dict[str, Any]) -> None:
        """Calls a function that shares its work among torch's threads. The caller keeps alive what C reads."""
        call = _ffi.new(struct, fields)
        call.parallel, call.num_threads = self.parallel, torch.get_num_threads()
        getattr(self.library, function)(call)


def address(tensor: torch.Tensor | None) -> int:
    """Gives where the first value lies; None: 0, which C takes for NULL."""
    return 0 if tensor is None else tensor.data_ptr()


def c_kernels() -> CKernels | None:
    """None where torch has to do the work."""
    found = build.kernels()
    return None if found.instructions is None else _c_kernels(found.library, found.instructions)


@cache
def _c_kernels(library: Any, instructions: build.Instructions) -> CKernels | None:
    """Takes GOMP_parallel of the OpenMP library that torch uses: its threads are shared, no second pool is made."""
    try:
        torch_cpu = _ffi.dlopen(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return CKernels(library=library, instructions=instructions, parallel=torch_cpu.GOMP_parallel)
    except (OSError, AttributeError):
        return None
