"""The command line: every command is a file of its own, and imports what is heavy when it is called."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.batch import batch
from penstock.cli.bench import bench
from penstock.cli.cache import cache
from penstock.cli.chat import chat
from penstock.cli.doctor import doctor
from penstock.cli.hints import HintedCommand
from penstock.cli.models import models
from penstock.cli.plan import plan
from penstock.cli.run import run
from penstock.cli.serve import serve
from penstock.cli.terminal import EXIT_INTERRUPTED, EXIT_REFUSED, shown_at
from penstock.cli.trace import trace
from penstock.errors import PenstockError

app = typer.Typer(
    name="penstock",
    help="Read long prompts into language models in bounded memory, exactly, without stalling anyone else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.add_typer(models, name="models")
app.add_typer(cache, name="cache")
for command in (run, chat, serve, batch, plan, doctor, trace):
    app.command(cls=HintedCommand)(command)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def main() -> None:
    atexit.register(gc.freeze)  # what ends with the process need not be looked through for garbage first
    try:
        app(standalone_mode=True)
    except PenstockError as error:
        typer.echo(f"penstock: {shown_at(sys.stderr, str(error))}", err=True)
        sys.exit(EXIT_REFUSED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; there is nobody to tell
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(
            "penstock: No space is left on the device that this writes to. Make room, or write elsewhere.", err=True
        )
        os._exit(EXIT_REFUSED)  # what standard output still holds cannot be written either


if __name__ == "__main__":
    main()
