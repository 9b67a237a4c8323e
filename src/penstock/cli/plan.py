"""`penstock plan`: what a prompt would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import Json, Model, opened
from penstock.cli.settings import ENGINE, engine_config, with_settings
from penstock.cli.terminal import EXIT_DOES_NOT_FIT, EXIT_OK, report_console, table_of
from penstock.config import DEFAULT_MODEL, MB, written_budget
from penstock.errors import InvalidSetting

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.engine.planning import ModelPlan

BAR_WIDTH, BESIDE_BAR = 40, 31  # columns of the chart
PROMPT_TOKENS = 4096
ROOM = 1.02  # a run holds up to that much more before the weights than a plan can know


@with_settings({"prompt": ENGINE})
def plan(
    model: Model = DEFAULT_MODEL,
    prompt_tokens: Annotated[
        int | None, typer.Option(help=f"Length of the prompt; {PROMPT_TOKENS} unless a text is given.")
    ] = None,
    files: Annotated[
        list[str] | None, typer.Option("-f", "--file", help="A text file to count, or -; may be repeated.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="A text to count, behind the files.")] = None,
    json: Json = False,
    **settings: Any,
) -> None:
    """Say what a prompt would cost, from the model's config alone. Exit code 1: it does not fit."""
    from penstock.cli.report import PlanReport
    from penstock.engine.planning import plan_model

    parts = opened(files, prompt)
    if parts and prompt_tokens is not None:
        raise InvalidSetting(f"--prompt-tokens {prompt_tokens} is given beside a text. Give one or the other.")
    found = plan_model(
        model, parts or (PROMPT_TOKENS if prompt_tokens is None else prompt_tokens), engine_config(settings)
    )
    if json:
        print(PlanReport.of(found).to_json())
    else:
        _show(report_console(), found)
    raise typer.Exit(EXIT_OK if found.prompt.fits else EXIT_DOES_NOT_FIT)


def _show(console: Console, plan: ModelPlan) -> None:
    from rich.text import Text

    from penstock.plan.prompt_plan import ANSWER_TOKENS, past_context

    prompt = plan.prompt
    packed = {"none": "", "keep": ", packed"}.get(plan.quantize, f", {plan.quantize}")
    name = plan.model if plan.adapter is None else f"{plan.model} with {plan.adapter}"
    console.print(f"{name} ({plan.dtype}{packed}), {prompt.prompt_tokens:,} tokens", style="italic")
    table = table_of(None, ["part"], ["MB"])
    for name, num_bytes in (
        ("Python, torch, libraries", prompt.runtime_bytes),
        ("weights", prompt.weight_bytes),
        ("keys and values", prompt.kv_bytes),
        ("state", prompt.state_bytes),
        ("activations of a chunk", prompt.activation_bytes),
        ("logits", prompt.logits_bytes),
        ("captured steps", prompt.recording_bytes),
        ("images", prompt.media_bytes),
    ):
        if num_bytes:
            table.add_row(name, f"{num_bytes / MB:,.1f}")
    table.add_section()
    table.add_row("peak", f"{prompt.peak_bytes / MB:,.1f}", style="bold")
    table.add_row("budget", f"{prompt.budget_bytes / MB:,.1f}")
    if plan.disk_bytes:
        table.add_row("in the cache folder", f"{plan.disk_bytes / MB:,.1f}")
    console.print(table)
    show_chart(console, plan)
    console.print(f"lane {plan.lane.id}: {plan.lane.reason}")
    many = f"{prompt.num_chunks:,} chunks of up to"
    console.print(f"{'1 chunk of' if prompt.num_chunks == 1 else many} {prompt.chunk_size:,} tokens")
    lack = past_context(prompt.prompt_tokens, plan.max_context, is_source=plan.lane.reads_source)
    for adjustment in prompt.adjustments:
        if adjustment != lack:  # which the verdict tells: nothing was changed
            console.print(f"adjusted: {adjustment}", style="yellow")
    flags = [f"--context to {prompt.prompt_tokens + ANSWER_TOKENS}"] if lack else []
    if prompt.peak_bytes > prompt.budget_bytes or not lack:
        flags.append(f"--memory to {written_budget(ROOM * prompt.peak_bytes)}")
    why = f" ({lack})" if lack else ""
    remedy = f"does not fit{why}: shorten the prompt or raise {' and '.join(flags)}"
    verdict = Text("fits", "green") if prompt.fits else Text(remedy, "red")
    console.print(verdict)


def show_chart(console: Console, plan: ModelPlan) -> None:
    """Peak against chunk size, from zero."""
    console.print("\npeak by chunk size")
    highest = max(plan.peak_by_chunk_size.values())
    width = max(1, min(BAR_WIDTH, console.width - BESIDE_BAR))
    for size, peak in plan.peak_by_chunk_size.items():
        bar = "█" * max(1, round(width * peak / highest))
        name = f"{size:,}" + (" (whole)" if size == plan.prompt.prompt_tokens else "")
        over = peak > plan.prompt.budget_bytes
        console.print(f"{name:>16} {bar:<{width}} {peak / MB:>10,.1f} MB", style="red" if over else None)
    console.print()
