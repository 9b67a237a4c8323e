"""Which kernels take the time of a step, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    name: str
    us_per_step: float
    num_per_step: float


def kernel_times(engine: Engine, num_steps: int) -> list[KernelTime]:
    """Of the next steps, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(num_steps):
            engine.step()
    found = [
        KernelTime(
            name=row.key,
            us_per_step=row.self_device_time_total / num_steps,
            num_per_step=row.count / num_steps,
        )
        for row in seen.key_averages()
        if row.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel.us_per_step)
