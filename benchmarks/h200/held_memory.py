"""Tells what recordings take of the card beside torch's own memory, and what stays after several engines.

    python benchmarks/h200/held_memory.py [--shape qwen3-0.6b llama-3.2-1b] [--engines 5]

Bytes are those that the driver counts as used, and torch's own share of them.
"""

from __future__ import annotations

import argparse
import gc

from penstock.bench.random_model import random_engine
from penstock.bench.work import SHAPES

import torch  # isort: skip

MB = 1e6
SETTINGS = {
    "device": "cuda", "dtype": "bfloat16", "block_size": 64, "prefix_cache": False, "context": 16_384,
    "max_running": 256, "chunk_size": 8192, "memory": "24GiB",
}  # fmt: skip


def used() -> tuple[float, float]:
    """(MB of the whole card, MB that torch has reserved)."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MB, torch.cuda.memory_reserved() / MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b", "llama-3.2-1b"], choices=SHAPES)
    parser.add_argument("--engines", type=int, default=5)
    asked = parser.parse_args()
    torch.zeros(1, device="cuda")
    print("begun: {:.0f} MB of the card, {:.0f} of torch".format(*used()), flush=True)
    for shape in asked.shape:
        for number in range(asked.engines):
            engine = random_engine(SHAPES[shape], **SETTINGS)
            engine.generate(list(range(100, 9000)), max_tokens=4, ignore_eos=True)
            before = used()
            engine.warm_up()
            after = used()
            torch.cuda.empty_cache()
            kept = used()
            lane, memory = engine.model.lane, engine.model.memory
            counts = f"{len(lane.graphs._captured)} sizes of decodes, {len(lane.pieces._captured)} of other steps"
            counts += f", {lane.recorded_bytes / MB:.0f} MB as counted, {memory.recording_bytes / MB:.0f} as planned"
            beside = (after[0] - before[0]) - (after[1] - before[1])
            engine.generate(list(range(100, 9000)), max_tokens=4, ignore_eos=True)
            peak, planned = engine.held.peak_bytes / MB, engine.plan(8900).peak_bytes / MB
            engine.close()
            del engine, lane, memory
            gc.collect()
            torch.cuda.empty_cache()
            left = used()
            took = f"recordings took {after[1] - before[1]:.0f} MB of torch, {kept[1] - before[1]:.0f} of them "
            took += f"beside its cache, and {beside:.0f} MB beside it ({counts})"
            stays = f"afterwards {left[0]:.0f} MB of the card, {left[1]:.0f} of torch"
            print(f"{shape} {number + 1}: {took}; peak {peak:.0f}, planned {planned:.0f}; {stays}", flush=True)


if __name__ == "__main__":
    main()
