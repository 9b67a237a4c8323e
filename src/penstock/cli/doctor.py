"""`penstock doctor`: what to mend on this machine and about a model, and what to ask for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import Json, Model
from penstock.cli.settings import ENGINE, engine_config, with_settings
from penstock.cli.terminal import EXIT_OK, EXIT_REFUSED, importing, progress_console
from penstock.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.doctor.diagnosis import Diagnosis

MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "problem": ("problem", "red")}
LOADING = tuple(name for name in ENGINE if name not in ("chunk_size", "overlap"))


@with_settings({"model": LOADING})
def doctor(
    model: Model = DEFAULT_MODEL,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Load the model and time it, for 20 seconds at most.")
    ] = True,
    rerun: Annotated[bool, typer.Option("--rerun", help="Check exactness again, whatever was found before.")] = False,
    json: Json = False,
    **settings: Any,
) -> None:
    """Look at the machine, a model and its speed, and say what to mend and what to ask for. Exit code 2: a problem."""
    config = engine_config(settings)
    from rich.console import Console

    out, progress = Console(highlight=False, soft_wrap=True, quiet=json), progress_console()
    with progress.status("looking at this machine"):
        with importing():
            from penstock.doctor.machine import MachineFacts, diagnose_machine
            from penstock.doctor.model import diagnose_model
            from penstock.doctor.report import DoctorReport
            from penstock.doctor.speed import diagnose_speed
        facts = MachineFacts.here(config, _torch_uses_gpu)
        diagnoses = diagnose_machine(facts)
    _show(out, "this machine", diagnoses)
    with progress.status(f"looking at {model}"):
        found = diagnose_model(model, config, rerun=rerun)
    _show(out, model, found.diagnoses)
    diagnoses += found.diagnoses
    measured = None
    if speed and found.can_load:
        with progress.status(f"loading {model} and timing it, for 20 seconds at most"):
            loaded, measured = diagnose_speed(model, config)
        _show(out, "loaded", loaded)
        diagnoses += loaded
    if measured is not None:
        out.print(f"\nfor prompts of up to {measured.recommended.prompt_tokens:,} tokens:", style="bold")
        out.print(f"  penstock serve {model} {measured.recommended.flags}", markup=False)
    if json:
        report = DoctorReport.of(model, diagnoses, found.examination, measured, num_threads=facts.num_threads)
        print(report.model_dump_json(indent=2))
    raise typer.Exit(_end(diagnoses))


def _show(out: Console, title: str, diagnoses: list[Diagnosis]) -> None:
    from rich.text import Text

    out.print(title, style="bold", markup=False)
    for diagnosis in diagnoses:
        word, style = MARKS[diagnosis.status.value]
        out.print(Text.assemble("  ", (f"{word:<8}", style), f"{diagnosis.topic}: {diagnosis.finding}"))
        if diagnosis.remedy is not None:
            out.print(f"          -> {diagnosis.remedy}", markup=False)


def _end(diagnoses: list[Diagnosis]) -> int:
    problems = [diagnosis for diagnosis in diagnoses if diagnosis.status.value == "problem"]
    if not problems:
        return EXIT_OK
    first = problems[0]
    number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems, the first"
    print(f"penstock: {number}: {first.finding}. {first.remedy}.", file=sys.stderr)
    return EXIT_REFUSED


def _torch_uses_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
