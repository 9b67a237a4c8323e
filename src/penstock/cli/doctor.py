"""How `penstock doctor` looks."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from penstock.config import EngineConfig
from penstock.doctor.diagnosis import Diagnosis, Status
from penstock.doctor.machine import MachineFacts, diagnose_machine
from penstock.doctor.model import ModelFindings, diagnose_model
from penstock.doctor.speed import Speed, diagnose_speed
from penstock.document import Document
from penstock.lanes.verdicts import Verdict
from penstock.trace.document import Environment, Lane
from penstock.trace.environment import environment

EXIT_OK, EXIT_PROBLEM = 0, 2
MARKS = {Status.GOOD: ("ok", "green"), Status.NOTE: ("note", "yellow"), Status.PROBLEM: ("problem", "red")}


class LaneClaim(Document):
    id: str
    eligible: bool
    reason: str


class CpuKernels(Document):
    compiled: bool
    reason: str


class DoctorReport(Document):
    """Fields of a model are None where something before them was in the way."""

    model: str
    environment: Environment
    diagnoses: list[Diagnosis]
    dtype: str | None
    device: str | None
    lane: Lane | None
    lanes: list[LaneClaim]
    verdict: Verdict | None  # None also where a lane is exact by how it is built
    verdict_was_kept: bool
    cpu_kernels: CpuKernels | None  # None also where the device is no CPU
    speed: Speed | None  # None also where it was not asked for

    @classmethod
    def of(cls, model: str, where: Environment, found: ModelFindings, speed: Speed | None) -> DoctorReport:
        seen = found.examination
        kernels = seen.kernels if seen else None
        claims = seen.claims.items() if seen else ()
        return cls(
            model=model,
            environment=where,
            diagnoses=found.diagnoses,
            dtype=seen.dtype if seen else None,
            device=seen.device if seen else None,
            lane=Lane.of(seen.lane) if seen else None,
            lanes=[LaneClaim(id=lane, eligible=claim.eligible, reason=claim.reason) for lane, claim in claims],
            verdict=seen.verdict if seen else None,
            verdict_was_kept=seen.was_kept if seen else False,
            cpu_kernels=CpuKernels(compiled=kernels.are_compiled, reason=kernels.reason) if kernels else None,
            speed=speed,
        )


def run_doctor(model: str, config: EngineConfig, *, rerun: bool, with_speed: bool, as_json: bool) -> int:
    """Looks at the machine, the model and its speed, in this order; what is in the way of one ends there."""
    out = Console(highlight=False, soft_wrap=True, quiet=as_json)
    progress = Console(stderr=True, highlight=False)
    facts = MachineFacts.here(config, _torch_uses_gpu)
    machine = diagnose_machine(facts)
    _show(out, "this machine", machine)
    with progress.status(f"looking at {model}"):
        found = diagnose_model(model, config, rerun=rerun)
    _show(out, model, found.diagnoses)
    speed = None
    if with_speed and found.can_load:
        with progress.status(f"loading {model} and timing it, for 20 seconds at most"):
            timed = diagnose_speed(model, config)
        speed = timed.speed
        _show(out, "loaded", timed.diagnoses)
        found.diagnoses += timed.diagnoses
    found.diagnoses = [*machine, *found.diagnoses]
    if speed is not None:
        out.print(f"\nfor prompts of up to {speed.recommended.prompt_tokens:,} tokens:", style="bold")
        out.print(f"  penstock serve {model} {speed.recommended.flags}", markup=False)
    if as_json:
        device = found.examination.device if found.examination else "cpu"
        where = environment(device=device, num_threads=facts.num_threads)
        print(DoctorReport.of(model, where, found, speed).model_dump_json(indent=2))
    return _end(found.diagnoses)


def _show(out: Console, title: str, diagnoses: list[Diagnosis] | tuple[Diagnosis, ...]) -> None:
    out.print(f"{title}", style="bold", markup=False)
    for diagnosis in diagnoses:
        word, style = MARKS[diagnosis.status]
        out.print(Text.assemble("  ", (f"{word:<8}", style), f"{diagnosis.topic}: {diagnosis.finding}"))
        if diagnosis.remedy is not None:
            out.print(f"          -> {diagnosis.remedy}", markup=False)


def _end(diagnoses: list[Diagnosis]) -> int:
    problems = [diagnosis for diagnosis in diagnoses if diagnosis.status is Status.PROBLEM]
    if not problems:
        return EXIT_OK
    first = problems[0]
    number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems, the first"
    print(f"penstock: {number}: {first.finding}. {first.remedy}.", file=sys.stderr)
    return EXIT_PROBLEM


def _torch_uses_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
