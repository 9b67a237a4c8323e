"""The documentation is true: its programs run, its commands parse, its links lead somewhere, its lists are complete."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import compress, pairwise
from pathlib import Path
from types import ModuleType

import pytest
import typer
from markdown.extensions.toc import slugify
from typer.testing import CliRunner

from penstock.cli import report
from penstock.cli.main import app
from penstock.config import DEFAULT_MODEL, PARSERS, load_config
from penstock.models.files import resolve
from penstock.models.gguf import read_gguf
from penstock.prompt.load import tokenizer_from_gguf

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WITH_PROGRAMS = [ROOT / "README.md", DOCS / "index.md", *sorted((DOCS / "guides").glob("*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
LEAST_CONCEPT_TOKENS, MOST_CONCEPT_TOKENS = 6_200, 7_400  # `make run` reads them; the default model holds 8,192

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REPORT = "Report on the penstock, by A. Miller, 1912.\n" + "The gate was opened and the turbine turned.\n" * 20

# Runs each page's blocks in one namespace, at the lines where they stand; prints what failed.
RUN_PROGRAMS = """
import json, sys, traceback
failures = {}
for page, blocks in json.load(open(sys.argv[1])).items():
    namespace = {"__name__": "__main__"}
    try:
        for line, code in blocks:
            exec(compile("\\n" * (line - 1) + code, page, "exec"), namespace)
    except BaseException:
        failures[page] = traceback.format_exc()
json.dump(failures, open(sys.argv[2], "w"))
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line of its first line, code) of every fenced block in that language."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(2)) + 1, m[2]) for m in FENCE.finditer(text) if m[1] == language]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def rows(markdown: str) -> list[list[str]]:
    """The cells of every table row that begins with code; a head is not a row."""
    lines = markdown.splitlines()
    is_row = [
        line.startswith("| `") and not after.startswith(("|---", "| ---")) for line, after in pairwise([*lines, ""])
    ]
    found = [line.strip("| ").split(" | ") for line in compress(lines, is_row)]
    return [[cell.strip("` ") for cell in row] for row in found]


# --- programs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all Python blocks, in one fresh process: its memory is not that of the other tests."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "report.txt").write_text(REPORT)
    (folder / "programs.json").write_text(json.dumps({name_of(page): blocks(page, "python") for page in WITH_PROGRAMS}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment["PENSTOCK_THREADS"] = "1"  # several threads on a busy machine wait for each other
    command = [sys.executable, "-c", RUN_PROGRAMS, "programs.json", "failures.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "failures.json").read_text())


@pytest.mark.parametrize("page", [page for page in WITH_PROGRAMS if blocks(page, "python")], ids=name_of)
def test_every_python_block_runs(page, failures):
    assert name_of(page) not in failures, failures[name_of(page)]


# --- commands -----------------------------------------------------------------------------------------------


def penstock_calls() -> list[tuple[str, tuple[str, ...]]]:
    """(where, arguments) of every penstock command in a shell block, also behind a pipe."""
    found = []
    for page in WITH_PROGRAMS:
        for line, code in blocks(page, "sh"):
            for number, text in enumerate(code.splitlines(), line):
                words = shlex.split(text, comments=True)
                starts = [i for i, word in enumerate(words) if word.rpartition("/")[2] == "penstock"]
                for start in [i for i in starts if i == 0 or words[i - 1] == "|"]:
                    rest = words[start + 1 :]
                    end = rest.index("|") if "|" in rest else len(rest)
                    found.append((f"{name_of(page)}:{number}", tuple(rest[:end])))
    return found


CALLS = penstock_calls()


def is_cheap(arguments: tuple[str, ...]) -> bool:
    """Asks for help or the version, or plans the model that is there."""
    if {"--help", "-h", "--version"} & set(arguments):
        return True
    return arguments[0] == "plan" and parsed(arguments).params["model"] == DEFAULT_MODEL


def parsed(arguments: tuple[str, ...]) -> typer.Context:
    group = typer.main.get_command(app)
    assert arguments[0] in group.commands, f"there is no command {arguments[0]!r}"
    return group.commands[arguments[0]].make_context(arguments[0], list(arguments[1:]))


def test_the_documentation_has_commands_of_every_kind():
    assert {"run", "chat", "plan", "--version"} <= {arguments[0] for _, arguments in CALLS}


@pytest.mark.parametrize(("where", "arguments"), CALLS, ids=[" ".join(call[1])[:60] for call in CALLS])
def test_every_penstock_line_is_accepted(where, arguments, tmp_path):
    if is_cheap(arguments):
        result = CliRunner().invoke(app, arguments, env={"PENSTOCK_MEMORY": ""})
        assert result.exit_code == 0, f"{where}: {result.output} {result.exception}"
        return
    flags = parsed(arguments).params
    settings = {name: flags[name] for name in PARSERS if name in flags}
    load_config(settings, environment={}, folder=tmp_path)


# --- links --------------------------------------------------------------------------------------------------


def anchors(markdown: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", markdown), flags=re.MULTILINE)
    return {slugify(title.replace("`", ""), "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_internal_link_resolves(page, hooks):
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link} leads nowhere"
        if DOCS in page.parents:
            assert DOCS in target.parents, f"{link} leaves the site"
        if anchor:
            content = hooks.on_page_markdown(target.read_text(encoding="utf-8"))
            assert anchor in anchors(content), f"{link} has no such heading"


# --- completeness -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_every_generated_part_can_be_made(page, hooks):
    assert "<!-- generated" not in hooks.on_page_markdown(page.read_text(encoding="utf-8"))


def test_the_readme_lists_the_families_that_there_are(hooks):
    section = (ROOT / "README.md").read_text().partition("## Supported models")[2]
    assert [row[:2] for row in rows(section)] == rows(hooks.families())


def test_the_map_has_one_line_for_every_file():
    source = ROOT / "src" / "penstock"
    code = (path for path in source.rglob("*") if path.suffix in (".py", ".c", ".h"))
    files = {str(path.relative_to(source)) for path in code if path.stat().st_size}
    listed = [row[0] for row in rows((DOCS / "development" / "map.md").read_text())]
    assert sorted(listed) == sorted(files)


def test_the_json_reference_has_every_field_and_no_other():
    text = (DOCS / "reference" / "json.md").read_text()
    sections = {part.partition("\n")[0]: [row[0] for row in rows(part)] for part in text.split("\n## ")[1:]}
    nested = {"plan": report.RunPlan, "peak_bytes": report.PeakBytes}
    run = [
        name
        for field in report.RunReport.model_fields
        for name in ([f"{field}.{inner}" for inner in nested[field].model_fields] if field in nested else [field])
    ]
    assert sections["run"] == run
    assert sections["plan"] == list(report.PlanReport.model_fields)
    assert sections["lane"] == list(report.Lane.model_fields)


def test_the_concepts_are_as_long_as_make_run_needs_them():
    backend = tokenizer_from_gguf(read_gguf(resolve(DEFAULT_MODEL).gguf).metadata).backend
    texts = [page.read_text(encoding="utf-8") for page in sorted((DOCS / "concepts").glob("*.md"))]
    num_tokens = sum(len(backend.encode(text, add_special_tokens=False).ids) for text in texts)
    assert LEAST_CONCEPT_TOKENS <= num_tokens <= MOST_CONCEPT_TOKENS
