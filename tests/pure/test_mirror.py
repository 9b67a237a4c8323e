"""Every module without torch has tests here, in a file of its name, or in one that is named below and imports it."""

import ast
import tomllib
from pathlib import Path

import pytest

import penstock

HERE = Path(__file__).parent
SOURCE = Path(penstock.__file__).parent
REPORT = tomllib.loads((HERE / "coverage.toml").read_text())["tool"]["coverage"]["report"]
MODULES = sorted(
    path.relative_to(SOURCE).as_posix()
    for pattern in REPORT["include"]
    for path in SOURCE.glob(pattern.removeprefix("*/penstock/"))
    if path.name != "__init__.py"
)
# Modules that can be told apart in the code and not in what they do.
TOGETHER = {
    "batch/answers.py": "test_batch.py",
    "batch/lines.py": "test_batch.py",
    "batch/run.py": "test_batch.py",
    "answer/events.py": "test_reader.py",
    "answer/formats.py": "test_reader.py",
    "answer/notations.py": "test_reader.py",
    "answer/python_values.py": "test_values.py",
    "answer/scanner.py": "test_values.py",
    "cache/disk.py": "test_tiers.py",
    "cache/folder.py": "test_tiers.py",
    "cache/prefix.py": "test_blocks.py",
    "cache/slabs.py": "test_tiers.py",
    "models/families.py": "test_spec.py",
    "prompt/render_apart.py": "test_render.py",
    "models/gguf.py": "test_files.py",
    "models/gguf_architectures.py": "test_files.py",
    "models/gguf_keys.py": "test_files.py",
    "models/gguf_rotary.py": "test_files.py",
    "models/gguf_translation.py": "test_files.py",
    "models/layer_specs.py": "test_spec.py",
    "models/shapes.py": "test_lane.py",
    "lanes/table.py": "test_lane.py",
    "lanes/native_text_kind.py": "test_lane.py",
    "lanes/native_images_kind.py": "test_lane.py",
    "lanes/generic_text_kind.py": "test_generic_spec.py",
    "lanes/generic_images_kind.py": "test_lane.py",
    "lanes/seq2seq_kind.py": "test_lane.py",
    "models/quantization.py": "test_weight_formats.py",
    "models/projections.py": "test_weight_formats.py",
    "plan/prompt_plan.py": "test_memory.py",
    "prompt/cuts.py": "test_tokens.py",
    "prompt/detokenizer.py": "test_tokens.py",
    "prompt/pattern.py": "test_tokens.py",
    "prompt/sandbox.py": "test_render.py",
    "schedule/draft.py": "test_scheduler.py",
    "schedule/holdings.py": "test_scheduler.py",
    "schedule/prefill.py": "test_prefill_scheduler.py",
    "schedule/queue_limit.py": "test_scheduler.py",
    "trace/document.py": "test_trace.py",
    "trace/perfetto.py": "test_trace.py",
    "trace/recorder.py": "test_trace.py",
    "trace/summary.py": "test_trace.py",
    "document.py": "test_trace.py",
    "errors.py": "test_config.py",
}
# Reached through the module that uses them, which the file imports.
THROUGH = {
    "answer/notations.py": "penstock.answer.formats",
    "lanes/lane.py": "penstock.lanes.table",
    "lanes/native_text_kind.py": "penstock.lanes.table",
    "lanes/native_images_kind.py": "penstock.lanes.table",
    "lanes/generic_images_kind.py": "penstock.lanes.table",
    "lanes/seq2seq_kind.py": "penstock.lanes.table",
    "document.py": "penstock.trace.document",
    "models/gguf_architectures.py": "penstock.models.gguf_translation",
    "models/gguf_keys.py": "penstock.models.gguf_config",
    "models/gguf_rotary.py": "penstock.models.gguf_config",
    "models/quantization.py": "penstock.engine.planning",
    "models/projections.py": "penstock.engine.planning",
    "prompt/detokenizer.py": "penstock.prompt.tokens",
    "prompt/sandbox.py": "penstock.prompt.render",
    "schedule/draft.py": "penstock.schedule.scheduler",
    "schedule/holdings.py": "penstock.schedule.scheduler",
    "schedule/queue_limit.py": "penstock.schedule.scheduler",
}


def imported_by(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_its_tests(module):
    name = f"test_{Path(module).stem}.py"
    file = HERE / TOGETHER.get(module, name)
    wanted = THROUGH.get(module, f"penstock.{module.removesuffix('.py').replace('/', '.')}")
    assert file.is_file(), f"{module} has no {name}"
    assert wanted in imported_by(file), f"{file.name} does not import {wanted}"


def test_the_table_names_modules_that_there_are_and_need_it():
    assert set(TOGETHER) <= set(MODULES)
    assert set(THROUGH) <= set(MODULES)
    assert [module for module in TOGETHER if (HERE / f"test_{Path(module).stem}.py").exists()] == []


def test_no_two_test_files_share_a_name():
    """Pytest imports test files by their bare names, so a second one of a name cannot be collected."""
    names = [path.name for path in HERE.parent.rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
