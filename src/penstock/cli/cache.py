"""`penstock cache`: what a cache folder holds; proving it, clearing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.flags import Json
from penstock.cli.terminal import EXIT_DOES_NOT_FIT, progress_console, report_console, table_of
from penstock.config import MB, load_config

cache = typer.Typer(help="Look at the folder of --cache-dir, prove what it holds, or clear it.", no_args_is_help=True)
Folder = Annotated[
    str | None,
    typer.Option("--cache-dir", help="The folder; that of the settings unless given, else that of sessions."),
]


def _path(folder: str | None) -> Path:
    from penstock.engine.kept_folder import folder_of

    return folder_of(load_config({"cache_dir": folder}))


@cache.command("list")
def list_kept(cache_dir: Folder = None, json: Json = False) -> None:
    """List the models whose keys and values the folder holds."""
    from penstock.engine.kept_folder import listed

    found = listed(_path(cache_dir))
    if json:
        print(found.model_dump_json(indent=2))
        return
    console, table = report_console(), table_of(None, ["MODEL", "id", "dtype", "kernel", "used"], ["slabs", "MB"])
    for model in found.models:
        named = (model.model, model.id, model.about.get("dtype", ""), model.about.get("kernel", ""))
        table.add_row(*named, model.used_at or "", f"{model.slabs:,}", f"{model.bytes / MB:,.1f}")
    console.print(table)
    console.print(f"{found.bytes / MB:,.1f} MB in {found.path}", style="dim", markup=False, soft_wrap=True)


@cache.command()
def verify(cache_dir: Folder = None, json: Json = False) -> None:
    """Read all that is kept and compare it with its checksums; what is damaged is removed. Exit code 1: some was."""
    from penstock.engine.kept_folder import verify as verify_folder

    found = verify_folder(_path(cache_dir))
    if json:
        print(found.model_dump_json(indent=2))
    else:
        progress_console().print(f"{found.slabs:,} slabs read, {len(found.damaged):,} damaged and removed.")
    raise typer.Exit(EXIT_DOES_NOT_FIT if found.damaged else 0)


@cache.command()
def clear(
    model: Annotated[str | None, typer.Argument(help="One model alone, by its name or id.", metavar="MODEL")] = None,
    cache_dir: Folder = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove what is kept of a model, or of all, after a question. Conversations stay."""
    from penstock.engine.kept_folder import clear as clear_folder
    from penstock.engine.kept_folder import listed

    path = _path(cache_dir)
    if not yes:
        num_bytes = sum(kept.bytes for kept in listed(path).models if model in (None, kept.model, kept.id))
        typer.confirm(f"Remove {num_bytes / MB:,.1f} MB of keys and values from {path}?", abort=True, err=True)
    progress_console().print(f"{clear_folder(path, model) / MB:,.1f} MB are free again.")
