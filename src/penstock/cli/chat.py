"""`penstock chat`: a conversation with a model in this process, or with one that a server runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from penstock.cli.flags import Images, Model, System, TraceFile, opened
from penstock.cli.settings import ENGINE, SAMPLING, engine_config, sampling_settings, with_settings
from penstock.cli.terminal import converse, progress_console
from penstock.config import DEFAULT_MODEL
from penstock.errors import InvalidSetting, reads_text_only

NOT_IN_A_CHAT = ("frequency_penalty", "presence_penalty", "stop", "logprobs")
CHAT_SAMPLING = tuple(name for name in SAMPLING if name not in NOT_IN_A_CHAT)


@with_settings({"api_key": ENGINE, "trace": CHAT_SAMPLING}, max_tokens=512)
def chat(
    model: Model = DEFAULT_MODEL,
    files: Annotated[
        list[str] | None, typer.Option("-f", "--file", help="A text file that the first message begins with.")
    ] = None,
    images: Images = None,
    system: System = None,
    url: Annotated[str | None, typer.Option(help="Talk to a server, such as http://127.0.0.1:8000.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="PENSTOCK_API_KEY")] = None,
    trace: TraceFile = None,
    **settings: Any,
) -> None:
    """Talk with a model. What was read before is not read again."""
    config, sampling = engine_config(settings), sampling_settings(settings)
    if files and "-" in files:
        raise InvalidSetting("In a chat standard input is the conversation. Give a file instead of -.")
    document = "\n\n".join("".join(part.pieces()) for part in opened(files))
    console = progress_console()
    if url is not None:
        if trace is not None:
            raise InvalidSetting("--trace is for a model in this process; a server has its own at /trace.")
        from penstock.cli.remote import RemoteModel

        remote = RemoteModel(url, api_key, sampling, console)
        converse(console, remote.answer, who=f"{remote.name} at {url}", system=system, document=document)
        return
    from penstock.cli.reading import follow, loaded, reading_ahead, summarize

    shown = _opened_images(images) if images else []
    with loaded(model, config, console, trace) as engine:
        if shown and not engine.lane.reads_images:
            raise reads_text_only(len(shown), engine.lane.id, engine.lane.why_text_only)

        def answer(messages: list[dict[str, Any]]) -> str:
            output = follow(engine, engine.submit(messages, **sampling), console)
            summarize(console, output, memory=config.memory, max_tokens=sampling["max_tokens"])
            return output.text

        who = f"{model} on {engine.lane.id}"
        # A picture stands before the document; where prefixes are not shared, nothing read ahead would be kept.
        ahead = partial(reading_ahead, engine) if engine.lane.shares_prefixes and not shown else None
        converse(console, answer, who=who, system=system, document=document, images=shown, read_ahead=ahead)


def _opened_images(paths: Sequence[str]) -> list[dict[str, Any]]:
    from penstock.foreign.processor import open_image

    return [{"type": "image", "image": open_image(path, name="image")} for path in paths]
