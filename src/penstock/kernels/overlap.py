"""A kernel may come onto the card while the one before it still ends, and waits there for its inputs.

In a step of one row the next may come at once: it has weights to fetch that nobody writes. With more rows it would take
the places of a product that is still spread over the card, so it comes when that one has only to write its results.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.config import HOPPER

NEVER, AT_ONCE, LATE = 0, 1, 2
MAX_ROWS = 16  # beyond, products are the matrix library's


@triton.jit
def come_at_once(OVERLAPS: tl.constexpr) -> None:
    if OVERLAPS == 1:
        gdc_launch_dependents()


@triton.jit
def come_late(OVERLAPS: tl.constexpr) -> None:
    if OVERLAPS == 2:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr) -> None:
    """Every program of every such kernel waits: that its predecessor has ended means that all before it have."""
    if OVERLAPS > 0:
        gdc_wait()


@triton.jit
def come_and_wait(OVERLAPS: tl.constexpr) -> None:
    """Begins a kernel that reads nothing but what others write."""
    come_at_once(OVERLAPS)
    wait_for_inputs(OVERLAPS)


def overlap(num_rows: int) -> dict[str, Any]:
    """What a launch is given. Cards before Hopper, and Triton's interpreter, have no such launches."""
    if num_rows > MAX_ROWS or not _is_there():
        return {"OVERLAPS": NEVER}
    return {"OVERLAPS": AT_ONCE if num_rows == 1 else LATE, "launch_pdl": True}


@functools.cache
def _is_there() -> bool:
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability() >= HOPPER
