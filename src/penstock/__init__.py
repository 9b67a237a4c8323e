"""Penstock reads long prompts into language models in bounded memory, exactly, without stalling anyone else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.attached.attach import attach, detach
    from penstock.config import EngineConfig, PrefillPriority
    from penstock.engine.async_engine import AsyncEngine
    from penstock.engine.engine import Engine
    from penstock.engine.planning import plan
    from penstock.errors import PenstockError
    from penstock.plan.chunks import ChunkedPrefillConfig, PrefillChunk, create_prefill_chunks
    from penstock.plan.memory import MemoryModel, ModelShape, PrefillMemoryEstimate, peak_memory_estimate
    from penstock.proof.selfcheck import selfcheck
    from penstock.proof.verdict import Verdict
    from penstock.request import Failed, Finished, Output, PrefillProgress, SamplingParams, Token
    from penstock.schedule.prefill import Prefill, PrefillScheduler, StartDecode, YieldToDecode
    from penstock.trace.document import Trace

# Public names and the rooms they live in; imported when first used, so that `import penstock` stays light.
_PUBLIC = {
    "attached.attach": ("attach", "detach"),
    "config": ("EngineConfig", "PrefillPriority"),
    "engine.async_engine": ("AsyncEngine",),
    "engine.engine": ("Engine",),
    "errors": ("PenstockError",),
    "plan.chunks": ("ChunkedPrefillConfig", "PrefillChunk", "create_prefill_chunks"),
    "plan.memory": ("MemoryModel", "ModelShape", "PrefillMemoryEstimate", "peak_memory_estimate"),
    "proof.selfcheck": ("selfcheck",),
    "proof.verdict": ("Verdict",),
    "request": ("Failed", "Finished", "Output", "PrefillProgress", "SamplingParams", "Token"),
    "schedule.prefill": ("Prefill", "PrefillScheduler", "StartDecode", "YieldToDecode"),
    "trace.document": ("Trace",),
}
_HOME = {name: room for room, names in _PUBLIC.items() for name in names}

__all__ = [*sorted(_HOME), "plan"]


def __getattr__(name: str) -> Any:
    if name == "plan":
        return importlib.import_module("penstock.plan")  # a package that can be called
    if name in _HOME:
        return getattr(importlib.import_module(f"penstock.{_HOME[name]}"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
