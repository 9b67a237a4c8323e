"""Rooms import one way, and the light ones stay light. Read from the source, so that no import can hide."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
BASE = {"request", "config", "document", "errors", "apart"}
# What each room may import, besides itself and the base.
ALLOWED = {
    "prompt": set(),
    "answer": set(),
    "plan": set(),
    "schedule": {"plan", "cache.blocks", "cache.prefix", "cache.slabs", "cache.states", "cache.tiers"},
    "cache": set(),
    "kernels": {"plan"},
    "attention": {"kernels", "cache.storage", "plan"},
    "models": {"kernels", "attention", "cache.storage", "plan"},
    "foreign": {"models", "attention", "cache.storage", "plan"},
    "proof": {"foreign", "lanes.lane", "models", "attention", "cache.storage"},
    "lanes": {"proof", "foreign", "models", "attention", "kernels", "cache.storage", "plan"},
    "attached": {"proof", "foreign", "models", "plan"},
    "batch": set(),
    "route": {"cache.prefix", "schedule"},
    "ray": {
        "cache.prefix",
        "engine",
        "lanes.table",
        "models.files",
        "plan",
        "prompt",
        "route",
        "server",
    },
    "trace": {"plan"},
    "engine": {
        "trace",
        "schedule",
        "lanes",
        "proof",
        "prompt",
        "plan",
        "cache",
        "models",
        "attention",
        "kernels",
    },
    "server": {"answer", "batch", "engine", "trace", "prompt", "plan", "cache.prefix", "route"},
    "simulate": {"schedule", "trace", "cache", "route"},
    "bench": {
        "engine",
        "trace",
        "prompt",
        "plan",
        "models",
        "foreign.pretrained",
        "simulate.plot",
    },
    "doctor": {
        "bench",
        "engine",
        "trace",
        "schedule",
        "lanes",
        "proof",
        "models",
        "kernels",
        "prompt",
        "plan",
    },
    "cli": {
        "batch",
        "ray",
        "bench",
        "simulate",
        "doctor",
        "engine",
        "trace",
        "server",
        "foreign.processor",
        "plan",
        "prompt",
    },
}
# Reviewed exceptions: the callable package hands over to the engine only when it is called.
EXCEPTIONS = {("plan/__init__.py", "engine.planning")}
EXCEPTIONS |= {
    ("models/media_spec.py", "foreign.pretrained"),
    ("foreign/pages.py", "lanes.graphs"),
}
NO_TORCH = [
    "prompt",
    "answer",
    "plan",
    "batch",
    "route",
    "trace",
    "schedule",
    "cache/blocks.py",
    "cache/disk.py",
    "cache/folder.py",
    "cache/slabs.py",
    "cache/tiers.py",
    "cache/prefix.py",
    "lanes/lane.py",
    "lanes/table.py",
    "lanes/place.py",
    "lanes/native_text_kind.py",
    "lanes/native_images_kind.py",
    "lanes/generic_text_kind.py",
    "lanes/generic_images_kind.py",
    "lanes/seq2seq_kind.py",
    "models/shapes.py",
    "models/spec.py",
]
NO_TORCH += [
    "engine/hub_models.py",
    "engine/local_models.py",
    "models/adapter.py",
    "models/files.py",
    "models/generic_spec.py",
    "proof/verdict.py",
    "models/gguf.py",
    "models/gguf_translation.py",
    "models/gguf_architectures.py",
    "models/gguf_config.py",
    "models/gguf_keys.py",
    "models/gguf_rotary.py",
    "models/quantization.py",
    "models/safetensors.py",
    "models/projections.py",
    "bench",
    "simulate",
    "doctor/advice.py",
    "doctor/diagnosis.py",
    "doctor/machine.py",
    "engine/planning.py",
    "request.py",
    "config.py",
    "errors.py",
    "apart.py",
    "engine/grammar_proof.py",
]
# Where torch and transformers are imported by the function that needs them.
MAY_IMPORT_TRANSFORMERS = {"prompt/load.py", "bench/peer_process.py", "bench/cpu.py"}
MAY_IMPORT_TRANSFORMERS |= {"bench/random_model.py", "bench/gpu.py", "bench/limits.py"}


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """(module, is it imported only for type checkers) of every import in the file, nested ones included."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.append((node.module, id(node) in for_types))
            if node.module == "penstock":
                found += [(f"penstock.{alias.name}", id(node) in for_types) for alias in node.names]
    return found


SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("source", [s for s in SOURCES if "/" in s])
def test_imports_go_one_way(source):
    room = source.split("/")[0]
    for module, is_for_types in imports_of(ROOT / source):
        if is_for_types or not module.startswith("penstock."):
            continue
        target = module.removeprefix("penstock.")
        allowed = ALLOWED[room] | BASE | {room, "__version__"}
        is_allowed = any(target == name or target.startswith(f"{name}.") for name in allowed)
        assert is_allowed or (source, target) in EXCEPTIONS, f"{source} imports {module}"


@pytest.mark.parametrize("source", SOURCES)
def test_the_base_imports_only_itself(source):
    if source.removesuffix(".py") in BASE:
        modules = {module for module, _ in imports_of(ROOT / source) if module.startswith("penstock")}
        assert modules <= {f"penstock.{name}" for name in BASE}


@pytest.mark.parametrize("source", [s for s in SOURCES if any(s.startswith(light) for light in NO_TORCH)])
def test_light_rooms_do_not_import_torch(source):
    for module, is_for_types in imports_of(ROOT / source):
        if source not in MAY_IMPORT_TRANSFORMERS:
            assert is_for_types or module.split(".")[0] not in {"torch", "transformers", "triton"}


@pytest.mark.parametrize(
    "statement",
    [
        "import penstock",
        "import penstock; penstock.plan('smollm2', prompt_tokens=1000)",
        "import penstock; penstock.PrefillScheduler; penstock.peak_memory_estimate; penstock.SamplingParams",
        "from penstock.cli.main import app",
        "import penstock.cli.reading, penstock.cli.report",  # what a run needs before it says that it is loading
    ],
)
def test_torch_stays_out_of_what_must_start_fast(statement):
    check = f"{statement}; import sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_map_states_the_import_rule_that_is_held():
    text = (ROOT.parents[1] / "docs" / "development" / "map.md").read_text()
    stated = {room: set(others.split(", ")) for room, others in re.findall(r"^    (\w+) +-> (.+)$", text, re.MULTILINE)}
    assert stated.pop("everything") == BASE
    assert stated == {room: others for room, others in ALLOWED.items() if others}


def test_every_public_name_exists():
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
