import pytest
from rich.table import Table

from penstock.cli.terminal import report_console


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
