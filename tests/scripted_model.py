"""A folder with a tiny model and a script for it, and the server that plays the script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server_process import ServerProcess, serving
from tiny_chat_model import TEMPLATE, save_tiny_chat_model

PLAYER = str(Path(__file__).with_name("scripted_server.py"))


def call(function: str, **arguments: object) -> str:
    """A call as the template of the tiny chat model asks for it."""
    return f"<tool_call>\n{json.dumps({'name': function, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def playing(
    folder: Path,
    script: list[str] | dict[str, list[str]],
    *flags: str,
    template: str = TEMPLATE,
    is_hybrid: bool = False,
) -> Iterator[ServerProcess]:
    model = folder / "tiny"
    model.mkdir()
    save_tiny_chat_model(model, template, max_tokens=32768, is_hybrid=is_hybrid)
    (folder / "script.json").write_text(json.dumps(script))
    program = [PLAYER, str(folder / "script.json")]
    with serving(str(model), "--dtype", "float32", "--memory", "2GiB", *flags, program=program) as server:
        yield server
