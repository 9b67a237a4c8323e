"""Names and docstrings can be read on their own: one class per name, and no docstring that begins in mid-sentence."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
# "Of a step." says nothing without the name above it.
PREPOSITIONS = re.compile(
    "(about|above|across|after|against|along|among|around|as|at|before|behind|below|beside|between|by|during|for|from|in|"
    "inside|into|of|on|onto|outside|over|per|since|than|through|to|under|until|upon|via|where|with|within|without)\\b(?!-)",
    re.IGNORECASE,
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse((SOURCE / module).read_text())))


def begins_in_mid_sentence(docstring: str) -> bool:
    return docstring.startswith(("(", "The same")) or PREPOSITIONS.match(docstring) is not None


@pytest.mark.parametrize(
    ("docstring", "is_found"),
    [
        ("Of a step; 0: no limit.", True),
        ("With: what follows.", True),
        ("The same for a matrix.", True),
        ("(rows, slots) of the chunks.", True),
        ("Tells how many tokens a step may have.", False),
        ("In-flight tokens become computed ones.", False),
        ("Informs whoever waits.", False),
    ],
)
def test_what_begins_in_mid_sentence_is_found(docstring: str, is_found: bool) -> None:
    assert begins_in_mid_sentence(docstring) == is_found


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_do_not_begin_in_mid_sentence(module: str) -> None:
    docstrings = [ast.get_docstring(node) for node in nodes_of(module) if isinstance(node, Documented)]
    assert [text for text in docstrings if text and begins_in_mid_sentence(text)] == []


def test_no_two_classes_have_one_name() -> None:
    nodes = [node for module in MODULES for node in nodes_of(module)]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert names["Lane"] == 1  # the classes are seen
    assert [name for name, count in names.items() if count > 1] == []
