"""What Penstock makes of a model: which lanes claim it and why, and whether chunks are exact on it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.attention import c_library
from penstock.config import EngineConfig
from penstock.engine.planning import choose_dtype, cuda_memory, kept_verdict, require_device
from penstock.lanes.lane import CHECKED_LANES, LANES, Claim, LaneFacts, pick_lane
from penstock.lanes.verdicts import Verdict, judged
from penstock.models.files import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Whether attention on the CPU runs in compiled C, and why or why not."""

    are_compiled: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    model: str
    dtype: str
    device: str
    lane: LaneFacts
    claims: dict[str, Claim]  # by lane, in the order of preference
    verdict: Verdict | None  # None: a lane that is exact by how it is built
    was_kept: bool  # the verdict is of an earlier check
    kernels: Kernels | None  # None: the device is no CPU


def examine(model: str, config: EngineConfig, *, rerun: bool = False) -> Examination:
    """Loads no weights. torch is imported only when a check has to be made."""
    files = resolve(model, weights=False)
    gpu = None if config.device == "cpu" else cuda_memory()
    device = require_device(config.device, has_cuda=gpu is not None)
    dtype = choose_dtype(config.dtype, files.config, device)
    lane = pick_lane(files.config, config.lane)
    needs_check = lane.id in CHECKED_LANES
    verdict = kept_verdict(files, lane, dtype, device) if needs_check and not rerun else None
    was_kept = verdict is not None
    if needs_check:
        if verdict is None:
            import torch

            from penstock.engine.checking import Checks

            verdict = Checks.of(files, lane, dtype, torch.device(device), rerun=True).verdict
        lane = judged(lane, verdict, is_strict=config.strict)
    return Examination(
        model=model,
        dtype=dtype,
        device=device,
        lane=lane,
        claims={lane_id: claims(files.config) for lane_id, claims in LANES.items()},
        verdict=verdict,
        was_kept=was_kept,
        kernels=cpu_kernels(config, dtype) if device == "cpu" else None,
    )


def cpu_kernels(config: EngineConfig, dtype: str) -> Kernels:
    """Compiles them where they are not kept yet."""
    if dtype != "bfloat16":
        return Kernels(are_compiled=False, reason=f"the compiled ones are for bfloat16, not {dtype}")
    c_library.use(config.cpu_kernels)
    found = c_library.kernels()
    return Kernels(are_compiled=found.library is not None, reason=found.reason)
