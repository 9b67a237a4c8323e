"""`penstock chat`: a conversation with a model in this process, or with one that a server runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.conversation import Conversation, Message
from penstock.cli.flags import Images, Model, System, TraceFile, opened
from penstock.cli.session import read_messages, write_messages
from penstock.cli.settings import ENGINE, SAMPLING, engine_config, sampling_settings, with_settings
from penstock.cli.terminal import progress_console, system_messages
from penstock.config import DEFAULT_MODEL, EngineConfig
from penstock.errors import InvalidSetting, reads_text_only

if TYPE_CHECKING:
    from rich.console import Console

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
    session: Annotated[
        str | None, typer.Option(help="Go on with the conversation of that name, or begin it; it is kept.")
    ] = None,
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
        if session is not None:
            raise InvalidSetting("--session is for a model in this process; with a server use /save and /load.")
        from penstock.cli.remote import RemoteModel

        remote = RemoteModel(url, api_key, sampling, console)
        talk = Conversation(
            console, remote.answer, model=remote.name, messages=system_messages(system), document=document
        )
        talk.run(f"{remote.name} at {url}")
        return
    from penstock.cli.reading import follow, loaded, reading_ahead, summarize

    if images:
        _require_pictures(images)
    config, before, keep = _session(console, config, session, model, system)
    with loaded(model, config, console, trace) as engine:

        def why_no_images() -> Any:
            facts = engine.lane
            return None if facts.reads_images else reads_text_only(1, facts.id, facts.why_text_only)

        if images and (why := why_no_images()) is not None:
            raise why

        def answer(messages: list[Message]) -> str:
            output = follow(engine, engine.submit(messages, **sampling), console)
            summarize(console, output, memory=config.memory, max_tokens=sampling["max_tokens"], disk=engine.disk_use)
            return output.text

        talk = Conversation(
            console,
            answer,
            model=model,
            messages=before,
            document=document,
            images=[str(Path(image).resolve()) for image in images or ()],
            # Where prefixes are not shared, nothing read ahead would be kept.
            read_ahead=partial(reading_ahead, engine) if engine.lane.shares_prefixes else None,
            keep=keep,
            why_no_images=why_no_images,
        )
        talk.run(f"{model} on {engine.lane.id}")


def _require_pictures(paths: Sequence[str]) -> None:
    """Refuses what is no picture before a model is loaded."""
    from penstock.foreign.processor import open_image

    for path in paths:
        open_image(path, name="image")


def _session(
    console: Console, config: EngineConfig, name: str | None, model: str, system: str | None
) -> tuple[EngineConfig, list[Message], Any]:
    """Finds (the settings with a folder, the messages so far, what keeps them); None keeps nothing."""
    messages = system_messages(system)
    if name is None:
        return config, messages, None
    from penstock.engine.kept_folder import folder_of, keep_session, session_path

    config = replace(config, cache_dir=str(folder_of(config)))
    path = session_path(config, name)
    if path.exists():
        before = read_messages(path)
        if system is not None and before[:1] != messages:
            raise InvalidSetting(f"The session {name!r} has another system message. Leave --system out.")
        messages = before
        console.print(f"The session {name} has {len(messages)} messages.", style="dim", markup=False)

    def keep(messages: list[Message]) -> None:
        write_messages(path, model, messages, partial(keep_session, config, name))

    return config, messages, keep
