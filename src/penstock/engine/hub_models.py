"""Models of the hub: fetched into its cache, found there, and removed. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from penstock.config import DEFAULT_MODEL, GB, EngineConfig
from penstock.engine.local_models import local_models
from penstock.errors import InvalidModelFile, InvalidSetting, ModelNotFound
from penstock.models.adapter import CONFIG_NAME
from penstock.models.files import (
    DEFAULT_MODEL_PACKAGE,
    HUB_GGUF,
    HUB_IGNORED,
    HUB_PATTERNS,
    asking_hub,
    hub_snapshot,
    resolve,
    with_parts,
)
from penstock.models.gguf import is_first


def download(model: str, gguf: str | None = None) -> Path:
    """Fetches what is read of a model on the hub, or the one GGUF that a pattern names; what is here stays."""
    if asked := HUB_GGUF.fullmatch(model):
        model, gguf = asked[1], asked[2]
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    with asking_hub(model):
        listed: dict[str, Any] = {file.filename: file for file in snapshot_download(model, dry_run=True)}
    ggufs = sorted(name for name in listed if name.endswith(".gguf") and is_first(Path(name)))
    file = None if gguf is None else _chosen(model, ggufs, gguf)
    if file is None:
        names = list(filter_repo_objects(listed, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED))
    else:
        names = [name for name in listed if fnmatch(name, with_parts(file))]
    if file is None and not any(name.endswith(".safetensors") for name in names):
        raise InvalidModelFile(f"{model!r} on the hub has no safetensors; {_choice(ggufs)}.")
    missing = [listed[name].file_size for name in names if listed[name].will_download]
    _refuse_without_space(model, sum(missing))
    folder = hub_snapshot(model, weights=True, file=file)
    place = folder if file is None else folder / file
    if not (folder / CONFIG_NAME).is_file():
        resolve(str(place))  # says what is missing
    return place


def where(model: str) -> Path:
    """Finds a model that is here, without the network."""
    found = next((one for one in local_models([], EngineConfig(device="cpu")) if one.name == model), None)
    if found is None:
        raise _not_here(model)
    return Path(found.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    num_bytes: int  # that it frees
    execute: Callable[[], None]


def removal(model: str) -> Removal:
    """What deletes a model from the hub's cache, and nothing outside it."""
    from huggingface_hub import scan_cache_dir

    if model == DEFAULT_MODEL:
        raise InvalidSetting(
            f"{model!r} lies in a package, not in the hub's cache; `pip uninstall {DEFAULT_MODEL_PACKAGE}` removes it."
        )
    repos = scan_cache_dir().repos if cache_folder().is_dir() else ()
    found = next((repo for repo in repos if (repo.repo_type, repo.repo_id) == ("model", model)), None)
    if found is None:
        raise _not_here(model)
    revisions = (revision.commit_hash for revision in found.revisions)
    strategy = scan_cache_dir().delete_revisions(*revisions)
    return Removal(num_bytes=strategy.expected_freed_size, execute=strategy.execute)


def _not_here(model: str) -> ModelNotFound:
    return ModelNotFound(
        f"{model!r} is not in the hub's cache {cache_folder()}; `penstock models list` says what is, and "
        "`penstock models download` fetches a hub id."
    )


def _chosen(model: str, ggufs: list[str], pattern: str) -> str:
    glob = pattern if any(letter in pattern for letter in "*?[") or pattern in ggufs else f"*{pattern}*"
    found = [name for name in ggufs if fnmatch(name.lower(), glob.lower())]
    if len(found) != 1:
        raise InvalidSetting(f"--gguf {pattern} fits {len(found)} files of {model!r}; {_choice(found or ggufs)}.")
    return found[0]


def _choice(ggufs: list[str]) -> str:
    if not ggufs:
        return "it has no GGUF either, and nothing else is read: take a repository with one of them"
    return f"choose one with --gguf: {', '.join(ggufs[:12])}"


def _refuse_without_space(model: str, num_bytes: int) -> None:
    folder = next(path for path in (cache_folder(), *cache_folder().parents) if path.is_dir())
    if num_bytes > (free := shutil.disk_usage(folder).free):
        raise InvalidSetting(
            f"{model!r} takes {num_bytes / GB:.2f} GB more and {folder} has {free / GB:.2f} free; make room "
            "(`penstock models remove`) or set HF_HOME to another disk."
        )


def cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
