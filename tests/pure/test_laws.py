"""The laws of the house, read from the code."""

import ast
import dataclasses
from pathlib import Path

import penstock
from penstock.request import Sequence

SOURCE = Path(penstock.__file__).parent
FIELDS = {field.name for field in dataclasses.fields(Sequence)}


def changed_fields(path):
    """Fields of whatever is called a sequence that a file assigns."""
    targets = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            targets += [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute)
        and target.attr in FIELDS
        and ast.unparse(target.value).endswith("sequence")
    }


def test_a_sequence_changes_only_in_the_room_schedule():
    changed = {path.relative_to(SOURCE).as_posix(): changed_fields(path) for path in SOURCE.rglob("*.py")}
    elsewhere = {name: fields for name, fields in changed.items() if fields and not name.startswith("schedule/")}
    assert not elsewhere
    assert any(changed.values()), "the rooms changed and this test finds nothing any more"
