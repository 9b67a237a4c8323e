"""How `penstock plan` looks."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.report import PlanReport
from penstock.cli.terminal import report_console
from penstock.engine.planning import ModelPlan

BAR_WIDTH = 40
MB = 1e6


def show_plan(plan: ModelPlan, *, as_json: bool) -> None:
    if as_json:
        print(PlanReport.of(plan).to_json())
        return
    console = report_console()
    prompt = plan.prompt
    packed = {"none": "", "keep": ", packed"}.get(plan.quantize, f", {plan.quantize}")
    table = Table(title=f"{plan.model} ({plan.dtype}{packed}), {prompt.prompt_tokens:,} tokens", title_justify="left")
    table.add_column("part")
    table.add_column("MB", justify="right")
    for name, num_bytes in (
        ("Python, torch, libraries", prompt.runtime_bytes),
        ("weights", prompt.weight_bytes),
        ("keys and values", prompt.kv_bytes),
        ("state", prompt.state_bytes),
        ("activations of a chunk", prompt.activation_bytes),
        ("logits", prompt.logits_bytes),
        ("images", prompt.media_bytes),
    ):
        if num_bytes:
            table.add_row(name, f"{num_bytes / MB:,.1f}")
    table.add_section()
    table.add_row("peak", f"{prompt.peak_bytes / MB:,.1f}", style="bold")
    table.add_row("budget", f"{prompt.budget_bytes / MB:,.1f}")
    console.print(table)
    _show_chart(console, plan)
    console.print(f"lane {plan.lane.id}: {plan.lane.reason}")
    console.print(f"{prompt.num_chunks} chunks of up to {prompt.chunk_size} tokens")
    for adjustment in prompt.adjustments:
        console.print(f"adjusted: {adjustment}", style="yellow")
    remedy = "raise --context or --memory" if prompt.peak_bytes <= prompt.budget_bytes else "raise --memory"
    verdict = Text("fits", "green") if prompt.fits else Text(f"does not fit: shorten the prompt or {remedy}", "red")
    console.print(verdict)


def _show_chart(console: Console, plan: ModelPlan) -> None:
    """Peak against chunk size, from zero."""
    console.print("\npeak by chunk size")
    highest = max(plan.peak_by_chunk_size.values())
    for size, peak in plan.peak_by_chunk_size.items():
        bar = "█" * max(1, round(BAR_WIDTH * peak / highest))
        name = f"{size:,}" + (" (whole)" if size == plan.prompt.prompt_tokens else "")
        over = peak > plan.prompt.budget_bytes
        console.print(f"{name:>16} {bar:<{BAR_WIDTH}} {peak / MB:>10,.1f} MB", style="red" if over else None)
    console.print()
