"""A short measurement at load, so that the first long prompt already meets the latency target."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.config import GPU_STEP_SIZES
from penstock.errors import QueueFull
from penstock.plan.recordings import LARGEST_CHUNKS
from penstock.prompt.random_tokens import random_tokens
from penstock.request import Failed, StepPlan, StepResult
from penstock.schedule.budget import StepCost, StepLoad

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

# Small chunks are seen after a long context too: that is where a latency target needs them.
CHUNK_SIZES = (256, 32, 512, 16, 128, 64)
PROMPT_TOKENS = 2048
NUM_DECODES = 4
DECODE_STEPS = 6
# On a GPU steps are larger, and contexts are skipped to.
GPU_CHUNKS = ((0, (4096, 2048, 512, 1024, 256)), (16_384, (4096, 512, 1024)), (49_152, (2048, 256, 1024, 512)))
GPU_DECODE_CONTEXT = 8192
MAX_READ = 1024  # tokens of a step that is run for its first use alone

Observations = list[tuple[StepLoad, float]]  # steps, and what they took in seconds


def noting(observations: Observations) -> Callable[[StepPlan, StepResult], None]:
    """What notes each step that it is called with."""
    return lambda plan, result: observations.append((StepLoad.of(plan.chunks), result.elapsed_s))


def random_prompt(engine: Engine, length: int, seed: int | str = 0) -> list[int]:
    """Draws tokens of the model's vocabulary, but for the one that stands for an image."""
    return random_tokens(length, seed, end=engine.model.spec.vocab_size, never=engine.model.lane.placeholder)


class Calibration:
    """Steps of an engine that serves nobody yet, and what they took."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._observations: Observations = []
        self._seeds = itertools.count()
        facts = engine.model.lane.facts
        self._is_gpu = engine.model.device.type == "cuda"
        has_pages = facts.shares_prefixes and not facts.reads_whole and engine.states is None
        self._can_skip = self._is_gpu and has_pages and self._scheduler.capacity > sum(GPU_CHUNKS[0][1]) + 1

    def run(self) -> StepCost:
        try:
            with self._engine.limits(watch=noting(self._observations)):
                self._use_first()
                self._observations.clear()
                if self._can_skip:
                    self._read_far()
                    self._write_far()
                else:
                    self._read_and_write()
        finally:
            if self._scheduler.prefix is not None:
                self._scheduler.prefix.clear()
        return StepCost.fitted(self._observations, waves=self._engine.model.lane.waves)

    def _use_first(self) -> None:
        """What is compiled, loaded and cached by its first use."""
        self._engine.warm_up()
        num_tokens = min(PROMPT_TOKENS, self._capacity)
        for length in {min(64, num_tokens), 1}:
            self._engine.generate(self._tokens(length), max_tokens=2, ignore_eos=True)
        if self._is_gpu:
            ceiling = self._scheduler.budget.ceiling
            sizes = [size for size in GPU_STEP_SIZES if size <= ceiling or not ceiling]
            if self._engine.model.lane.captures_steps:
                sizes = self._use_products([size for size in sizes if size > LARGEST_CHUNKS])
            else:  # all of it is read, and that takes time
                sizes = [size for size in sizes if size <= MAX_READ]
            if sizes:
                self._read(self._tokens(min(sum(sizes), self._scheduler.capacity - 1)), sizes)

    def _use_products(self, sizes: list[int]) -> list[int]:
        """Steps larger than those that were captured: one is read in whole, of the others a layer is enough."""
        fitting = [size for size in sizes if self._engine.memory.fits_first(size)]
        for size in fitting:
            self._engine.model.lane.use_products(size)
        return fitting[:1]

    def _read_and_write(self) -> None:
        """One prompt in chunks of several sizes, then a few streams."""
        num_tokens = min(PROMPT_TOKENS, self._capacity)
        prompt = self._tokens(num_tokens)
        self._read(prompt, CHUNK_SIZES)
        self._scheduler.budget.ceiling = max(CHUNK_SIZES)
        lengths = [max(1, num_tokens // (i + 2)) for i in range(NUM_DECODES)]
        # Beginnings of the prompt that was read, so that the prefix cache has most of them.
        for length in lengths:
            self._submit(prompt[:length], max_tokens=DECODE_STEPS, ignore_eos=True)
        while self._scheduler.has_work:
            self._step()

    def _read_far(self) -> None:
        last_context, last_chunks = GPU_CHUNKS[-1]
        num_tokens = min(last_context + sum(last_chunks) + 1, self._scheduler.capacity - 1)
        most = self._engine.config.most_prompt_tokens or last_context
        request_id = self._engine.submit(self._tokens(num_tokens), max_tokens=1)
        self._engine.most_in_flight = 1  # else the step after a skip would be planned twice
        for context, chunk_sizes in GPU_CHUNKS:
            if context + sum(chunk_sizes) >= num_tokens:
                break
            self._scheduler.skip(request_id, context)
            for chunk_size in chunk_sizes:
                self._scheduler.budget.ceiling = min(chunk_size, most)
                self._step()
        self._engine.abort(request_id)

    def _write_far(self) -> None:
        """Streams of unlike contexts, which end one after the other."""
        self._scheduler.budget.ceiling = self._engine.config.most_prompt_tokens
        ids = []
        for index in range(NUM_DECODES):
            length = min(GPU_DECODE_CONTEXT // (index + 1), self._capacity // NUM_DECODES)
            request_id = self._submit(self._tokens(length), max_tokens=2 * (index + 1), ignore_eos=True)
            self._scheduler.skip(request_id, length - 1)
            ids.append(request_id)
        while any(request_id in self._scheduler.sequences for request_id in ids):
            self._step()

    @property
    def _capacity(self) -> int:
        return max(1, self._scheduler.capacity // 4)

    def _tokens(self, length: int) -> list[int]:
        return random_prompt(self._engine, length, next(self._seeds))

    def _read(self, tokens: list[int], chunk_sizes: Sequence[int]) -> None:
        """One prompt in chunks of these sizes, over and over."""
        self._engine.submit(tokens, max_tokens=1)
        for chunk_size in itertools.cycle(chunk_sizes):
            if not self._scheduler.has_work:
                return
            self._scheduler.budget.ceiling = chunk_size
            self._step()

    def _submit(self, tokens: list[int], **sampling: Any) -> int:
        """Submits a prompt, after steps that make room where the engine lets fewer wait."""
        while True:
            try:
                return self._engine.submit(tokens, **sampling)
            except QueueFull:
                if not self._scheduler.has_work:
                    raise
                self._step()

    def _step(self) -> None:
        for event in self._engine.step():
            if isinstance(event, Failed):
                raise event.error


def calibrate(engine: Engine) -> StepCost:
    return Calibration(engine).run()
