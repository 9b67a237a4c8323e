"""Draws the picture of a terminal that the README shows: a real run, half-way and at its end, as an SVG.

Run it from the repository: .venv/bin/python scripts/terminal_picture.py [--columns N] [--show]
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import shlex
import struct
import sys
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from termios import TIOCSWINSZ

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "terminal.svg"
QUESTION = "What does the report recommend first?"
COMMAND = ["run", "-f", "examples/report.txt", "-p", QUESTION, "--memory", "500MB", "--chunk-size", "64"]
COMMAND += ["--max-tokens", "40"]
MOVES = re.compile(r"\r|\x1b\[\d*[AGJK]|\x1b\[\?25[lh]")  # of the cursor: what comes after stands over what was before


def recorded(command: list[str], columns: int) -> str:
    """Runs a command at a terminal of that width; returns everything that it printed there."""
    process, terminal = pty.fork()
    if process == 0:
        ioctl(0, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.chdir(ROOT)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(columns)}
        os.execv(sys.executable, [sys.executable, "-m", "penstock.cli.main", *command])
    printed = bytearray()
    try:
        while data := os.read(terminal, 65536):
            printed += data
    except OSError:  # the other side has closed
        pass
    os.waitpid(process, 0)
    return printed.decode()


def frames(printed: str) -> tuple[str, list[str]]:
    """Splits into (the bar when about half was read, the lines that stayed), with their colours."""
    parts = [part.strip("\n") for part in MOVES.split(printed)]
    bars = [part for part in parts if "reading" in part and " left" in part]
    after = printed[printed.rindex("reading") :]
    kept = [line.strip() for part in MOVES.split(after)[1:] for line in part.split("\n") if line.strip()]
    return bars[len(bars) // 2], kept


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--columns", type=int, default=100)
    asked.add_argument("--show", action="store_true", help="Print what was recorded and draw nothing.")
    arguments = asked.parse_args()
    bar, kept = frames(recorded(COMMAND, arguments.columns))
    lines = [f"$ penstock {shlex.join(COMMAND)}", bar, *kept]
    if arguments.show:
        print("\n".join(lines))
        return
    console = Console(record=True, width=arguments.columns, file=StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line))
    # Without its fonts, which a browser would have to fetch from elsewhere.
    format_ = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    PICTURE.write_text(console.export_svg(title="penstock", code_format=format_, unique_id="terminal"))


if __name__ == "__main__":
    main()
