"""The documentation is true: its programs and commands run, its links lead somewhere, its lists are complete."""

import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import compress, pairwise
from pathlib import Path
from types import ModuleType

import documentation
import pytest
import typer
from defined_names import is_defined, strange_private_names
from documentation import FENCE, Block, penstock_call
from fastapi.routing import APIRoute
from markdown.extensions.toc import slugify
from programs import program

import penstock
from penstock.bench.cpu import CpuReport
from penstock.cli.main import app
from penstock.config import DEFAULT_MODEL, load_config
from penstock.models.families import FAMILIES
from penstock.models.files import resolve
from penstock.prompt.load import tokenizer_from_gguf
from penstock.server.app import ROUTERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WITH_PROGRAMS = [ROOT / "README.md", DOCS / "index.md", *sorted((DOCS / "guides").glob("*.md"))]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted(DOCS.rglob("*.md")),
]
LEAST_CONCEPT_TOKENS, MAX_CONCEPT_TOKENS = 6_200, 7_400  # `make run` reads them; the default model holds 8,192

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
# Lines of shell blocks that are not run here: what they do is done by `make setup`, or by the wheel in scripts/check.
SETTING_UP = re.compile(r"(\.venv/bin/)?pip install |python3 -m venv |\. \S+/bin/activate$")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shell_lines(page: Path) -> list[str]:
    return [line for _, language, code in documentation.blocks(page) if language == "sh" for line in code.splitlines()]


def without_repetitions(pages: list[Path]) -> dict[str, list[Block]]:
    """The blocks of each page, in which a command that an earlier page has shown is left out."""
    seen: set[str] = set()
    shown: dict[str, list[Block]] = {}
    for page in pages:
        shown[name_of(page)] = []
        for first_line, language, code in documentation.blocks(page):
            if language == "sh":
                lines = [line for line in code.splitlines() if line.startswith("export ") or line not in seen]
                seen.update(lines)
                code = "\n".join(lines)
            shown[name_of(page)].append((first_line, language, code))
    return shown


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return program(DOCS / "hooks.py", "docs_hooks")


def rows(markdown: str) -> list[list[str]]:
    """The cells of every table row that begins with code; a head is not a row."""
    lines = markdown.splitlines()
    is_row = [
        line.startswith("| `") and not after.startswith(("|---", "| ---")) for line, after in pairwise([*lines, ""])
    ]
    found = [line.strip("| ").split(" | ") for line in compress(lines, is_row)]
    return [[cell.strip("` ") for cell in row] for row in found]


# --- programs and commands ----------------------------------------------------------------------------------


def failures_with(model: str, folder: Path) -> dict[str, str]:
    """Of all Python blocks and commands, in processes of their own: their memory is not that of the other tests."""
    (folder / "pages.json").write_text(json.dumps(without_repetitions(WITH_PROGRAMS)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment["PENSTOCK_THREADS"] = "1"  # several threads on a busy machine wait for each other
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), environment.get("PYTHONPATH")]))
    command = [sys.executable, documentation.__file__, "pages.json", "failures.json", model]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1740)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "failures.json").read_text())


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures_with(documentation.TINY_MODEL, tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=name_of)
def test_every_block_runs(page, failures):
    assert name_of(page) not in failures, failures[name_of(page)]


@pytest.mark.evidence
def test_every_block_runs_with_the_default_model(tmp_path):
    assert failures_with(DEFAULT_MODEL, tmp_path) == {}


def test_every_command_is_shown():
    calls = [call for page in WITH_PROGRAMS for line in shell_lines(page) if (call := penstock_call(line))]
    assert {"run", "chat", "plan", "serve", "doctor"} <= {arguments[0] for _, arguments in calls}


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=name_of)
def test_every_other_shell_line_names_something_that_is_there(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for line in shell_lines(page):
        if penstock_call(line) or line.startswith(("export ", "curl ")) or SETTING_UP.match(line):
            continue
        program, argument = line.split()
        assert (program, argument) in [("make", target) for target in targets] or (
            program == "python" and (ROOT / argument).is_file()
        ), f"{line!r} is neither run nor known"


def accept(arguments: tuple[str, ...]) -> dict[str, object]:
    """The flags of a command line, as the command reads them; nothing is run."""
    name, command = "penstock", typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    return command.make_context(name, list(arguments)).params


def test_every_line_that_serves_is_accepted():
    calls = [call for page in WITH_PROGRAMS for line in shell_lines(page) if (call := penstock_call(line))]
    serving = [arguments for _, arguments in calls if arguments[0] == "serve"]
    assert serving
    for arguments in serving:
        load_config({"latency_target_ms": accept(arguments)["latency_target_ms"]}, environment={}, folder=DOCS)


def test_every_promise_names_commands_that_are_there():
    lines = (DOCS / "reference" / "promises.md").read_text().splitlines()
    proofs = [line.rstrip("| ").rpartition(" | ")[2] for line in lines if line.startswith("| ")][1:]
    assert len(proofs) == 5
    for proof in proofs:
        commands = re.findall(r"`([^`]+)`", proof)
        assert commands, proof
        for command in commands:
            if call := penstock_call(command):
                accept(call[1])
            else:
                program, *others, file = command.split()
                assert (program, others) in [(".venv/bin/python", []), (".venv/bin/python", ["-m", "pytest"])], command
                assert (ROOT / file).is_file(), command


def test_every_settings_file_is_accepted(tmp_path):
    files = [code for page in PAGES for _, language, code in documentation.blocks(page) if language == "toml"]
    assert files
    for code in files:
        (tmp_path / "penstock.toml").write_text(code)
        config = load_config({}, environment={}, folder=tmp_path)
        assert all(hasattr(config, key.replace("-", "_")) for key in tomllib.loads(code))


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


def test_what_is_special_is_said_of_the_families_that_there_are(hooks):
    assert list(hooks.WHAT_IS_SPECIAL) == list(FAMILIES)


def test_the_map_has_one_line_for_every_file():
    source = ROOT / "src" / "penstock"
    code = (path for path in source.rglob("*") if path.suffix in (".py", ".c", ".h"))
    files = {str(path.relative_to(source)) for path in code if path.stat().st_size}
    listed = [row[0] for row in rows((DOCS / "development" / "map.md").read_text())]
    assert sorted(listed) == sorted(files)


def test_every_field_of_a_document_has_a_meaning(hooks):
    described = rows(hooks.on_page_markdown((DOCS / "reference" / "json.md").read_text()))
    assert len(described) > 40
    assert [row for row in described if len(row) != 3] == []


def test_every_public_name_is_in_the_reference(hooks):
    text = hooks.on_page_markdown((DOCS / "reference" / "api.md").read_text()) + hooks.on_page_markdown(
        (DOCS / "reference" / "configuration.md").read_text()
    )
    missing = [name for name in penstock.__all__ if not re.search(rf"\b{name}\b", text)]
    assert set(missing) <= {"EngineConfig", "SamplingParams", "Verdict"}  # shown as tables of settings, and in a guide


def test_every_route_is_in_the_reference():
    text = (DOCS / "reference" / "server.md").read_text().partition("## Fields")[0]
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert len(routes) > 10
    missing = [route.path for route in routes if f" {re.sub(r'/{.*', '', route.path)}`" not in text]
    assert missing == []


@pytest.mark.parametrize("page", sorted((DOCS / "development").glob("*.md")), ids=name_of)
def test_the_names_in_development_pages_exist(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    folders = (ROOT, ROOT / "src" / "penstock", DOCS)
    assert [path for path in PATH.findall(text) if not any((folder / path).exists() for folder in folders)] == []
    missing = {name for name in NAME.findall(text) if not is_defined(name)}
    assert {name for name in missing if not any((folder / name).exists() for folder in folders)} == set()


@pytest.mark.parametrize("page", sorted((DOCS / "development").glob("*.md")), ids=name_of)
def test_private_names_are_those_of_the_files_that_a_section_speaks_of(page):
    for section in re.split(r"^#+ ", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE):
        assert strange_private_names(NAME.findall(section), PATH.findall(section)) == [], section.partition("\n")[0]


@pytest.mark.parametrize(
    "name", ["Scheduler.apply", "models.files.resolve", "chunk_end", "penstock_attend", "Engine.lane"]
)
def test_a_name_that_is_there_is_found(name):
    assert is_defined(name)


@pytest.mark.parametrize(
    "name", ["Scheduler.chat_feed", "models.files.read_gguf", "CpuAttention.logits", "no_such_name"]
)
def test_a_name_that_is_elsewhere_or_nowhere_is_noticed(name):
    assert not is_defined(name)


def test_a_private_name_of_another_file_is_noticed():
    assert strange_private_names(["Decoder", "_attention", "_mlp"], []) == ["_attention"]


def test_every_decision_has_a_status_and_names_decisions_that_there_are():
    text = (DOCS / "development" / "decisions.md").read_text()
    decisions = re.findall(r"^\*\*.+?(?=\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    letters = re.findall(r"^\*\*\((\w+)\) ", text, flags=re.MULTILINE)
    assert len(letters) == len(set(letters)) > 80
    for decision in decisions:
        status = re.search(r"\*(In force|Replaced by)\b[^*]*\.\*$", decision.rstrip())
        assert status, decision[:80]
    assert set(re.findall(r"\(([a-z]{2})\)", text)) <= set(letters)


def test_the_concepts_are_as_long_as_make_run_needs_them():
    backend = tokenizer_from_gguf(resolve(DEFAULT_MODEL).gguf.metadata).backend
    texts = [page.read_text(encoding="utf-8") for page in sorted((DOCS / "concepts").glob("*.md"))]
    num_tokens = sum(len(backend.encode(text, add_special_tokens=False).ids) for text in texts)
    assert LEAST_CONCEPT_TOKENS <= num_tokens <= MAX_CONCEPT_TOKENS


def test_the_tables_of_the_benchmarks_are_made_from_what_was_measured():
    cpu, h200 = ROOT / "benchmarks" / "cpu", ROOT / "benchmarks" / "h200"
    page = (cpu / "README.md").read_text()
    measured = CpuReport.model_validate_json((cpu / "last.json").read_text())
    assert program(cpu / "report.py", "cpu_report").with_tables(page, measured) == page
    table = program(h200 / "report.py", "h200_report").table(json.loads((h200 / "last.json").read_text()))
    assert f"<!-- table -->\n{table}\n<!-- table -->" in (h200 / "README.md").read_text()
