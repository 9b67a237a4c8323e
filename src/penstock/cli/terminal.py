"""What a person at a terminal sees and does: a progress bar, a question, Ctrl-C. No torch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from penstock.request import PrefillProgress

EXIT_OK, EXIT_INTERRUPTED = 0, 130
MB = 1e6
PIPE_COLUMNS = 200


class Interrupt:
    """The first Ctrl-C asks to stop at the next chunk; a second one ends the process at once."""

    def __init__(self) -> None:
        self.is_requested = False

    @contextmanager
    def watching(self) -> Generator[Interrupt]:
        previous = signal.signal(signal.SIGINT, self._request)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)

    def _request(self, number: int, frame: object) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


class ReadingBar:
    """Tokens done, tokens/s, ETA, memory now and predicted peak; on stderr."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("reading"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[done]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[memory]}"),
            console=console,
            expand=True,
            transient=True,
        )
        self._task: Any = None

    def update(self, event: PrefillProgress) -> None:
        about = "" if event.num_total is not None else "~"
        self.show(
            total=event.num_total_estimate,
            completed=event.num_computed,
            done=f"{event.num_computed:,}/{about}{event.num_total_estimate:,} tokens",
            speed=f"{event.tokens_per_s:,.0f} tok/s, {duration(event.eta_s)} left",
            memory=f"{event.memory_bytes / MB:,.0f} MB of {event.predicted_peak_bytes / MB:,.0f}",
        )

    def show(self, *, total: int, completed: int, done: str, speed: str, memory: str) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("reading", done="", speed="", memory="", total=None)
        self._progress.update(
            self._task, total=total, completed=completed, refresh=True, done=done, speed=speed, memory=memory
        )

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()
            self._task = None


def report_console() -> Console:
    """For tables and findings: in a file or a pipe no number is cut to the width of a terminal that is not there."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def ask_user(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
