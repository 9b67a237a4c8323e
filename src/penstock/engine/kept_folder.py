"""What a cache folder holds, for whoever looks at it, proves it or clears it. No torch."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from penstock.cache.disk import verified
from penstock.cache.folder import SUFFIX, CacheFolder
from penstock.config import EngineConfig, cache_folder
from penstock.document import Document
from penstock.errors import InvalidSetting

SESSIONS = "sessions"  # the folder of conversations beside the slabs, and the user's own cache folder for them
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class KeptModel(Document):
    id: str  # its folder, named by what its keys and values depend on
    model: str  # as it was named when it was first used; empty where that is lost
    about: dict[str, str]  # lane, types, kernel and versions
    slabs: int  # files with keys and values
    bytes: int  # that they take
    used_at: str | None  # when one was written or read last; null: there is none


class KeptFolder(Document):
    path: str  # of the cache folder
    bytes: int  # of all slabs
    models: tuple[KeptModel, ...]


class Verified(Document):
    slabs: int  # files that were read
    damaged: tuple[str, ...]  # of them, by path; they are removed


def folder_of(config: EngineConfig) -> Path:
    """Returns the folder of the settings, or the one that sessions use unless told otherwise."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else cache_folder(SESSIONS)


def keep_session(config: EngineConfig, name: str, data: bytes) -> None:
    """Writes a conversation beside the slabs, whole or not at all, within their budget."""
    folder = CacheFolder(folder_of(config))
    path = session_path(config, name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not folder.write(path, data, config.disk_bytes):
        raise OSError(errno.ENOSPC, "the folder is full")


def session_path(config: EngineConfig, name: str) -> Path:
    if not SESSION_NAME.fullmatch(name):
        raise InvalidSetting(
            f"The session is {name[:120]!r}; its name has letters, digits, dots, dashes and underscores, 100 at most."
        )
    return folder_of(config) / SESSIONS / f"{name}.json"


def opened(path: Path) -> CacheFolder:
    """Opens a folder that is there."""
    if not (path / "kv").is_dir():
        raise InvalidSetting(f"There is no cache folder {str(path)!r}; give the one of --cache-dir.")
    return CacheFolder(path)


def listed(path: Path) -> KeptFolder:
    folder = opened(path)
    models = tuple(kept for namespace in folder.namespaces() if (kept := _kept(folder, namespace)).slabs)
    return KeptFolder(path=str(path), bytes=sum(model.bytes for model in models), models=models)


def _kept(folder: CacheFolder, namespace: Path) -> KeptModel:
    sizes: list[int] = []
    times: list[float] = []
    for slab in slabs_of(namespace):
        with suppress(OSError):
            status = slab.stat()
            sizes.append(status.st_size)
            times.append(min(status.st_mtime, datetime.now(UTC).timestamp()))  # what is kept longer lies ahead
    about = folder.about(namespace)
    return KeptModel(
        id=namespace.name,
        model=about.pop("model", ""),
        about=about,
        slabs=len(sizes),
        bytes=sum(sizes),
        used_at=datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else None,
    )


def slabs_of(namespace: Path) -> Iterator[Path]:
    yield from sorted(path for path in namespace.iterdir() if path.suffix == SUFFIX)


def verify(path: Path) -> Verified:
    """Reads every slab, and removes those that are not what they were when they were written."""
    folder = opened(path)
    slabs = [slab for namespace in folder.namespaces() for slab in slabs_of(namespace)]
    damaged = [slab for slab in slabs if not verified(slab, folder) and slab.exists()]
    for slab in damaged:
        slab.unlink(missing_ok=True)
    return Verified(slabs=len(slabs), damaged=tuple(map(str, damaged)))


def clear(path: Path, name: str | None = None) -> int:
    """Removes what is kept of one model, by its name or id, or of all; returns the bytes that are free again."""
    folder = opened(path)
    if name is None:
        return folder.clear()
    found = [model.id for model in listed(path).models if name in (model.model, model.id)]
    if not found:
        raise InvalidSetting(f"Nothing is kept of {name!r} in {str(path)!r}; `penstock cache list` names what is.")
    return sum(folder.clear(folder.root / one) for one in found)
