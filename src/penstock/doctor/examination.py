"""What Penstock makes of a model: which lanes claim it and why, and whether chunks are exact on it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.document import Document
from penstock.kernels import build
from penstock.lanes.lane import Claim, LaneFacts
from penstock.lanes.place import Place
from penstock.lanes.table import LANES, settle
from penstock.models.files import resolve
from penstock.plan.devices import choose_dtype, cuda_memory
from penstock.proof.verdict import Verdict, judged


class CpuKernels(Document):
    """Whether attention on the CPU runs in compiled C, and why or why not."""

    compiled: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    adapter: str | None  # its name
    dtype: str
    device: str
    lane: LaneFacts
    claims: dict[str, Claim]  # by lane, in the order of preference
    verdict: Verdict | None  # None: a lane that is exact by how it is built
    was_kept: bool  # the verdict is of an earlier check
    kernels: CpuKernels | None  # None: the device is no CPU


def examine(model: str, config: EngineConfig, *, rerun: bool = False) -> Examination:
    """Loads no weights. torch is imported only when a check has to be made."""
    files = resolve(model, weights=False)
    gpu = None if config.device == "cpu" else cuda_memory()
    place = settle(files, config, has_cuda=gpu is not None)
    lane, verdict, was_kept = place.lane, None, False
    if LANES[lane.id].is_checked:
        verdict = None if rerun else place.kept_verdict()
        was_kept = verdict is not None
        if verdict is None:
            from penstock.lanes.checks import Checks

            verdict = Checks.of(place, rerun=True).verdict
        lane = judged(lane, verdict, is_strict=config.strict)
    return Examination(
        adapter=place.files.adapter_name,
        dtype=place.dtype,
        device=place.device,
        lane=lane,
        claims={kind.id: kind.claim(place.files.config) for kind in LANES.values()},
        verdict=verdict,
        was_kept=was_kept,
        kernels=cpu_kernels(place) if place.device == "cpu" else None,
    )


def cpu_kernels(place: Place) -> CpuKernels:
    """Compiles them where they are not kept yet."""
    found = build.found(place.config.cpu_kernels)
    # Where they cannot run, their absence may be why the model is computed in float32.
    runs_in_c = LANES[place.lane.id].claim(place.files.config).runs_in_c
    dtype = choose_dtype(place.config.dtype, place.files.config, has_kernels=lambda: runs_in_c)
    if place.dtype != "bfloat16" and dtype != "bfloat16":
        return CpuKernels(compiled=False, reason=f"the compiled ones are for bfloat16, not {place.dtype}")
    return CpuKernels(compiled=found.library is not None, reason=found.reason)
