"""What is on this machine that a command can name as its model. No torch, and nothing is asked of the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.config import DEFAULT_MODEL, EngineConfig
from penstock.document import Document
from penstock.errors import InvalidSetting, PenstockError
from penstock.lanes.table import settle
from penstock.models.files import reading_config, resolve
from penstock.models.gguf import is_first
from penstock.plan.devices import cuda_memory


class LocalModel(Document):
    name: str  # as a command takes it
    path: str  # of its folder or file
    weight_bytes: int
    lane: str | None  # its id; null: it cannot be run
    why_not: str  # empty where it can


class LocalModels(Document):
    cache: str  # the hub's, where downloads go
    models: tuple[LocalModel, ...]


def local_models(folders: Iterable[Path], config: EngineConfig) -> Iterator[LocalModel]:
    """Finds the default model, those in the hub's cache, and those in folders and right below them."""
    has_cuda = config.device in ("auto", "cuda") and cuda_memory() is not None
    for name, path in _named(folders):
        yield _judged(name, path, config, has_cuda=has_cuda)


def _named(folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Gives (what a command calls it, where its files are)."""
    yield DEFAULT_MODEL, DEFAULT_MODEL
    for name, snapshot in _cached():
        ggufs = sorted(path for path in snapshot.rglob("*.gguf") if is_first(path))
        yield from ((name, str(place)) for place in _in_folder(snapshot) if place == snapshot)
        yield from ((f"{name}/{place.relative_to(snapshot).as_posix()}", str(place)) for place in ggufs)
    for folder in folders:
        if not folder.is_dir():
            raise InvalidSetting(f"{folder} is not a folder. Name folders that have models in them.")
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        yield from ((str(place), str(place)) for one in (folder, *below) for place in _in_folder(one))


def _cached() -> list[tuple[str, Path]]:
    """Lists (hub id, folder of its newest snapshot)."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions]
    except CacheNotFound:
        return []
    newest = {repo.repo_id: max(repo.revisions, key=lambda revision: revision.last_modified) for repo in repos}
    return sorted((name, revision.snapshot_path) for name, revision in newest.items())


def _in_folder(folder: Path) -> list[Path]:
    ggufs = sorted(path for path in folder.glob("*.gguf") if is_first(path))
    return [folder] * (folder / "config.json").is_file() + ggufs


def _judged(name: str, model: str, config: EngineConfig, *, has_cuda: bool) -> LocalModel:
    lane, why_not, weight_bytes, path = None, "", 0, model
    try:
        files = resolve(model)
        path = str(files.folder or files.weight_files[0])
        weight_bytes = sum(path.stat().st_size for path in files.weight_files)
        with reading_config(model):
            lane = settle(files, config, has_cuda=has_cuda).lane.id
    except PenstockError as error:
        why_not = str(error)
    return LocalModel(name=name, path=path, weight_bytes=weight_bytes, lane=lane, why_not=why_not)
