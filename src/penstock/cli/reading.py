"""`run` and `chat`: progress on stderr, text on stdout, Ctrl-C that stops within a chunk."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.cli.report import RunReport
from penstock.cli.terminal import EXIT_INTERRUPTED, EXIT_OK, MB, Interrupt, ReadingBar, ask_user
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.feed import TokenFeed
from penstock.engine.loading import load_model
from penstock.engine.media_prompts import refuse_media
from penstock.errors import PenstockError
from penstock.lanes.media_processor import open_image
from penstock.prompt.source import TextPart
from penstock.request import Finished, Output, PrefillProgress, Token


def run_once(
    model: str,
    config: EngineConfig,
    parts: Sequence[TextPart],
    *,
    images: Sequence[str] = (),
    system: str | None,
    sampling: dict[str, Any],
    as_json: bool,
    trace: Path | None = None,
) -> int:
    console = Console(stderr=True, highlight=False)
    with _loaded(model, config, console, trace) as engine:
        prompt = _image_messages(parts, images, system) if images else engine.chat_feed(parts, system=system)
        request_id = engine.submit(prompt, **sampling)
        spans = engine.scheduler.sequences[request_id].request.atomic_spans
        output = _follow(engine, request_id, console, shows_text=not as_json)
        adjustments = [*prompt.adjustments] if isinstance(prompt, TokenFeed) else []
        plan = engine.plan(max(1, output.num_prompt_tokens), spans)
        adjustments += plan.adjustments
        if as_json:
            print(RunReport.of(model, engine.lane, plan, adjustments, output).to_json())
        else:
            for adjustment in adjustments:
                console.print(f"adjusted: {adjustment}", style="yellow")
            _summarize(console, output)
    return EXIT_INTERRUPTED if output.finish_reason == "abort" else EXIT_OK


def run_chat(
    model: str,
    config: EngineConfig,
    parts: Sequence[TextPart],
    *,
    images: Sequence[str] = (),
    system: str | None,
    sampling: dict[str, Any],
    trace: Path | None = None,
) -> int:
    """Files and images belong to the first message."""
    console = Console(stderr=True, highlight=False)
    document = "\n\n".join("".join(part.pieces()) for part in parts)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    shown: list[dict[str, Any]] = [{"type": "image", "image": open_image(image, name="image")} for image in images]
    with _loaded(model, config, console, trace) as engine:
        if engine.model.media is None:
            refuse_media((), images, engine.lane.id)
        console.print(f"{model} on {engine.lane.id}. An empty line or Ctrl-D ends the chat.", style="dim")
        while text := ask_user(console):
            content = f"{document}\n\n{text}" if document else text
            with_images = [*shown, {"type": "text", "text": content}]
            messages.append({"role": "user", "content": with_images if shown else content})
            try:
                request_id = engine.submit(messages, **sampling)
            except PenstockError as error:
                console.print(f"penstock: {error}", style="red")
                messages.pop()
                continue
            document, shown = "", []
            output = _follow(engine, request_id, console, shows_text=True)
            _summarize(console, output)
            messages.append({"role": "assistant", "content": output.text})
    return EXIT_OK


def _image_messages(parts: Sequence[TextPart], images: Sequence[str], system: str | None) -> list[dict[str, Any]]:
    """One user message: what files hold, the images, and then the text."""
    is_question = [part.text is not None for part in parts]
    texts = [{"type": "text", "text": "".join(part.pieces())} for part in parts]
    content = [
        *(text for text, asks in zip(texts, is_question, strict=True) if not asks),
        *({"type": "image", "image": image} for image in images),
        *(text for text, asks in zip(texts, is_question, strict=True) if asks),
    ]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": content}]


@contextmanager
def _loaded(model: str, config: EngineConfig, console: Console, trace: Path | None) -> Generator[Engine]:
    with console.status(f"loading {model}"):
        engine = Engine(load_model(model, config), config, trace=trace)
    try:
        yield engine
    finally:
        engine.close()
    if trace is not None:
        console.print(f"The trace is in {trace}; `penstock trace {trace}` explains it.", style="dim", soft_wrap=True)


def _follow(engine: Engine, request_id: int, console: Console, *, shows_text: bool) -> Output:
    """Shows the request until it ends or is interrupted; its output either way."""
    bar = ReadingBar(console)
    output: Output | None = None
    with Interrupt().watching() as interrupt:
        try:
            for event in engine.events(request_id):
                if isinstance(event, PrefillProgress):
                    bar.update(event)
                elif isinstance(event, Token):
                    bar.close()
                    if shows_text and event.text:
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                elif isinstance(event, Finished):
                    output = event.output
                if interrupt.is_requested:
                    engine.abort(request_id)
        finally:
            bar.close()
    assert output is not None
    if shows_text:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return output


def _summarize(console: Console, output: Output) -> None:
    if output.finish_reason == "abort":
        where = f"{output.num_computed_tokens:,} prompt tokens read, {len(output.token_ids)} written"
        console.print(f"Stopped: {where}.", style="yellow")
        return
    cached = f" ({output.num_cached_tokens:,} of them cached)" if output.num_cached_tokens else ""
    chunks = "1 chunk" if len(output.chunks) == 1 else f"{len(output.chunks)} chunks"
    console.print(
        f"read {output.num_prompt_tokens:,} tokens{cached} in {chunks}, "
        f"{output.prefill_s:.1f} s, {output.prefill_tokens_per_s:,.0f} tok/s; "
        f"wrote {len(output.token_ids)}, {output.decode_tokens_per_s:,.1f} tok/s; "
        f"peak {output.peak_bytes / MB:,.0f} MB (predicted {output.predicted_peak_bytes / MB:,.0f})",
        style="dim",
    )
