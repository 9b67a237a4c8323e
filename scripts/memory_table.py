"""Peak memory, predicted and measured: each cell is a fresh `penstock run` on the default model.

Prints the table, the memory beyond weights and KV that a long prompt adds, and fails if a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.loading import load_tokenizer
from penstock.models.files import resolve

MB = 1e6
SHORT_PROMPT = 200
LARGEST_GAP = 0.10  # of the measured peak, between plan and measurement
MOST_BEYOND_KV = 64 * MB  # at 16k tokens
MOST_GROWTH = 16 * MB  # from 4k to 16k tokens
FORMATS = {
    "auto": [],
    "bfloat16": ["--dtype", "bfloat16", "--quantize", "none"],
    "float32": ["--dtype", "float32"],
}
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    chunk_size: int
    prompt_tokens: int
    planned: int
    predicted: int
    measured: int
    kv_bytes: int


def write_text(path: Path, num_tokens: int) -> None:
    """Words of one token each, in a seeded order, so that the prompt has about that many tokens."""
    backend = load_tokenizer(resolve("smollm2")).backend
    words = [
        word for token in range(1000, 9000) if (word := backend.decode([token])).startswith(" ") and word[1:].isalpha()
    ]
    generator = random.Random(num_tokens)
    path.write_text("".join(generator.choice(words) for _ in range(num_tokens)), encoding="utf-8")


def printed_json(*arguments: str) -> dict:
    finished = subprocess.run([*PENSTOCK, *arguments, "--json"], capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(finished.stderr)
    return json.loads(finished.stdout)


def measure(folder: Path, settings: list[str], chunk_size: int, length: int) -> Cell:
    path = folder / f"{length}.txt"
    if not path.exists():
        write_text(path, length)
    shared = [*settings, "--chunk-size", str(chunk_size), "--context", "20000", "--threads", "2"]
    run = printed_json("run", "-f", str(path), "--max-tokens", "2", *shared)
    plan = printed_json("plan", "--prompt-tokens", str(run["prompt_tokens"]), *shared)
    return Cell(
        chunk_size=chunk_size,
        prompt_tokens=run["prompt_tokens"],
        planned=plan["peak_bytes"],
        predicted=run["peak_bytes"]["predicted"],
        measured=run["peak_bytes"]["measured"],
        kv_bytes=plan["kv_bytes"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    failures = []
    print("format    chunk  tokens  plan MB   run MB measured     gap beyond KV")
    with tempfile.TemporaryDirectory() as name:
        for weights in arguments.formats:
            for chunk_size in arguments.chunk_sizes:
                short = measure(Path(name), FORMATS[weights], chunk_size, SHORT_PROMPT)
                beyond: dict[int, float] = {}
                for length in arguments.lengths:
                    cell = measure(Path(name), FORMATS[weights], chunk_size, length)
                    beyond[length] = cell.measured - short.measured - (cell.kv_bytes - short.kv_bytes)
                    gap = cell.planned / cell.measured - 1
                    print(
                        f"{weights:<9} {chunk_size:>5} {cell.prompt_tokens:>7} {cell.planned / MB:>8.1f} "
                        f"{cell.predicted / MB:>8.1f} {cell.measured / MB:>8.1f} {gap:>+7.1%} "
                        f"{beyond[length] / MB:>9.1f}",
                        flush=True,
                    )
                    if abs(gap) > LARGEST_GAP:
                        failures.append(f"{weights} chunk {chunk_size} at {length}: plan is {gap:+.1%} off")
                if weights != "float32" and chunk_size == 256 and {4000, 16000} <= set(beyond):
                    growth = beyond[16000] - beyond[4000]
                    print(f"{weights} 256: beyond KV {beyond[16000] / MB:.1f} MB at 16k, {growth / MB:+.1f} MB from 4k")
                    if beyond[16000] > MOST_BEYOND_KV or growth > MOST_GROWTH:
                        failures.append("the memory beyond KV is past its bound")
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
