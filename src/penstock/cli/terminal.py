"""What a person at a terminal sees: progress and text, a table; and Ctrl-C. No torch."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

EXIT_OK, EXIT_DOES_NOT_FIT, EXIT_REFUSED, EXIT_INTERRUPTED = 0, 1, 2, 130
PIPE_COLUMNS = 200
# Characters that move a cursor, colour a screen or set its title: a document may make a model write them.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
BAR_COLUMNS = 20  # left to the word before the bar and to the bar itself


class ShownAnswer:
    """An answer on its way: a bar of what was read on stderr, then its text on stdout.

    The first Ctrl-C asks to stop at the next chunk; a second one ends the process at once.
    """

    def __init__(self, console: Console, *, shows_text: bool = True) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = TextColumn("reading"), BarColumn(bar_width=None), TextColumn("{task.description}")
        self._bar = Progress(*columns, console=console, expand=True, transient=True)
        self._most_letters = console.width - BAR_COLUMNS
        self._task: TaskID | None = None
        self._shows_text = shows_text
        self.is_interrupted = False
        self.text = ""

    def __enter__(self) -> ShownAnswer:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        self._close_bar()
        signal.signal(signal.SIGINT, self._before)
        if self._shows_text and kind is None:
            print(flush=True)

    def read(self, num_tokens: int, num_total: int | None, told: Sequence[str]) -> None:
        """Shows how much was read, by the bar and in words, the first ones first where there is little room.

        `num_total`: None where nothing can be said yet but that it is being done.
        """
        if not self._bar.console.is_terminal:
            return  # nothing moves there
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        words = told[0]
        for more in told[1:]:
            words += f", {more}" if len(words) + len(more) + 2 <= self._most_letters else ""
        self._bar.update(self._task, total=num_total, completed=num_tokens, description=words, refresh=True)

    def write(self, text: str) -> None:
        self._close_bar()
        self.text += text
        if self._shows_text and text:
            print(shown_at(sys.stdout, text), end="", flush=True)

    def _close_bar(self) -> None:
        if self._task is not None:
            self._bar.stop()
            self._task = None

    def _interrupt(self, number: int, frame: object) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        self.is_interrupted = True


def shown_at(output: TextIO, text: str) -> str:
    """Marks what a terminal would obey; a file or a pipe gets the text as it is."""
    return text.translate(CONTROLS) if output.isatty() else text


@contextmanager
def importing() -> Generator[None]:
    """Imports what stays, without looking for garbage among it then or later: a fifth of a start is spent on that."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def progress_console() -> Console:
    """Makes the console of progress and remarks, on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else PIPE_COLUMNS)


def report_console(*, stderr: bool = False) -> Console:
    """Makes the console of tables and findings: in a file or a pipe no number is cut to a width that is not there."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def table_of(title: str | None, names: Iterable[str], numbers: Iterable[str]) -> Table:
    """Makes an empty table: columns of names at the left, of numbers at the right."""
    from rich.table import Table

    table = Table(*names, title=title, title_justify="left")
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def system_messages(system: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []


def in_lines(parts: Iterable[str], width: int) -> str:
    """Joins parts with semicolons; a line that is too long for them ends between two of them, not within one."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f"; {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
