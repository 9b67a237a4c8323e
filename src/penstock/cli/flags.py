"""The flags that several commands have and that are no settings, each described once."""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import InvalidMedia, InvalidSetting

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.prompt.source import TextPart

INPUT_WAIT_S = 5  # for the first byte of a pipe that no flag names
PEERS = ("transformers", "llama.cpp")


def _require_trace(path: Path | None) -> Path | None:
    """Refuses a file that cannot be written before a model is loaded, not after it has run."""
    if path is None:
        return None
    from penstock.trace.document import require_writable

    return require_writable(path)


def _require_images(names: list[str] | None) -> list[str] | None:
    if missing := next((name for name in names or () if not Path(name).is_file()), None):
        raise InvalidMedia(f"The image {missing} does not exist. Check the path.")
    return names


Model = Annotated[str, typer.Argument(help="smollm2, a folder, a .gguf file or a hub id.", metavar="MODEL")]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace", callback=_require_trace, help="Write every step and request to this file; `penstock trace` reads it."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", callback=_require_images, help="A picture, for a model that reads them; may be repeated."),
]
System = Annotated[str | None, typer.Option(help="System message.")]
Peers = Annotated[str, typer.Option(help="Measured beside: transformers, llama.cpp, or both with a comma between.")]
LlamaPython = Annotated[
    str | None,
    typer.Option(help="A Python that has llama-cpp-python; this one unless given.", envvar="PENSTOCK_PEER_PYTHON"),
]


def opened(files: list[str] | None, text: str | None = None) -> list[TextPart]:
    """Makes a part of every file, and of the text behind them; a file that cannot be read is refused."""
    from penstock.prompt.source import TextPart

    names = files or []
    if names.count("-") > 1:
        raise InvalidSetting("Standard input was named twice (-f -); it can be read once.")
    parts = [
        TextPart(stream=sys.stdin.buffer, name="standard input") if name == "-" else TextPart.of_file(Path(name))
        for name in names
    ]
    return parts if text is None else [*parts, TextPart.of_text(text)]


def piped_input(console: Console, *, is_wanted: bool) -> list[TextPart]:
    """Opens standard input where it is a pipe or a file with something to read, and says so; else there is no part.

    `is_wanted`: no file was named. A pipe that is neither written to nor closed, as some programs are started with,
    is waited for only so long.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # there is none, or it was closed
        return []
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return []
    is_silent = not select.select([sys.stdin], [], [], INPUT_WAIT_S if is_wanted else 0)[0]
    if not is_silent and not sys.stdin.buffer.peek(1):  # ty: ignore[missing-union-attribute]
        return []
    if is_wanted and is_silent:
        told = f"Standard input gave nothing for {INPUT_WAIT_S} s and is not read; -f - waits for it."
    elif is_wanted:
        told = "Reading standard input, as with -f -."
    else:
        told = "" if is_silent else "Standard input is not read beside files; -f - adds it."
    if told:
        console.print(told, style="dim", soft_wrap=True)
    return opened(["-"]) if is_wanted and not is_silent else []


def chosen(flag: str, names: list[str] | None, known: tuple[str, ...]) -> list[str]:
    """Takes all of them unless some are named."""
    for name in names or []:
        if name not in known:
            raise InvalidSetting(f"{flag} is {name!r}; it must be one of {', '.join(known)}.")
    return list(dict.fromkeys(names or known))


def chosen_peers(peers: str) -> tuple[str, ...]:
    names = [name.strip() for name in peers.split(",") if name.strip()]
    return tuple(chosen("--peers", names, PEERS)) if names else ()
