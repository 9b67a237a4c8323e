"""A decode step of transformers itself, for the lane of Penstock that runs the same model: prints RESULT and JSON.

`python benchmarks/h200/transformers_decode.py FOLDER` draws a model of the Qwen3-8B shape, measures it, and leaves it
in FOLDER (16 GB) for `penstock bench gpu FOLDER --lane transformers-generic-text --parts d`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from penstock.bench.random_model import random_transformers_model, save_model
from penstock.bench.work import SHAPES, Work

BATCHES = ((1, 1024), (8, 1024), (8, 32768))
NUM_STEPS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    model = random_transformers_model(SHAPES["qwen3-8b"], "cuda")
    found: dict[str, Any] = {"engine": "transformers", "version": transformers.__version__}
    for size, context in BATCHES:
        seconds = decode_step_s(model, Work(), size, context)
        found[f"tpot_{size}_{context}"] = seconds
        print(f"transformers decode {size} at {context}: {seconds * 1e3:.2f} ms", flush=True)
    save_model(model, str(folder))
    print("RESULT", json.dumps(found))


@torch.inference_mode()
def decode_step_s(model: Any, work: Work, size: int, context: int) -> float:
    """Of a batch whose prompts were read one after another, as its cache grows by a token a step."""
    caches = []
    for seed in range(size):
        ids = torch.tensor([work.tokens(context, seed)], device=model.device)
        caches.append(model(ids, use_cache=True, logits_to_keep=1).past_key_values)
    cache = joined(caches)
    del caches
    token = torch.full((size, 1), 11, device=model.device)
    for step in range(2 * NUM_STEPS):
        if step == NUM_STEPS:  # the first half warms up
            _wait(model.device)
            began = time.perf_counter()
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    _wait(model.device)
    return (time.perf_counter() - began) / NUM_STEPS


def joined(caches: list[Any]) -> Any:
    """One cache of a batch from one of each prompt; a layer leaves the single caches as it is joined."""
    whole = transformers.DynamicCache()
    for index in range(len(caches[0].layers)):
        layers = [cache.layers[index] for cache in caches]
        whole.update(torch.cat([one.keys for one in layers]), torch.cat([one.values for one in layers]), index)
        for layer in layers:
            layer.keys = layer.values = None
    return whole


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
