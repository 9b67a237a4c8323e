"""The JSON document of `penstock doctor`."""

from __future__ import annotations

from typing import Any

from penstock.doctor.diagnosis import Diagnosis
from penstock.doctor.examination import CpuKernels, Examination
from penstock.doctor.speed import Speed
from penstock.document import Document
from penstock.proof.verdict import Verdict
from penstock.trace.document import Environment, TraceLane
from penstock.trace.environment import environment


class LaneClaim(Document):
    id: str
    eligible: bool
    reason: str


class DoctorReport(Document):
    """Fields of a model are None where something before them was in the way."""

    model: str
    adapter: str | None = None  # merged into its weights
    environment: Environment
    diagnoses: list[Diagnosis]
    dtype: str | None = None
    device: str | None = None
    lane: TraceLane | None = None
    lanes: tuple[LaneClaim, ...] = ()
    verdict: Verdict | None = None  # None also where a lane is exact by how it is built
    verdict_was_kept: bool = False
    cpu_kernels: CpuKernels | None = None  # None also where the device is no CPU
    speed: Speed | None  # None also where it was not asked for

    @classmethod
    def of(
        cls,
        model: str,
        diagnoses: list[Diagnosis],
        seen: Examination | None,
        speed: Speed | None,
        *,
        num_threads: int,
    ) -> DoctorReport:
        where = environment(device=seen.device if seen else "cpu", num_threads=num_threads)
        found: dict[str, Any] = {"model": model, "environment": where, "diagnoses": diagnoses, "speed": speed}
        if seen is not None:
            found |= {"lane": TraceLane.of(seen.lane), "verdict_was_kept": seen.was_kept, "cpu_kernels": seen.kernels}
            found["lanes"] = tuple(LaneClaim.from_fields_of(claim, id=lane) for lane, claim in seen.claims.items())
        return cls.from_fields_of(seen, **found)
