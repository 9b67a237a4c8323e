"""`penstock models`: what is on this machine that a command can name as its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import report_console, table_of
from penstock.config import MB, load_config


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="Folders to look in; this one unless given.")
    ] = None,
) -> None:
    """List the models on this machine: the default one, the hub's cache, and what folders hold."""
    from penstock.engine.local_models import local_models

    table = table_of(None, ["MODEL", "lane"], ["MB"])
    refused = []
    for model in local_models(folders or [Path()], load_config({})):
        if model.lane:
            table.add_row(model.name, model.lane, f"{model.weight_bytes / MB:,.0f}")
        else:
            refused.append(f"{model.name}: {model.why_not}")
    console = report_console()
    console.print(table)
    for line in refused:
        console.print(f"cannot be run: {line}", style="yellow", markup=False, soft_wrap=True)
