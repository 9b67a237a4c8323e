"""A short measurement at load, so that the first long prompt already meets the latency target."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.schedule.budget import StepCost, StepLoad

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

# Small chunks are seen after a long context too: that is where a latency target needs them.
CHUNK_SIZES = (256, 32, 512, 16, 128, 64)
PROMPT_TOKENS = 2048
# On a GPU, steps smaller than this all take the time of their launches, and teach nothing of larger ones.
GPU_SCALE = 8
# Sizes of steps for which a GPU's matrix library has kernels of their own, each loaded when it is first used.
GPU_SIZES = (*range(64, 513, 64), 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192)
NUM_DECODES = 4
DECODE_STEPS = 6


def calibrate(engine: Engine) -> StepCost:
    """Reads one prompt in chunks of several sizes, then writes with a few sequences, and fits what the steps took."""
    scheduler = engine.scheduler
    observations: list[tuple[StepLoad, float]] = []
    ceiling, watcher = scheduler.budget.ceiling, engine.on_step
    engine.on_step = lambda plan, result: observations.append((StepLoad.of(plan.chunks), result.elapsed_s))
    generator = random.Random(0)
    scale = GPU_SCALE if engine.model.device.type == "cuda" else 1
    num_tokens = min(scale * PROMPT_TOKENS, scheduler.capacity // 4)

    reader = engine.model.media
    image_token = None if reader is None else reader.lane.media.image_token_id  # stands for an image that is not there

    def tokens(length: int) -> list[int]:
        drawn = (generator.randrange(engine.model.spec.vocab_size) for _ in range(length))
        return [(token + 1) % engine.model.spec.vocab_size if token == image_token else token for token in drawn]

    try:
        for length in {min(64, num_tokens), num_tokens if scale > 1 else 1}:  # first uses compile and cache
            engine.generate(tokens(length), max_tokens=2, ignore_eos=True)
        if scale > 1:
            sizes = [size for size in GPU_SIZES if size <= ceiling or not ceiling]
            _read(engine, tokens(min(sum(sizes), scheduler.capacity // 2)), sizes)
        observations.clear()
        prompt = tokens(num_tokens)
        _read(engine, prompt, [scale * chunk_size for chunk_size in CHUNK_SIZES])
        scheduler.budget.ceiling = scale * max(CHUNK_SIZES)
        lengths = [max(1, num_tokens // (i + 2)) for i in range(NUM_DECODES)]
        # Beginnings of the prompt that was read, so that the prefix cache has most of them.
        engine.generate_batch([prompt[:length] for length in lengths], max_tokens=DECODE_STEPS, ignore_eos=True)
    finally:
        scheduler.budget.ceiling, engine.on_step = ceiling, watcher
        if scheduler.prefix is not None:
            scheduler.prefix.clear()
    return StepCost.fitted(observations)


def _read(engine: Engine, tokens: list[int], chunk_sizes: Sequence[int]) -> None:
    """One prompt in chunks of these sizes, over and over."""
    engine.submit(tokens, max_tokens=1)
    for chunk_size in itertools.cycle(chunk_sizes):
        if not engine.scheduler.has_work:
            return
        engine.scheduler.budget.ceiling = chunk_size
        engine.step()
