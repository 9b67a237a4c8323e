"""Work in a process of its own: it answers, and what passes its bounds is ended and leaves nothing behind."""

import signal
from pathlib import Path

import pytest

from penstock.apart import Apart, Bounds
from penstock.errors import InvalidPrompt, InvalidSetting

BOUNDS = Bounds(cpu_s=0.5, max_bytes=256 << 20)


@pytest.fixture
def apart(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    asked = Apart("apart_work:answering", lambda: "given", bounds=BOUNDS, refusal=InvalidSetting("too much"))
    yield asked
    asked.close()


def test_nothing_is_started_before_somebody_asks(apart):
    assert apart._process is None


def test_one_process_answers_all_asks(apart):
    values = [1.5, "Ü\ud800\n", {"a": [None]}]
    assert [apart.ask(value) for value in values] == [["given", number, one] for number, one in enumerate(values, 1)]


def test_what_is_refused_there_is_raised_here_and_the_process_goes_on(apart):
    with pytest.raises(InvalidPrompt, match=r"^no$"):
        apart.ask("refuse")
    assert apart.ask(0) == ["given", 2, 0]


@pytest.mark.parametrize("way", ["spin", "eat"])
def test_what_takes_too_long_or_too_much_memory_is_ended_and_the_next_is_answered(apart, way):
    with pytest.raises(InvalidSetting, match=r"^too much$"):
        apart.ask(way)
    assert apart.ask(0) == ["given", 1, 0]


def test_a_process_that_ended_for_being_idle_is_started_again(apart):
    apart.ask(0)
    apart._process.send_signal(signal.SIGALRM)
    apart._process.wait()
    assert apart.ask(1) == ["given", 1, 1]


def test_what_breaks_is_no_refusal(apart):
    with pytest.raises(RuntimeError, match="apart_work:answering failed with 1"):
        apart.ask("break")
