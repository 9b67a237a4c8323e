"""Opens the cache folder for an engine: under which name its keys and values are kept, or why none are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.cache.disk import DiskTier
from penstock.cache.folder import CacheFolder
from penstock.cache.mover import Mover, layout_of
from penstock.cache.slabs import FORMAT_VERSION
from penstock.cache.tiers import Tiers
from penstock.engine.loading import LoadedModel
from penstock.lanes.table import LANES
from penstock.schedule.budget import NUM_FEATURES, StepCost
from penstock.schedule.moves import FIRST_OBSERVATIONS
from penstock.trace.environment import installed

KEPT_COST = "cost.json"
RESTS = 20.0  # times as long as a look through the folder took, before the next
NAMELESS = "nothing tells these weights from others: they come from no files, or changed while they were read"


@dataclass(slots=True, kw_only=True)
class DiskCache:
    tiers: Tiers
    disk: DiskTier
    mover: Mover
    cost: StepCost
    num_observed: int
    rests_until: float = 0.0

    def look(self) -> None:
        """Learns what other processes wrote or removed; looking takes a small share of the time."""
        began_at = time.monotonic()
        if began_at >= self.rests_until and self.disk.has_changed:
            self.tiers.lie_on_disk(self.disk.names())
            self.rests_until = began_at + RESTS * (time.monotonic() - began_at)

    def close(self, num_observed: int, cost: StepCost) -> None:
        """Waits for what is being written, and keeps what a step takes for the next process."""
        self.mover.close()
        if num_observed >= FIRST_OBSERVATIONS:
            self.disk.keep(KEPT_COST, json.dumps([cost.pace * value for value in cost.coefficients]).encode())


def open_disk(model: LoadedModel, note: Callable[[str], None]) -> DiskCache:
    """Opens the folder of the settings. `note`: is told once when nothing can be stored."""
    assert model.config.cache_dir is not None
    assert model.storage is not None
    layout = layout_of(model.storage, model.state_storage, model.config.block_size)
    about = about_model(model) | {"layout": json.dumps([layout.row_bytes, layout.state_bytes])}
    namespace = blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).digest()
    folder = CacheFolder(Path(model.config.cache_dir).expanduser())
    disk = DiskTier(folder, namespace, layout, model.config.disk_bytes, note)
    disk.open({"model": model.name} | {name: value for name, value in about.items() if name in TOLD})
    tiers = Tiers(layout, disk.name)
    mover = Mover(disk, model.storage, model.state_storage, lambda: tiers.pinned)
    kept = _kept_cost(disk)
    cache = DiskCache(
        tiers=tiers,
        disk=disk,
        mover=mover,
        cost=StepCost(kept or [0.0] * NUM_FEATURES),
        num_observed=FIRST_OBSERVATIONS if kept else 0,
    )
    cache.look()
    return cache


TOLD = ("lane", "dtype", "quantize", "adapter", "kernel", "penstock")


def about_model(model: LoadedModel) -> dict[str, str]:
    """Everything that makes equal tokens give other keys and values."""
    files, lane = model.files, model.lane.facts
    kind = LANES[lane.id]
    about: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "penstock": penstock.__version__,
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "transformers": installed("transformers") if kind.needs_transformers else "",
        "weights": model.content,
        "adapter": "" if files.adapter is None else files.adapter.identity,
        "config": json.dumps(files.config, sort_keys=True, default=str),
        "lane": f"{lane.id}, {lane.chunk_mask_mode}",
        "text_only": files.why_text_only,
        "dtype": model.dtype,
        "kv_dtype": str(model.storage.keys[0].dtype) if model.storage is not None and model.storage.keys else "",
        "quantize": model.quantize,
        "device": model.device.type,
        "kernel": model.attention,
        "block_size": model.config.block_size,
    }
    return {name: str(value) for name, value in about.items()}


def _kept_cost(disk: DiskTier) -> list[float]:
    """What an earlier process found that steps take; nothing where that cannot be read."""
    try:
        values = [float(value) for value in json.loads((disk.path / KEPT_COST).read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
    return values if len(values) == NUM_FEATURES and all(0 <= value < 1e3 for value in values) else []
