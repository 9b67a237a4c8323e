"""`penstock models`: what is on this machine; getting, finding and removing models of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.flags import Json
from penstock.cli.terminal import progress_console, report_console, table_of
from penstock.config import MB, load_config

models = typer.Typer(
    help="List the models of this machine; download, find and remove those of the hub.", no_args_is_help=True
)
HubModel = Annotated[str, typer.Argument(help="A hub id, such as owner/name.", metavar="MODEL")]


@models.command("list")
def list_models(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="Folders to look in; this one unless given.")
    ] = None,
    json: Json = False,
) -> None:
    """List the models on this machine: the default one, the hub's cache, and what folders hold."""
    from penstock.engine.hub_models import cache_folder
    from penstock.engine.local_models import LocalModels, local_models

    found = tuple(local_models(folders or [Path()], load_config({})))
    if json:
        print(LocalModels(cache=str(cache_folder()), models=found).model_dump_json(indent=2))
        return
    console, table = report_console(), table_of(None, ["MODEL", "lane"], ["MB"])
    for model in found:
        if model.lane is not None:
            table.add_row(model.name, model.lane, f"{model.weight_bytes / MB:,.1f}")
    console.print(table)
    for model in found:
        if model.lane is None:
            told = f"cannot be run: {model.name}: {model.why_not}"
            console.print(told, style="yellow", markup=False, soft_wrap=True)


@models.command()
def download(
    model: HubModel,
    gguf: Annotated[
        str | None, typer.Option(help="Fetch one GGUF file alone: its name, a part of it, or a pattern.")
    ] = None,
) -> None:
    """Fetch what is read of a model: safetensors, tokenizer and configs, or one GGUF; not what is here already."""
    from penstock.engine.hub_models import download as fetch

    print(fetch(model, gguf))


@models.command()
def path(
    model: Annotated[str, typer.Argument(help="A model as `penstock models list` names it.", metavar="MODEL")],
) -> None:
    """Print where a model lies that is here."""
    from penstock.engine.hub_models import where

    print(where(model))


@models.command()
def remove(model: HubModel, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete a model from the hub's cache, after a question. Nothing outside the cache is touched."""
    from penstock.engine.hub_models import removal

    found = removal(model)
    if not yes:
        question = f"Remove {model} and its {found.num_bytes / MB:,.1f} MB from the hub's cache?"
        typer.confirm(question, abort=True, err=True)
    found.execute()
    progress_console().print(f"{found.num_bytes / MB:,.1f} MB are free again.")
