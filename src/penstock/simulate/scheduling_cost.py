"""What the scheduler itself costs per step, in real time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from statistics import median

from penstock.config import PrefillPriority
from penstock.request import Request, StepResult
from penstock.schedule.scheduler import Scheduler
from penstock.simulate.costs import MACHINES
from penstock.simulate.simulate import SAMPLING, calibrated_cost, make_scheduler

NUM_SEQUENCES = (16, 64, 256, 1024)
PROMPT = 64
LONG_PROMPT = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingCost:
    num_sequences: int
    us_per_step: float

    @property
    def us_per_sequence(self) -> float:
        return self.us_per_step / self.num_sequences


def measure(num_sequences: int, *, num_steps: int = 200) -> SchedulingCost:
    """The median of next_step and apply with that many decodes and one long prompt, at a target of 50 ms."""
    machine = MACHINES["h200"]
    scheduler = make_scheduler(
        machine,
        priority=PrefillPriority.INTERLEAVED,
        target_s=0.05,
        num_blocks=machine.num_blocks,
        cost=calibrated_cost(machine, Random(0)),
        max_running=2 * num_sequences,
    )
    for index in range(num_sequences):
        prompt = (index, *range(1, PROMPT))
        scheduler.submit(Request(id=index, prompt=prompt, sampling=SAMPLING, arrived_at=0.0))
    while any(sequence.is_prefilling for sequence in scheduler.sequences.values()):
        _step(scheduler)
    prompt = (num_sequences, *range(1, LONG_PROMPT))
    scheduler.submit(Request(id=num_sequences, prompt=prompt, sampling=SAMPLING, arrived_at=0.0))
    elapsed_s = [_step(scheduler) for _ in range(num_steps)]
    return SchedulingCost(num_sequences=num_sequences, us_per_step=median(elapsed_s) * 1e6)


def _step(scheduler: Scheduler) -> float:
    """One step; the seconds that the scheduler took for it."""
    began = time.perf_counter()
    plan = scheduler.next_step()
    planned = time.perf_counter()
    assert plan is not None
    tokens = {chunk.sequence_id: 1 for chunk in plan.chunks if chunk.wants_logits}
    result = StepResult(step=plan.step, token_by_sequence=tokens, finished={}, elapsed_s=plan.predicted_s, peak_bytes=0)
    applying = time.perf_counter()
    scheduler.apply(result)
    return time.perf_counter() - applying + planned - began
