"""A LoRA as PEFT publishes it: its config, what of it can be merged, and which tensors belong together. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import SchemaError, SchemaValidator
from pydantic_core.core_schema import str_schema

from penstock.errors import InvalidModelFile, ModelNotFound, UnsupportedModel, brief
from penstock.models.files import HUB_ID, PICKLE_SUFFIXES, ModelFiles, hub_snapshot, read_json_object
from penstock.models.safetensors import StoredTensor, read_safetensors_header

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
WRAPPED = ".base_layer"  # PEFT wraps what it changes, and the parameters of a mixture one around another
PARTS = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?")
MERGE_BEFORE = "Merge it where it was trained (PEFT's merge_and_unload, then save_pretrained) and load that folder"
# Of a config: what a merge follows, what only training reads, what only names things. All else must ask for nothing.
FOLLOWED = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out")
FOLLOWED += ("bias", "modules_to_save", "target_parameters", "init_lora_weights")
ONLY_TRAINING = ("lora_dropout", "inference_mode", "target_modules", "exclude_modules", "layers_to_transform")
ONLY_TRAINING += ("layers_pattern", "runtime_config", "eva_config", "lora_ga_config", "qalora_group_size")
ONLY_NAMES = ("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "megatron_core")
READ = frozenset((*FOLLOWED, *ONLY_TRAINING, *ONLY_NAMES))
# Ways to begin that leave the base model's own weights as they are.
PLAIN_STARTS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The tensors that change one matrix, by their names in the adapter."""

    a: str
    b: str
    magnitude: str | None  # of DoRA: the length of each row
    is_embedding: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    name: str  # the last part of its path, or its id on the hub
    path: Path  # of its weights
    config: Mapping[str, Any]
    identity: str  # of config and contents
    tensors: Mapping[str, StoredTensor]
    low_rank: Mapping[str, LowRank]  # by the path of the module in the model
    replaced: Mapping[str, str]  # by the path of the tensor in the model; the name in the adapter

    @property
    def base(self) -> str:
        return str(self.config.get("base_model_name_or_path") or "a model that it does not name")

    def rank(self, module: str) -> int:
        return self._pattern("rank_pattern", module, self.config.get("r"), int)

    def scale(self, module: str) -> float:
        """What a product is multiplied with."""
        rank, alpha = self.rank(module), self._pattern("alpha_pattern", module, self.config.get("lora_alpha"), float)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _pattern(self, name: str, module: str, default: Any, kind: Callable[[Any], Any]) -> Any:
        patterns = self.config.get(name) or {}
        try:
            value = next(
                (value for key, value in patterns.items() if _named_by(key).isinstance_python(module)), default
            )
            if (number := kind(value)) > 0:
                return number
        except (SchemaError, AttributeError, TypeError, ValueError, OverflowError):
            value = patterns
        raise InvalidModelFile(
            f"{self.path.with_name(CONFIG_NAME)}: {name} or its default gives {brief(value)} for {brief(module)}, "
            "not a number above 0; save the adapter again."
        )


@lru_cache(maxsize=4096)
def _named_by(pattern: str) -> SchemaValidator:
    """Compiles a stranger's pattern for an engine whose time grows with the text alone; that of `re` may not end."""
    return SchemaValidator(str_schema(pattern=rf"^(?:.*\.)?(?:{pattern})$"))


def with_adapter(files: ModelFiles, place: str) -> ModelFiles:
    """The model with an adapter, which is another model to every cache."""
    adapter = read_adapter(place)
    return dataclasses.replace(files, adapter=adapter, identity=f"{files.identity}:{adapter.identity}")


def read_adapter(place: str) -> Adapter:
    """Reads an adapter's config and header from a folder or the hub; what cannot be merged is refused."""
    folder = Path(place).expanduser()
    if not folder.exists() and HUB_ID.fullmatch(place):
        folder, name = hub_snapshot(place, weights=True), place
    else:
        folder = folder.parent if folder.name in (CONFIG_NAME, WEIGHTS_NAME) else folder
        name = folder.resolve().name
    config_path, path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    if not config_path.is_file():
        raise ModelNotFound(
            f"{place!r} is no adapter: {folder} has no {CONFIG_NAME}; pass the folder that PEFT's save_pretrained "
            "wrote, or its id on the hub."
        )
    config = read_json_object(config_path)
    _refuse_unmergeable(config, config_path)
    if not path.is_file():
        pickles = sorted(one.name for one in folder.iterdir() if one.suffix in PICKLE_SUFFIXES)
        found = f" but {pickles[0]}, a pickle, which is never read" if pickles else ""
        raise InvalidModelFile(
            f"{folder} has no {WEIGHTS_NAME}{found}; save it again with save_pretrained(..., safe_serialization=True)."
        )
    tensors = read_safetensors_header(path)
    low_rank, replaced = _parts(tensors, path, is_dora=bool(config.get("use_dora")))
    return Adapter(
        name=name,
        path=path,
        config=config,
        identity=_identity(config, path),
        tensors=tensors,
        low_rank=low_rank,
        replaced=replaced,
    )


def _refuse_unmergeable(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{path}: peft_type is {brief(config.get('peft_type'))}; only LORA is. {MERGE_BEFORE}.")
    if asked := sorted(name for name, value in config.items() if value and name not in READ):
        raise UnsupportedModel(
            f"{path} asks for {brief(asked[0])} {brief(config[asked[0]])}, which is not merged here. {MERGE_BEFORE}."
        )
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in PLAIN_STARTS:
        raise UnsupportedModel(
            f"{path}: init_lora_weights is {brief(start)}, which changed the base model too. {MERGE_BEFORE}."
        )


def _parts(
    tensors: Mapping[str, StoredTensor], path: Path, *, is_dora: bool
) -> tuple[dict[str, LowRank], dict[str, str]]:
    """Puts the tensors of a module together; what is no low rank product replaces a tensor of the model."""
    by_module: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for name in tensors:
        own = name.removeprefix(PREFIX)
        if found := PARTS.fullmatch(own):
            by_module.setdefault(found[1], {})[found[2]] = name
        elif ".lora_" in own:
            raise UnsupportedModel(
                f"{path}: tensor {brief(name)} is of a kind that is not merged here. {MERGE_BEFORE}."
            )
        else:
            replaced[own.replace(WRAPPED, "")] = name
    if not by_module and not replaced:
        raise InvalidModelFile(f"{path} holds no tensors, so it is no adapter; save it again.")
    low_rank = {}
    for module, parts in by_module.items():
        kind = "lora_embedding" if "lora_embedding_A" in parts or "lora_embedding_B" in parts else "lora"
        needed = [f"{kind}_A", f"{kind}_B", *(["lora_magnitude_vector"] if is_dora else [])]
        if is_dora and kind == "lora_embedding":
            raise UnsupportedModel(
                f"{path}: DoRA of the embeddings {brief(module)} is not merged here. {MERGE_BEFORE}."
            )
        if missing := next((part for part in needed if part not in parts), None):
            raise InvalidModelFile(
                f"{path} has no {missing} for {brief(module)}; the file is incomplete, save it again."
            )
        low_rank[module] = LowRank(
            a=parts[f"{kind}_A"],
            b=parts[f"{kind}_B"],
            magnitude=parts.get("lora_magnitude_vector"),
            is_embedding=kind == "lora_embedding",
        )
    return low_rank, replaced


def _identity(config: Mapping[str, Any], path: Path) -> str:
    with path.open("rb") as file:
        contents = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(f"{json.dumps(config, sort_keys=True, default=str)}\n{contents}".encode()).hexdigest()
