"""What users and programs read of Penstock, as documents; everything that a machine decides is masked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from tiny_generic import MUST_SHOW, TROUBLE, save_causal_model
from tiny_models import save_tokenizer
from tiny_seq2seq import save_tiny_seq2seq
from tiny_vision_models import llava_processor, pictures, tiny_vision_model

GOLDEN = Path(__file__).parent / "golden"
WORDS = " ".join(f"w{3 + index % 190}" for index in range(120))
ENGLISH = "The penstock feeds the turbine. " * 12
IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ ' ' + message['role'] }}{% for part in message['content'] %}"
    "{{ ' <image> ' if part['type'] == 'image' else ' ' + part['text'] }}{% endfor %}{% endfor %} w9"
)
LANE_MODELS = ("smollm2", "generic", "recurrent", "whole", "source", "images")
# Times, bytes of this process, and what follows from them.
MEASURED = re.compile(
    r"(^|_)(ms|s|per_s|at)$|^(measured|predicted|memory_bytes|predicted_bytes|num_blocks|kv_share|max_difference)$"
)
MACHINE_TOPICS = ("packages", "threads", "load", "processor", "GPU", "memory", "swap", "attention")


class Golden:
    """Calls the command on small models of every lane, in a cache folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Path] = {}

    def call(self, *arguments: object, code: int = 0) -> Any:
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), "PENSTOCK_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    def model(self, name: str) -> str:
        if name == "smollm2":
            return name
        if name not in self._made:
            path = self._made[name] = self.folder / name
            path.mkdir()
            MODELS[name](path)
        return str(self._made[name])

    def asked(self, name: str) -> list[object]:
        text = ENGLISH if name == "smollm2" else WORDS
        picture = ["--image", self._picture()] if name == "images" else []
        common = ["--dtype", "float32", "--quantize", "none", "--memory", "3GiB", "--chunk-size", 32]
        return [self.model(name), "-p", text, *picture, "--max-tokens", 4, *common, "--json"]

    def _picture(self) -> Path:
        path = self.folder / "picture.png"
        if not path.exists():
            pictures(1)[0].save(path)
        return path

    def portable(self, value: object) -> object:
        """The same without this folder's name."""
        return json.loads(json.dumps(value).replace(str(self.folder), "FOLDER"))


def _images(folder: Path) -> None:
    tiny_vision_model("llava").save_pretrained(folder)
    save_tokenizer(folder)
    processor = llava_processor()
    processor.chat_template = IMAGE_TEMPLATE
    processor.save_pretrained(folder)


MODELS: Mapping[str, Callable[[Path], object]] = {
    "generic": lambda folder: save_causal_model(TROUBLE["gpt2"](), folder),
    "recurrent": lambda folder: save_causal_model(MUST_SHOW["mamba2"](), folder),
    "whole": lambda folder: save_causal_model(MUST_SHOW["jamba"](), folder),
    "source": lambda folder: save_tiny_seq2seq("t5-gated-untied", folder),
    "images": _images,
}


def masked(value: Any, key: str = "") -> Any:
    """The same with the type in place of every value that a clock, a meter or a version decides."""
    if isinstance(value, Mapping):
        if key == "environment":
            return {name: type(item).__name__ for name, item in value.items()}
        return {name: masked(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [masked(item, key) for item in value]
    if (isinstance(value, (int, float)) and MEASURED.search(key)) or key == "began_at":
        return "measured"
    return re.sub(r"by \d\.\d+e[+-]\d+|\d\.\de-\d+", "by a rounding", value) if isinstance(value, str) else value


def run_documents(golden: Golden) -> dict[str, Any]:
    found = {}
    for name in LANE_MODELS:
        document = golden.call("run", *golden.asked(name))
        document["plan"]["peak_bytes"] = "measured"  # holds what the process had before the weights
        found[name] = masked(golden.portable(document))
    return found


def plan_documents(golden: Golden) -> dict[str, Any]:
    """Made after `run`, so that verdicts are known."""
    settings = ["--dtype", "float32", "--quantize", "none", "--device", "cpu", "--memory", "3GiB", "--json"]
    return {
        name: masked(golden.portable(golden.call("plan", golden.model(name), "--prompt-tokens", 900, *settings)))
        for name in LANE_MODELS
    }


def doctor_documents(golden: Golden) -> dict[str, Any]:
    found = {}
    for name in LANE_MODELS:
        document = golden.call("doctor", golden.model(name), "--no-speed", "--memory", "3GiB", "--json")
        topics = [_portable_diagnosis(one) for one in document["diagnoses"] if one["topic"] != "load"]
        if (document["cpu_kernels"] or {}).get("compiled"):  # by a compiler, for instructions
            document["cpu_kernels"]["reason"] = "of this machine"
        found[name] = masked(golden.portable(document | {"diagnoses": topics}))
    return found


def _portable_diagnosis(diagnosis: dict[str, Any]) -> dict[str, Any]:
    if diagnosis["topic"] in MACHINE_TOPICS:
        return {name: value if name == "topic" else "of this machine" for name, value in diagnosis.items()}
    numbers = {name: re.sub(r"\d[\d.,]*", "#", text) if text else text for name, text in diagnosis.items()}
    return numbers | {"topic": diagnosis["topic"]}


def trace_documents(golden: Golden) -> dict[str, Any]:
    found = {}
    for name in ("smollm2", "source"):
        path = golden.folder / f"{name}.trace.json"
        golden.call("run", *golden.asked(name), "--trace", path)
        found[name] = masked(golden.portable(json.loads(path.read_text())))
        for step in found[name]["steps"]:
            step["peak_bytes"] = "measured"
        found[name]["plan"]["peak_bytes"] = "measured"
    return found


def verdict_documents(golden: Golden) -> list[Any]:
    """What loading the models above has kept of their checks."""
    kept = sorted((golden.folder / "cache" / "penstock" / "selfcheck").glob("*.json"))
    return sorted((_without_differences(json.loads(path.read_text())) for path in kept), key=json.dumps)


def _without_differences(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: "measured" if name == "max_difference" and item is not None else _without_differences(item)
            for name, item in value.items()
        }
    return masked(value)


def openapi_document(golden: Golden) -> Any:
    """With every reference replaced by what it refers to, so that renamed classes change nothing."""
    from penstock.config import EngineConfig
    from penstock.server.app import make_app
    from penstock.server.settings import ServerSettings

    document = make_app(ServerSettings(model="smollm2"), EngineConfig()).openapi()
    return _resolved(document["paths"], document.get("components", {}).get("schemas", {}), ())


def _resolved(value: Any, schemas: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_resolved(item, schemas, inside) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        return "itself" if name in inside else _resolved(schemas[name], schemas, (*inside, name))
    return {
        key: _resolved(item, schemas, inside)
        for key, item in value.items()
        if not (key == "title" and isinstance(item, str)) and key != "operationId"
    }


def flags(golden: Golden) -> dict[str, Any]:
    from penstock.cli.main import app

    return _flags_of(typer.main.get_command(app), "penstock")


def _flags_of(command: Any, name: str) -> dict[str, Any]:
    found = {name: [_flag(parameter) for parameter in command.params]}
    for child, below in getattr(command, "commands", {}).items():
        found |= _flags_of(below, f"{name} {child}")
    return found


def _flag(parameter: Any) -> dict[str, Any]:
    default = parameter.default
    return {
        "names": [*parameter.opts, *parameter.secondary_opts],
        "metavar": parameter.metavar,
        "default": default if isinstance(default, (str, int, float, bool, type(None))) else str(default),
        "is_required": parameter.required,
        "may_repeat": parameter.multiple,
        "help": getattr(parameter, "help", None),
    }


# In this order: plans, doctor and verdicts know what the runs before them found.
DOCUMENTS: Mapping[str, Callable[[Golden], Any]] = {
    "run": run_documents,
    "plan": plan_documents,
    "doctor": doctor_documents,
    "trace": trace_documents,
    "verdicts": verdict_documents,
    "openapi": openapi_document,
    "flags": flags,
}


def written(document: object) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
