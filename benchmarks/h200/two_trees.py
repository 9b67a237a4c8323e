"""Reads 8,192 tokens and writes with 8 streams at 1k in two trees of Penstock, in turns on one card; their ratio.

    python benchmarks/h200/two_trees.py OLD/src NEW/src [--shape qwen3-8b] [--rounds 5]

Each tree runs in a process of its own, which holds its model on the card and works only when it is asked to.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SETTINGS = {
    "device": "cuda", "dtype": "bfloat16", "block_size": 64, "prefix_cache": False, "context": 16_384,
    "max_running": 64, "chunk_size": 8192, "memory": "48GiB",
}  # fmt: skip
NUM_STEPS = 64


def answer() -> None:
    """The process of one tree: reads a line with a row's name, writes its seconds."""
    try:
        from penstock.bench.random_model import random_engine
    except ImportError:  # older trees have it elsewhere
        from penstock.engine.random_model import random_engine  # ty: ignore[unresolved-import]

    config, read, write = json.loads(sys.stdin.readline())
    engine = random_engine(config, **SETTINGS)

    def seconds(prompts: list[Any], count: int) -> float:
        began = time.perf_counter()
        for prompt in prompts:
            engine.submit(prompt, max_tokens=count, ignore_eos=True)
        while engine.has_work:
            engine.step()
        return time.perf_counter() - began

    rows = {
        "read 8192": lambda: seconds(read, 1),
        "decode 8 at 1024": lambda: (seconds(write, 1 + NUM_STEPS) - seconds(write, 1)) / NUM_STEPS,
    }
    engine.warm_up()
    for row in rows.values():
        row()
        row()
    print("READY", flush=True)
    for line in sys.stdin:
        print(f"SECONDS {rows[line.strip()]()}", flush=True)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    from penstock.bench.work import SHAPES, Work

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs=2)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    work = Work.of_vocabulary(SHAPES[asked.shape]["vocab_size"])
    given = [SHAPES[asked.shape], [work.tokens(8192, 0)], [work.tokens(1024, seed) for seed in range(8)]]
    trees = []
    for tree in asked.trees:
        trees.append(_start(tree))
        trees[-1].stdin.write(json.dumps(given) + "\n")
        trees[-1].stdin.flush()
        _wait_for(trees[-1], "READY")
    for row in ("read 8192", "decode 8 at 1024"):
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(asked.rounds):
            for tree, seconds in zip(trees, found, strict=True):
                tree.stdin.write(row + "\n")
                tree.stdin.flush()
                seconds.append(float(_wait_for(tree, "SECONDS").split()[1]))
        old, new = (median(seconds) for seconds in found)
        spread = ", ".join(f"{min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f}" for seconds in found)
        print(
            f"{row}: old {old * 1e3:.3f} ms, new {new * 1e3:.3f} ms, new / old {new / old:.4f} ({spread})", flush=True
        )
    for tree in trees:
        tree.stdin.close()
        tree.wait()


def _start(tree: str) -> Any:
    """Begins the process of one tree."""
    path = os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__)), "--answer"]
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _wait_for(tree: Any, word: str) -> str:
    for line in tree.stdout:
        if line.startswith(word):
            return line
    raise SystemExit("a tree ended before it answered")


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer()
    else:
        main()
