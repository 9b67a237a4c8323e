"""Stores slabs until it is killed: `python killed_writer.py FOLDER BUDGET SEED`. Needs nothing but Python."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from damaged_slabs import LAYOUT, NAMESPACE, payload, slab_at

from penstock.cache.disk import DiskTier
from penstock.cache.folder import CacheFolder


def main(folder: str, budget: str, seed: str) -> None:
    """Writes slabs in random order and says when it begins."""
    disk = DiskTier(CacheFolder(Path(folder)), NAMESPACE, LAYOUT, int(budget))
    disk.open({})
    slabs = [slab_at(index, has_state=index % 3 == 0) for index in range(60)]
    payloads = [payload(slab) for slab in slabs]
    drawn = random.Random(seed)
    print("begun", flush=True)
    while True:
        index = drawn.randrange(len(slabs))
        disk.write(slabs[index], payloads[index], drawn.random() * 1e9, ())
        if drawn.random() < 0.3:  # so that there is more to write
            disk.path.joinpath(f"{disk.name(slabs[drawn.randrange(60)])}.kv").unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
