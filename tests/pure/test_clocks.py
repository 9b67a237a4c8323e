"""No test watches the clock: read from the tests, as a busy machine would find out.

What a clock gives may be handed to the product, and be waited for with `within`; no assertion may compare it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))
CLOCKS = {"perf_counter", "monotonic", "time", "process_time", "thread_time", "clock_gettime", "default_timer", "now"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
# What gives a reading back, or something made of readings, when it is called with them.
PASSING = {
    "abs",
    "append",
    "float",
    "int",
    "list",
    "max",
    "mean",
    "median",
    "min",
    "pairwise",
    "round",
    "sorted",
    "sum",
}
WAITS = "hang_bound.py"  # where waiting is bounded, and the only place that sleeps
LEAST_BOUND_S = 30


def is_clock(node: ast.AST) -> bool:
    """A call such as time.perf_counter(), or perf_counter()."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Attribute):
        owner = called.value
        return called.attr in CLOCKS and isinstance(owner, ast.Name) and owner.id in {"time", "timeit", "datetime"}
    return isinstance(called, ast.Name) and called.id in CLOCKS - {"time", "now"}


def names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def bindings(tree: ast.AST) -> Iterator[tuple[set[str], ast.AST]]:
    """(names, what flows into them) of assignments, loops, appended values, and what a function gives back."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield set().union(*(names_in(target) for target in node.targets)), node.value
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            yield names_in(node.target), node.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            yield names_in(node.target), node.iter
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            yield names_in(node.func.value), node
        elif isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, (ast.Return, ast.Yield)) and inner.value is not None:
                    yield {node.name}, inner.value


def timed_names(tree: ast.AST) -> set[str]:
    """Names that hold a reading of a clock, or something computed from one."""
    timed: set[str] = set()
    flows = list(bindings(tree))
    while True:
        more = {name for names, value in flows if is_timed(value, timed) for name in names} - timed
        if not more:
            return timed
        timed |= more


def is_timed(node: ast.AST, timed: set[str]) -> bool:
    if is_clock(node) or (isinstance(node, ast.Name) and node.id in timed):
        return True
    if isinstance(node, ast.Call) and called_name(node) not in PASSING:
        return is_timed(node.func, timed)  # what it does with a reading is its own affair
    return any(is_timed(inner, timed) for inner in ast.iter_child_nodes(node))


def called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def watched_clocks(source: str) -> list[str]:
    """The assertions of a file that compare a reading of a clock."""
    tree = parsed(source)
    timed = timed_names(tree)
    compared = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        for inner in ast.walk(node.test)
        if isinstance(inner, ast.Compare) and is_timed(inner, timed)
    ]
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in compared]


def short_waits(source: str) -> list[str]:
    """Sleeps, and bounds that a busy machine could reach."""
    found = []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.Call):
            continue
        name = called_name(node)
        bounds = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "timeout_s")]
        bounds += node.args[:1] if name in ("within", "settimeout") else []
        is_short = any(isinstance(b, ast.Constant) and b.value is not None and b.value < LEAST_BOUND_S for b in bounds)
        is_pause = name == "sleep" and not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
        if is_short or is_pause:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_no_assertion_compares_a_clock(name):
    assert watched_clocks((TESTS / name).read_text()) == []


@pytest.mark.parametrize("name", [name for name in SOURCES if name != WAITS])
def test_nothing_sleeps_or_waits_for_a_short_time(name):
    assert short_waits((TESTS / name).read_text()) == []


@pytest.mark.parametrize(
    "program",
    [
        "began = time.monotonic()\nassert time.monotonic() - began < 8",
        "import time\nassert 3 > time.perf_counter()",
        "def seconds():\n    began = perf_counter()\n    return perf_counter() - began\nassert max(seconds(), 1) < 3",
        "times = []\non_step = lambda: times.append(time.perf_counter())\ngaps = [b - a for a, b in pairwise(times)]\n"
        "assert max(gaps) < 0.5",
        "ended_s = time.time() - began_s\nassert found, ended_s\nassert 0 < ended_s <= 5",
    ],
)
def test_a_comparison_with_a_clock_is_found(program):
    assert len(watched_clocks(program)) == 1


def test_what_only_hands_a_reading_on_is_no_comparison():
    assert watched_clocks("run(arrived_at=time.perf_counter())\nassert output.ttft_s > 0") == []


@pytest.mark.parametrize("program", ["time.sleep(0.1)", "asyncio.sleep(pause)", "wait(timeout=5)", "within(3, holds)"])
def test_a_short_wait_is_found(program):
    assert len(short_waits(program)) == 1


def test_giving_way_to_others_is_no_wait():
    assert short_waits("asyncio.sleep(0)\nwithin(60, holds)\nrun(timeout=HANG_S)\nrun(timeout=None)") == []
