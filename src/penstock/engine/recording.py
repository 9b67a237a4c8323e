"""What a trace says about an engine: where it runs, under which limits, and the plan of its longest prompt."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from penstock.trace.document import Trace, TraceLane, TraceLimits, TraceModel, TracePlan
from penstock.trace.environment import environment
from penstock.trace.recorder import Recorder, Recording

if TYPE_CHECKING:
    from penstock.engine.engine import Engine


def trace_head(engine: Engine) -> Trace:
    """The document before anything ran."""
    model, config, shape = engine.model, engine.config, engine.model.memory.shape
    is_gpu = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if is_gpu else model.device.type
    return Trace(
        began_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        environment=environment(device=device, num_threads=torch.get_num_threads()),
        model=TraceModel.from_fields_of(model, num_parameters=shape.num_parameters, weight_bytes=shape.weight_bytes),
        lane=TraceLane.of(engine.lane),
        limits=TraceLimits.from_fields_of(
            config,
            memory_budget_bytes=model.budget_bytes,
            priority=config.priority.value,
            num_blocks=engine.scheduler.pool.num_blocks,
        ),
        adjustments=tuple(engine.adjustments),
    )


def taken(engine: Engine, recorder: Recorder, *, last_s: float | None = None) -> Recording:
    """Takes what was recorded, with the lane as it was applied and the plan of the longest prompt."""
    changes: dict[str, object] = {"lane": TraceLane.of(engine.lane.after_reading(recorder.most_prompt_chunks))}
    if recorder.longest_prompt:
        plan = engine.plan(recorder.longest_prompt)
        changes["adjustments"] = plan.adjustments
        changes["plan"] = TracePlan.from_fields_of(plan)
    return dataclasses.replace(recorder.taken(last_s=last_s), head=recorder.head.model_copy(update=changes))
