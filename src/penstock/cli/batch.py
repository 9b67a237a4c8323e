"""`penstock batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from penstock.batch.answers import AnswerFile
from penstock.batch.lines import lines_of
from penstock.batch.run import Batch, BatchCounts
from penstock.cli.flags import Json, Model, TraceFile
from penstock.cli.settings import ENGINE, engine_config, given, with_settings
from penstock.cli.terminal import EXIT_INTERRUPTED, duration, progress_console
from penstock.config import DEFAULT_MODEL, EngineConfig
from penstock.errors import InvalidPrompt, InvalidSetting
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from rich.console import Console

EXIT_SOME_FAILED = 3
WAITING_SHARE = 2  # requests per one that runs: those that wait are there when it ends
DEFAULTS = ("max_tokens", "temperature", "seed")


@with_settings({"trace": (*DEFAULTS, *ENGINE, "max_running")}, max_tokens=None, temperature=None)
def batch(
    source: Annotated[str, typer.Argument(help="A JSONL file of requests, or - for standard input.", metavar="IN")],
    answers: Annotated[Path, typer.Argument(help="The JSONL file of answers; an unfinished one is continued.")],
    model: Model = DEFAULT_MODEL,
    trace: TraceFile = None,
    json: Json = False,
    **settings: Any,
) -> None:
    """Answer a file of requests: OpenAI's batch lines, bodies of requests, or texts; one JSON value a line."""
    config = dataclasses.replace(engine_config(settings), max_waiting=None, max_waiting_tokens=None)
    defaults = given({name: settings[name] for name in DEFAULTS})
    try:
        from penstock.server.app import make_app
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"Batches need {error.name}. Install penstock[serve].") from None
    console, began = progress_console(), time.perf_counter()
    with _opened(source, answers) as file:
        written = AnswerFile(answers)
        try:
            app = make_app(ServerSettings(model=model, trace=trace), config)
            with _shown(file, written, console) as watch:
                counts = asyncio.run(_answered(app, file, written, {"model": model} | defaults, config, watch))
        except KeyboardInterrupt:
            console.print("Stopped. The same command goes on where this one ended.", style="dim", soft_wrap=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        finally:
            written.close()
    _tell(counts, written, time.perf_counter() - began, console, as_json=json)
    raise typer.Exit(EXIT_SOME_FAILED if written.num_failed else 0)


@contextmanager
def _opened(source: str, answers: Path) -> Generator[BinaryIO]:
    if source == "-":
        yield sys.stdin.buffer
        return
    path = Path(source)
    if answers.exists() and path.exists() and answers.samefile(path):
        raise InvalidSetting(f"{path} is named for the requests and for the answers. Name two files.")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidPrompt(f"{path} cannot be read: {error.strerror}. Give the path of a JSONL file.") from None
    with file:
        yield file


async def _answered(
    app: FastAPI,
    file: BinaryIO,
    answers: AnswerFile,
    defaults: Mapping[str, Any],
    config: EngineConfig,
    watch: Callable[[BatchCounts], None],
) -> BatchCounts:
    """Runs the routes of the server in this process, without a port."""
    from penstock.server.inside import post_inside

    async with app.router.lifespan_context(app):
        await app.state.loading
        most = WAITING_SHARE * config.max_running
        running = Batch(partial(post_inside, app), answers, defaults=defaults, most_at_once=most, watch=watch)
        await running.run(lines_of(file))
        return running.counts


@contextmanager
def _shown(file: BinaryIO, answers: AnswerFile, console: Console) -> Generator[Callable[[BatchCounts], None]]:
    """A bar over the bytes of the requests, with the time left; nothing where nobody looks."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    what, told = TextColumn("answering"), TextColumn("{task.description}")
    columns = (what, BarColumn(bar_width=None), told, TimeRemainingColumn())
    with Progress(*columns, console=console, expand=True, transient=True, disable=not console.is_terminal) as bar:
        num_bytes = Path(file.name).stat().st_size if isinstance(file.name, str) and file.name != "<stdin>" else None
        task = bar.add_task("loading the model", total=num_bytes)

        def watch(counts: BatchCounts) -> None:
            failed = f", {answers.num_failed:,} failed" if answers.num_failed else ""
            told = f"{counts.num_lines + counts.num_skipped:,} lines{failed}, {counts.written_tokens:,} tokens written"
            bar.update(task, completed=counts.num_bytes, description=told)

        yield watch


def _tell(counts: BatchCounts, answers: AnswerFile, seconds: float, console: Console, *, as_json: bool) -> None:
    if as_json:
        from pydantic_core import to_json

        found = dataclasses.asdict(counts) | {"num_failed": answers.num_failed, "seconds": seconds}
        print(to_json(found).decode())
        return
    before = f" ({counts.num_skipped:,} were answered before)" if counts.num_skipped else ""
    failed = f"; {answers.num_failed:,} failed: see their lines in {answers.path}" if answers.num_failed else ""
    console.print(
        f"answered {counts.num_lines:,} lines{before} in {duration(seconds)}{failed}; read {counts.prompt_tokens:,} "
        f"tokens, {counts.cached_tokens:,} of them from the cache; wrote {counts.written_tokens:,}, "
        f"{counts.written_tokens / seconds:,.1f} tok/s",
        style="dim",
        soft_wrap=True,
    )
