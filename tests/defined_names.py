"""What the code defines, by name: what documentation may speak of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
FOLDERS = ("src", "tests", "scripts", "benchmarks", "examples", "docs")
SETTINGS = ("pyproject.toml", "Makefile", "scripts/check", ".pre-commit-config.yaml")


def is_defined(name: str) -> bool:
    """A plain name that something defines, a member of a class or a module, or a public name of another library."""
    first, _, rest = name.rpartition(".")
    if not first:
        return name in defined_names()
    owner = first.rpartition(".")[2]
    if (SOURCE / first.removeprefix("penstock.").replace(".", "/")).with_suffix(".py").exists():
        return rest in names_of_module(first.removeprefix("penstock."))
    if owner in members_by_class():
        return rest in members_by_class()[owner]
    if owner[0].isupper():
        return False
    return set(name.split(".")) <= defined_names() | imported_names()


@cache
def trees() -> list[ast.Module]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in files]


@cache
def defined_names() -> frozenset[str]:
    """In Python functions, classes, variables, parameters and texts; in C what is called; in settings any word."""
    found = {name for tree in trees() for node in ast.walk(tree) for name in names_of(node)}
    for path in SOURCE.rglob("*.py"):
        texts = re.findall(r"\"([\w.-]+)\"", path.read_text(encoding="utf-8"))
        found |= set(texts)  # keys of configs and documents, choices, names in other libraries
    for path in SOURCE.rglob("*"):
        found |= {path.stem, path.name} if path.suffix in (".py", ".c", ".h", ".html") or path.is_dir() else set()
        if path.suffix in (".c", ".h"):
            found |= set(re.findall(r"\b(\w+)\(", path.read_text()))
    for name in SETTINGS:
        found |= set(re.findall(r"[\w-]+", (ROOT / name).read_text()))
    return frozenset(found)


def names_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


@cache
def imported_names() -> frozenset[str]:
    """Modules and names of other libraries, and what is asked of them."""
    found: set[str] = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {part for alias in node.names for part in alias.name.split(".")}
                found |= set((getattr(node, "module", None) or "").split("."))
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
    return frozenset(found)


@cache
def members_by_class() -> dict[str, set[str]]:
    """Methods, fields, and attributes that methods set; of the classes above too."""
    classes = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    members = {node.name: set() for node in classes}
    for node in classes:
        members[node.name] |= {n for inner in ast.walk(node) if not isinstance(inner, ast.arg) for n in names_of(inner)}
    for _ in range(3):
        for node in classes:
            for base in node.bases:
                members[node.name] |= members.get(base.id if isinstance(base, ast.Name) else "", set())
    return members


@cache
def names_of_module(name: str) -> set[str]:
    path = (SOURCE / name.replace(".", "/")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {inner for node in tree.body for inner in names_of(node)}
    targets = (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)] for node in tree.body)
    return found | {name for group in targets for target in group if target for name in names_of(target)}


@cache
def modules_by_name() -> dict[str, set[str]]:
    """Functions and classes, wherever they are nested, and values of modules -> the files that define them."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).as_posix()
        for name in names_of_module(place.removesuffix(".py")):
            found.setdefault(name, set()).add(place)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.setdefault(node.name, set()).add(place)
    return found


def strange_private_names(names: list[str], paths: list[str]) -> list[str]:
    """Private names that no file defines to which the other names and the paths of a section lead."""
    public = [name.partition(".")[0] for name in names if not name.startswith("_")]
    places = [modules_by_name().get(name, set()) for name in public]
    files = {path for path in paths if path.endswith(".py")}.union(*(place for place in places if len(place) == 1))
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    return [name for name in private if not modules_by_name().get(name, set()) & files]
