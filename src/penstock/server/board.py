"""Who waits and who is being served, read from the plans of steps."""

from __future__ import annotations

import threading
import time

from penstock.request import StepPlan


class Board:
    """Written by the step thread and by the tasks that ask; a lock keeps them apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joined_at: dict[int, float] = {}  # of those that wait, first come first
        self._running: set[int] = set()
        self._queue_time_s: dict[int, float] = {}

    def join(self, request_id: int) -> None:
        with self._lock:
            if request_id not in self._running:  # a step may have taken it already
                self._joined_at[request_id] = time.perf_counter()

    def take_plan(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        with self._lock:
            for request_id in plan.preempted:
                self._running.discard(request_id)
                self._joined_at.setdefault(request_id, now)
            for request_id in plan.admitted:  # perhaps again, after it lost its place
                joined_at = self._joined_at.pop(request_id, now)
                self._queue_time_s.setdefault(request_id, now - joined_at)
                self._running.add(request_id)

    def leave(self, request_id: int) -> float | None:
        """How long it waited; None if it never ran."""
        with self._lock:
            self._joined_at.pop(request_id, None)
            self._running.discard(request_id)
            return self._queue_time_s.pop(request_id, None)

    def queue_position(self, request_id: int) -> int:
        """How many are served before it, itself included; 0 once it is being served."""
        with self._lock:
            return list(self._joined_at).index(request_id) + 1 if request_id in self._joined_at else 0

    @property
    def num_waiting(self) -> int:
        return len(self._joined_at)

    @property
    def num_running(self) -> int:
        return len(self._running)
