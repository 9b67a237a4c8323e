"""How `penstock doctor` looks."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from penstock.cli.report import Lane
from penstock.engine.doctor import Examination
from penstock.lanes.lane import GENERIC_MULTIMODAL
from penstock.lanes.verdicts import Finding, Verdict


class LaneClaim(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    eligible: bool
    reason: str


class CpuKernels(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    compiled: bool
    reason: str


class DoctorReport(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    dtype: str
    device: str
    lane: Lane
    lanes: list[LaneClaim]
    verdict: Verdict | None
    verdict_was_kept: bool
    cpu_kernels: CpuKernels | None  # None: the device is no CPU

    @classmethod
    def of(cls, found: Examination) -> DoctorReport:
        claims, kernels = found.claims.items(), found.kernels
        return cls(
            model=found.model,
            dtype=found.dtype,
            device=found.device,
            lane=Lane.of(found.lane),
            lanes=[LaneClaim(id=lane, eligible=claim.eligible, reason=claim.reason) for lane, claim in claims],
            verdict=found.verdict,
            verdict_was_kept=found.was_kept,
            cpu_kernels=CpuKernels(compiled=kernels.are_compiled, reason=kernels.reason) if kernels else None,
        )


def show_examination(found: Examination, *, as_json: bool) -> None:
    if as_json:
        print(DoctorReport.of(found).model_dump_json(indent=2))
        return
    console = Console(highlight=False)
    console.print(f"{found.model} ({found.dtype}, {found.device})", style="bold")
    for lane_id, claim in found.claims.items():
        console.print(f"  {'can' if claim.eligible else 'cannot':<7}{lane_id}: {claim.reason}")
    console.print(f"lane {found.lane.id}: {found.lane.reason}")
    if found.kernels is not None:
        console.print(f"attention: {'compiled C' if found.kernels.are_compiled else 'torch'}; {found.kernels.reason}")
    if found.verdict is None:
        console.print("chunks: exact by how this lane is built; the tests hold it to transformers", style="green")
        return
    console.print("kept from an earlier check; --rerun checks again" if found.was_kept else "checked just now")
    _show(console, "chunks", found.verdict)
    _show(console, "packed calls", found.verdict.packing)
    if found.verdict.picture is not None:
        _show(console, "pictures", found.verdict.picture)
    elif found.lane.id == GENERIC_MULTIMODAL:
        console.print("pictures: not tried yet; loading the model does, with its processor")
    if found.verdict.real_weights is not None:
        _show(console, "real weights", found.verdict.real_weights)
    elif found.dtype != "float32":
        console.print(f"real weights: not compared in {found.dtype} yet; loading the model does, if --memory allows")


def _show(console: Console, what: str, finding: Finding) -> None:
    word, style = ("exact", "green") if finding.exact else ("not exact", "yellow")
    console.print(f"{what}: {word}; {finding.reason}", style=style)
