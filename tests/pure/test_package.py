"""The package says what it is: one version, and what it needs to be installed with."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import penstock

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Modules whose distributions have other names, or come with another one at a fixed version.
MODULES = {
    "pydantic_core": "pydantic",
    "flashinfer": "flashinfer-python",
    "llama_cpp": "llama-cpp-python",
    "triton": "torch",
}
# What a device, a peer or a form brings, asked for by name and used through another library.
INDIRECT = {"flashinfer-python", "llama-cpp-python", "python-multipart"}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def imported_modules() -> set[str]:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"penstock"}


def test_what_is_imported_is_asked_for_and_what_is_asked_for_is_imported():
    brought_by = packages_distributions()
    imported = {
        canonicalize_name(MODULES.get(module) or brought_by.get(module, [module])[0]) for module in imported_modules()
    }
    asked_for = names(PROJECT["dependencies"]).union(*(names(extra) for extra in EXTRAS.values()))
    assert imported - asked_for == set(), "imported, but not asked for"
    assert asked_for - imported - INDIRECT == set(), "asked for, but never imported"


def test_the_version_is_written_once_and_everything_shows_it():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    assert sum(text.count(f'"{penstock.__version__}"') for text in texts) == 1
    shown = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"penstock {penstock.__version__}\n"


def test_the_changelog_has_the_version_with_a_date_below_what_is_unreleased():
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(penstock.__version__)}\] - \d{{4}}-\d\d-\d\d", titles[1])


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_newcomers_find_a_page_of_one_screen(name):
    assert 10 < len((ROOT / name).read_text().splitlines()) <= 60
