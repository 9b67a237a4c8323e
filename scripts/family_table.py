"""Four tables about hybrid, mixture-of-experts and image models: exactness, memory, speed, and reuse of a document.

Models have random weights, tiny ones for exactness, else at a small but realistic shape. Every memory cell is a fresh
process. Ends with 1 where logits are more than 1e-4 apart, or the plan and the measured memory more than 10 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from chunk_matrix import CHUNK_SIZES, SUBJECTS, Distances, distances
from family_models import FAMILIES, PictureProcessor, pictures, save_family, text_tokens
from transformers.utils import logging as library

from penstock.engine.engine import Engine
from penstock.lanes.lane import GENERIC_MULTIMODAL, GENERIC_TEXT
from penstock.lanes.media_processor import MediaProcessor
from penstock.request import Output

MB = 1e6
LARGEST_GAP = 0.10
SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 2, "memory": "3GiB", "context": 9000}
MEMORY = {"qwen3.5": "hybrid", "qwen3-moe": "experts", "llava": "images"}
NUM_IMAGES = 4
SPEED_WRITTEN = 32
TABLES = ["memory", "speed", "reuse"]  # the tests run what the table of exactness prints


def load(name: str, folder: Path, num_tokens: int, num_images: int, **settings: Any) -> Engine:
    engine = Engine.load(str(folder), **(SETTINGS | settings))
    family = FAMILIES[name]
    if engine.model.media is not None:
        num_text = num_tokens - num_images * (family.image_tokens + 1)
        engine.model.media.lane.processor = MediaProcessor(PictureProcessor(family, num_text))
    return engine


def ask(engine: Engine, name: str, num_tokens: int, num_images: int, **sampling: Any) -> Output:
    if FAMILIES[name].image is None:
        return engine.generate(text_tokens(num_tokens), ignore_eos=True, **sampling)
    text = " ".join(["<image>"] * num_images)
    return engine.generate(text, images=pictures(num_images), ignore_eos=True, **sampling)


# --- exactness ---


def exact_table(names: list[str], folder: Path) -> list[str]:
    """Ours beside transformers in float32, as asked; float64 beside both says whose rounding it is."""
    torch.set_num_threads(SETTINGS["threads"])
    sizes = ", ".join(map(str, CHUNK_SIZES))
    print(f"Largest distance of logits, over prompts of 1 to 2,600 tokens, whole and in chunks of {sizes}; float32")
    print("architecture            to transformers  to the whole  to float64  transformers to float64  32 tokens equal")
    failures = []
    for name in names:
        worst = Distances.worst(map(distances, SUBJECTS[name](folder / name)))
        print(
            f"{name:<23} {worst.to_transformers:>15.1e} {worst.to_whole:>13.1e} {worst.to_float64:>11.1e} "
            f"{worst.of_transformers:>24.1e}  {worst.has_equal_tokens}",
            flush=True,
        )
        failures += [] if worst.is_right else [f"{name}: {worst}"]
    return failures


# --- memory ---


def memory_table(folders: dict[str, Path]) -> list[str]:
    """The engine's plan knows the runtime that it measured at load; `penstock plan` estimates it, from far."""
    print("Memory beyond weights, KV and state, MB: 8,192 tokens in chunks of 256, float32, a fresh process each")
    print("model        kind     penstock plan     gap    engine's plan     gap   measured   of the process")
    failures = []
    for name, kind in MEMORY.items():
        command = [sys.executable, str(Path(__file__).parent / "family_memory.py"), str(folders[name])]
        if (per_image := FAMILIES[name].image_tokens) > 0:
            command += ["--images", str(NUM_IMAGES), "--tokens-per-image", str(per_image)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        cell = json.loads(done.stdout)
        assert cell["lane"].startswith("optimized-native"), cell["lane"]
        gaps = {key: cell[key] / cell["measured"] - 1 for key in ("planned", "in_engine")}
        print(
            f"{name:<12} {kind:<8} {cell['planned'] / MB:>13.1f} {gaps['planned']:>+7.1%} "
            f"{cell['in_engine'] / MB:>16.1f} {gaps['in_engine']:>+7.1%} "
            f"{cell['measured'] / MB:>10.1f} {(cell['measured'] + cell['kept']) / MB:>16.1f}",
            flush=True,
        )
        failures += [f"{name}: {key} is {gap:+.1%} off" for key, gap in gaps.items() if abs(gap) > LARGEST_GAP]
    return failures


# --- speed ---


def speed_row(name: str, folder: Path, num_tokens: int, num_rounds: int) -> tuple[float, float, float, float]:
    """(reading, writing) in tokens per second, native and by transformers; medians of runs that take turns."""
    generic = GENERIC_TEXT if FAMILIES[name].image is None else GENERIC_MULTIMODAL
    settings = {"chunk_size": 256, "prefix_cache": False}
    engines = [
        load(name, folder, num_tokens, 1, **settings),
        load(name, folder, num_tokens, 1, lane=generic, **settings),
    ]
    reading: list[list[float]] = [[], []]
    writing: list[list[float]] = [[], []]
    for round_number in range(num_rounds + 1):
        for index, engine in enumerate(engines):
            output = ask(engine, name, num_tokens, 1, max_tokens=SPEED_WRITTEN)
            if round_number:  # the first one warms up
                reading[index].append(output.num_prompt_tokens / output.prefill_s)
                writing[index].append((SPEED_WRITTEN - 1) / output.decode_s)
    for engine in engines:
        engine.close()
    del engine, engines
    gc.collect()  # before the next family's are loaded
    ours, theirs = ((statistics.median(reading[i]), statistics.median(writing[i])) for i in (0, 1))
    return (*ours, *theirs)


def speed_table(names: list[str], folders: dict[str, Path], num_tokens: int, num_rounds: int) -> None:
    print(f"\nTokens per second: {num_tokens} read in chunks of 256, {SPEED_WRITTEN} written, float32, lanes in turns")
    print("family          reading: native  transformers  ratio   writing: native  transformers  ratio")
    for name in names:
        ours_in, ours_out, theirs_in, theirs_out = speed_row(name, folders[name], num_tokens, num_rounds)
        print(
            f"{name:<15} {ours_in:>15.0f} {theirs_in:>13.0f} {ours_in / theirs_in:>6.2f} "
            f"{ours_out:>17.1f} {theirs_out:>13.1f} {ours_out / theirs_out:>6.2f}",
            flush=True,
        )


# --- reuse ---


def reuse_table(names: list[str], folders: dict[str, Path]) -> None:
    document, first, second = (text_tokens(n, seed) for n, seed in ((2000, 1), (30, 2), (40, 3)))
    print("\nThe second question about a document of 2,000 tokens, on hybrids")
    print("family          prompt  saved  read   ms cold   ms warm  same tokens")
    for name in names:
        with load(name, folders[name], 0, 0, chunk_size=256) as engine:
            cold = engine.generate([*document, *second], max_tokens=16, ignore_eos=True)
        with load(name, folders[name], 0, 0, chunk_size=256) as engine:
            engine.generate([*document, *first], max_tokens=16, ignore_eos=True)
            warm = engine.generate([*document, *second], max_tokens=16, ignore_eos=True)
        saved = warm.num_cached_tokens
        print(
            f"{name:<15} {warm.num_prompt_tokens:>6} {saved:>6} {warm.num_prompt_tokens - saved:>5} "
            f"{cold.prefill_s * 1e3:>9.0f} {warm.prefill_s * 1e3:>9.0f}  {warm.token_ids == cold.token_ids}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--tables", nargs="+", default=TABLES, choices=["exact", *TABLES])
    parser.add_argument("--architectures", nargs="+", default=list(SUBJECTS), help="of the table of exactness")
    parser.add_argument("--speed-tokens", type=int, default=1024, help="that the speed table reads")
    parser.add_argument("--rounds", type=int, default=3, help="of the speed table, whose medians count")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    SETTINGS["threads"] = arguments.threads
    library.set_verbosity_error()
    library.disable_progress_bar()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        if "exact" in arguments.tables:
            failures += exact_table(arguments.architectures, Path(name))
        needed = {*(arguments.families if {"speed", "reuse"} & {*arguments.tables} else ())}
        needed |= {*(MEMORY if "memory" in arguments.tables else ())}
        folders = {family: Path(name) / "large" / family for family in needed}
        for family, folder in folders.items():
            save_family(family, folder)
        if "memory" in arguments.tables:
            failures += memory_table(folders)
        if "speed" in arguments.tables:
            speed_table(arguments.families, folders, arguments.speed_tokens, arguments.rounds)
        if "reuse" in arguments.tables:
            hybrids = [one for one in ("qwen3-next", "qwen3.5", "bamba", "granite-hybrid") if one in folders]
            reuse_table(hybrids, folders)
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
