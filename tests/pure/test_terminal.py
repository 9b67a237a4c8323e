import gc
import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

import penstock
from penstock.cli.plan import show_chart
from penstock.cli.terminal import ShownAnswer, importing, in_lines, progress_console, report_console


@pytest.mark.parametrize("columns", [None, "", "80"])
def test_a_pipe_gets_every_digit_of_a_wide_table(columns, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    numbers = [f"{number:,}" for number in range(12_345_678, 12_345_688)]
    table = Table(*("written tok/s" for _ in numbers))
    table.add_row(*numbers)
    report_console().print(table)
    printed = capsys.readouterr().out
    assert [number for number in numbers if number not in printed] == []


TOLD = ["12,288/22,124 tokens", "0:31 left", "442 MB of 463", "812 tok/s"]


@pytest.mark.parametrize(("columns", "num_told"), [(100, 4), (80, 4), (60, 2), (40, 1)])
def test_the_bar_is_there_however_narrow_the_terminal_is(columns, num_told):
    shown = io.StringIO()
    with ShownAnswer(Console(file=shown, force_terminal=True, width=columns), shows_text=False) as answer:
        answer.read(12_288, 22_124, TOLD)
    printed = Text.from_ansi(shown.getvalue()).plain
    assert printed.count("━") >= 10
    assert [one in printed for one in TOLD] == [index < num_told for index in range(4)]


def test_a_bar_moves_before_anything_is_known():
    shown = io.StringIO()
    with ShownAnswer(Console(file=shown, force_terminal=True, width=60), shows_text=False) as answer:
        answer.read(0, None, ["the first chunk"])
        assert "the first chunk" in shown.getvalue()


def test_a_remark_in_a_pipe_is_not_cut_where_a_terminal_would_end(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    sentence = "read 2,247 tokens in 3 chunks, 1.4 s, 1,562 tok/s; wrote 5, 163.2 tok/s; peak 455 MB (predicted 471)"
    progress_console().print(sentence)
    assert capsys.readouterr().err == sentence + "\n"


def test_nothing_is_drawn_where_nothing_can_move():
    shown = io.StringIO()
    with ShownAnswer(Console(file=shown, width=100), shows_text=False) as answer:
        answer.read(0, None, ["the first chunk"])
        answer.read(12_288, 22_124, TOLD)
        answer.write("Done.")
    assert shown.getvalue() == ""


@pytest.mark.parametrize("columns", [100, 80, 60, 40])
def test_the_chart_of_a_plan_has_a_line_for_each_chunk_size(columns):
    shown, plan = io.StringIO(), penstock.plan("smollm2", prompt_tokens=6000, memory="1200MB")
    show_chart(Console(file=shown, width=columns), plan)
    rows = [line for line in shown.getvalue().splitlines() if "█" in line]
    assert [row.endswith(" MB") for row in rows] == [True] * len(plan.peak_by_chunk_size)
    assert max(map(len, rows)) <= columns


PARTS = ["read 650 tokens in 11 chunks, 5.1 s, 128 tok/s", "wrote 24, 26.2 tok/s", "peak 420 MB (predicted 434)"]


@pytest.mark.parametrize(("columns", "num_lines"), [(100, 1), (80, 2), (60, 2), (50, 2), (46, 3), (20, 3)])
def test_a_summary_breaks_between_what_it_says(columns, num_lines):
    lines = in_lines(PARTS, columns).split("\n")
    assert len(lines) == num_lines
    assert [part for line in lines for part in line.split("; ")] == PARTS


def test_what_is_imported_is_never_looked_through_for_garbage():
    collections, frozen = gc.get_stats()[2]["collections"], gc.get_freeze_count()
    try:
        with importing():
            assert [[index] for index in range(200_000)]
            assert gc.get_stats()[2]["collections"] == collections
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_cannot_move_the_cursor_of_a_terminal(is_terminal, monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr(printed, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", printed)
    written = "A\x1b]0;title\x07\r\x9b2Jé\tb\n"
    with ShownAnswer(Console(file=io.StringIO())) as answer:
        answer.write(written)
    assert printed.getvalue() == ("A\ufffd]0;title\ufffd\ufffd\ufffd2Jé\tb\n" if is_terminal else written) + "\n"
