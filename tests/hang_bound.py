"""Waiting for what must come. The bound is for hangs alone: no test says how quick anything is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

HANG_S = 240  # far beyond what anything here takes on a busy machine, and below the timeout of a test
LEAST_BOUND_S = 30
PAUSE_S = 0.005


def within(seconds: float, holds: Callable[[], object]) -> bool:
    """Whether it comes to hold before that many seconds are over; no bound that a busy machine could reach."""
    assert seconds >= LEAST_BOUND_S, f"{seconds} s could pass on a busy machine"
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE_S)
    return True


async def until(holds: Callable[[], object]) -> None:
    """As `within`, for a task that others run beside; whoever waits for the whole scenario ends it."""
    while not holds():
        await asyncio.sleep(PAUSE_S)


def finished(scenario: Coroutine[Any, Any, Any]) -> Any:
    """What the scenario returns, in an event loop of its own."""
    return asyncio.run(asyncio.wait_for(scenario, timeout=HANG_S))
