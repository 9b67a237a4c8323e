"""`penstock run`: files and a question in, the answer out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags import Images, Json, Model, System, TraceFile, opened, piped_input
from penstock.cli.hints import refuse_text_for_model
from penstock.cli.settings import ENGINE, SAMPLING, engine_config, sampling_settings, with_settings
from penstock.cli.terminal import EXIT_INTERRUPTED, EXIT_OK, progress_console, system_messages
from penstock.config import DEFAULT_MODEL
from penstock.errors import InvalidPrompt, InvalidSetting

if TYPE_CHECKING:
    from penstock.prompt.source import TextPart


@with_settings({"system": ENGINE, "json": SAMPLING})
def run(
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The question or instruction.")] = None,
    files: Annotated[
        list[str] | None, typer.Option("-f", "--file", help="A text file, or - for standard input; may be repeated.")
    ] = None,
    images: Images = None,
    system: System = None,
    trace: TraceFile = None,
    json: Json = False,
    **settings: Any,
) -> None:
    """Read files and a question, and write the answer. Files and images come first, then the text, in one message."""
    config, sampling = engine_config(settings), sampling_settings(settings)
    if sampling["logprobs"] is not None and not json:
        raise InvalidSetting("--logprobs are shown in the JSON document only. Add --json.")
    refuse_text_for_model(model)
    parts, console = opened(files, prompt), progress_console()
    if "-" not in (names := files or []):
        parts[len(names) : len(names)] = piped_input(console, is_wanted=not names)
    if not parts:
        raise InvalidPrompt("There is nothing to read. Give -p TEXT, -f FILE, or -f - for standard input.")
    from penstock.cli.reading import follow, loaded, summarize, tell_adjusted
    from penstock.cli.report import RunReport

    with loaded(model, config, console, trace) as engine:
        asked = _image_messages(parts, images, system) if images else engine.chat_feed(parts, system=system)
        request = engine.submit(asked, **sampling)
        before = request.plan.adjustments
        if not json:
            tell_adjusted(console, before)
        output = follow(engine, request, console, shows_text=not json)
        plan = request.plan
        if json:
            print(RunReport.of(model, engine.lane, plan, output, memory=config.memory, disk=engine.disk_use).to_json())
        else:
            tell_adjusted(console, [adjustment for adjustment in plan.adjustments if adjustment not in before])
            summarize(console, output, memory=config.memory, max_tokens=sampling["max_tokens"], disk=engine.disk_use)
    raise typer.Exit(EXIT_INTERRUPTED if output.finish_reason == "abort" else EXIT_OK)


def _image_messages(parts: Sequence[TextPart], images: Sequence[str], system: str | None) -> list[dict[str, Any]]:
    """One user message: what files hold, the images, and then the text."""
    content = [{"type": "text", "text": "".join(part.pieces())} for part in parts]
    num_files = sum(part.text is None for part in parts)
    content[num_files:num_files] = [{"type": "image", "image": image} for image in images]
    return [*system_messages(system), {"role": "user", "content": content}]
