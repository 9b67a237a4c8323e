"""One row of test_memory_table.py, in a process that imports what the command line imports."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import penstock.cli.main  # noqa: F401 - its memory is part of what users see
from penstock.engine.engine import Engine
from penstock.engine.planning import plan
from penstock.plan.machine import forget_peak, peak_resident_bytes

CHUNK_SIZE = 256
NUM_WORDS = 8000


def words(num_words: int) -> str:
    generator = random.Random(num_words)
    return " ".join(f"w{generator.randrange(10, NUM_WORDS)}" for _ in range(num_words))


def draw(folder: Path, num_images: int) -> list[Path]:
    from PIL import Image

    paths = [folder / f"{number}.png" for number in range(num_images)]
    for number, path in enumerate(paths):
        Image.effect_noise((336, 336), 40 + number).convert("RGB").save(path)
    return paths


def submit(engine: Engine, num_tokens: int, num_images: int, tokens_per_image: int) -> int:
    text = words(num_tokens - num_images * tokens_per_image)
    with tempfile.TemporaryDirectory() as folder:
        images = draw(Path(folder), num_images)
        prompt = " ".join(["<image>"] * num_images + [text])
        return engine.submit(prompt, images=images, max_tokens=2, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--tokens-per-image", type=int, default=0)
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"dtype": "float32", "threads": 2, "memory": "3GiB", "context": 9000}
    settings |= {"chunk_size": CHUNK_SIZE, "prefix_cache": False}
    engine = Engine.load(arguments.folder, **settings)
    request_id = submit(engine, arguments.tokens, arguments.images, arguments.tokens_per_image)
    events = engine.events(request_id)
    next(events)
    encoded_at = peak_resident_bytes()
    forget_peak()  # images were encoded before the first chunk; the bound is about reading
    *_, last = events
    measured = peak_resident_bytes()
    num_tokens = last.output.num_prompt_tokens
    planned, in_engine = plan(arguments.folder, prompt_tokens=num_tokens, **settings).prompt, engine.plan(num_tokens)
    kept = in_engine.weight_bytes + in_engine.kv_bytes + in_engine.state_bytes
    document = {
        "lane": engine.lane.id,
        "tokens": num_tokens,
        "kept": kept,
        "planned": planned.peak_bytes - planned.media_bytes - kept,
        "in_engine": in_engine.peak_bytes - in_engine.media_bytes - kept,
        "measured": measured - kept,
        "activations": in_engine.activation_bytes,
        "encoder": encoded_at - measured,
        "encoder_share": in_engine.media_bytes,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
