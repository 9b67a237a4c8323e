"""A model in this process, as `run` and `chat` show it: progress on stderr, text on stdout."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console

from penstock.cli.terminal import ShownAnswer, duration, importing, in_lines
from penstock.config import MB, EngineConfig
from penstock.errors import PenstockError
from penstock.plan.memory import over_budget
from penstock.request import Finished, Output, PrefillProgress, Token

if TYPE_CHECKING:
    from penstock.engine.engine import DiskUse, Engine

LEAST_SAVED_S = 0.05  # that is worth a word
FIRST_CHUNK = ("the first chunk",)  # of which nothing is known before it ends


@contextmanager
def loaded(model: str, config: EngineConfig, console: Console, trace: Path | None) -> Generator[Engine]:
    with console.status(f"loading {model}"):  # importing torch is most of it, for a small model
        with importing():
            from penstock.engine.engine import Engine
            from penstock.engine.loading import load_model
        engine = Engine(load_model(model, config), trace=trace)
    try:
        yield engine
    finally:
        engine.close()
    if trace is not None:
        console.print(f"The trace is in {trace}; `penstock trace {trace}` explains it.", style="dim", soft_wrap=True)


def follow(engine: Engine, request_id: int, console: Console, *, shows_text: bool = True) -> Output:
    """Shows the request until it ends or is interrupted; its output either way."""
    output: Output | None = None
    with ShownAnswer(console, shows_text=shows_text) as shown:
        shown.read(0, None, FIRST_CHUNK)

        def read(event: PrefillProgress) -> None:
            shown.read(event.num_computed, event.num_total_estimate, _told(event))
            if shown.is_interrupted:
                engine.cancel(request_id)

        engine.on_layer = read
        try:
            for event in engine.events(request_id):
                if isinstance(event, PrefillProgress):
                    read(event)
                elif isinstance(event, Token):
                    shown.write(event.text)
                elif isinstance(event, Finished):
                    output = event.output
                if shown.is_interrupted:
                    engine.abort(request_id)
        finally:
            engine.on_layer = None
    assert output is not None
    return output


@contextmanager
def reading_ahead(engine: Engine, messages: list[dict[str, Any]]) -> Generator[None]:
    """Reads messages into the prefix cache in another thread, which stops within one chunk when the block ends.

    The engine belongs to that thread until then. What cannot be read is refused before the block.
    """
    request, is_over = engine.submit(messages, max_tokens=1), Event()

    def read() -> None:
        with suppress(PenstockError):  # which the question will meet too
            for _ in request.events():
                if is_over.is_set():
                    break

    thread = Thread(target=read, name="penstock-read-ahead")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        engine.abort(request)
        engine.give_back()  # what that thread freed, before another one takes as much


def _told(event: PrefillProgress) -> list[str]:
    about = "" if event.num_total is not None else "~"
    return [
        f"{event.num_computed:,}/{about}{event.num_total_estimate:,} tokens",
        f"{duration(event.eta_s)} left",
        f"{event.memory_bytes / MB:,.0f} MB of {event.predicted_peak_bytes / MB:,.0f}",
        f"{event.tokens_per_s:,.0f} tok/s",
    ]


def tell_adjusted(console: Console, adjustments: Iterable[str]) -> None:
    for adjustment in adjustments:
        console.print(f"adjusted: {adjustment}", style="yellow", markup=False, soft_wrap=True)


def summarize(
    console: Console, output: Output, *, memory: int | None, max_tokens: int, disk: DiskUse | None = None
) -> None:
    """Prints what was done, by how much the budget was exceeded (None: none was given), and what cut the answer."""
    if over := over_budget(output.peak_bytes, memory):
        console.print(f"over budget: {over}. Raise it, or lower --chunk-size.", style="yellow", soft_wrap=True)
    if output.finish_reason == "abort":
        where = f"{output.num_computed_tokens:,} prompt tokens read, {len(output.token_ids)} written"
        console.print(f"Stopped: {where}.", style="yellow")
        return
    cached = f" ({output.num_cached_tokens:,} of them cached)" if output.num_cached_tokens else ""
    if output.hits.disk and disk is not None:
        saved = f", {disk.saved_s:.1f} s saved" if disk.saved_s >= LEAST_SAVED_S else ""
        cached = f" ({output.num_cached_tokens:,} of them cached, {output.hits.disk:,} from disk{saved})"
    chunks = "1 chunk" if len(output.chunks) == 1 else f"{len(output.chunks)} chunks"
    # The first token is the reading's: one alone has no speed.
    rate = f", {output.decode_tokens_per_s:,.1f} tok/s" if len(output.token_ids) > 1 else ""
    told = (
        f"read {output.num_prompt_tokens:,} tokens{cached} in {chunks}, "
        f"{output.prefill_s:.1f} s, {output.prefill_tokens_per_s:,.0f} tok/s",
        f"wrote {len(output.token_ids)}{rate}",
        f"peak {output.peak_bytes / MB:,.0f} MB (predicted {output.predicted_peak_bytes / MB:,.0f})",
    )
    console.print(in_lines(told, console.width), style="dim")
    if output.finish_reason == "length":
        why = "--max-tokens" if len(output.token_ids) >= max_tokens else "the context or the memory budget is full"
        written = "1 token" if len(output.token_ids) == 1 else f"{len(output.token_ids):,} tokens"
        console.print(f"The answer was cut after {written}: {why}.", style="yellow")
