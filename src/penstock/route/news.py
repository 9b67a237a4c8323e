"""`Load`: what a replica tells of itself; by it a router predicts when a prompt would have its first token there."""

from __future__ import annotations

import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.cache.prefix import block_hashes
from penstock.document import Document
from penstock.request import StepPlan, StepResult
from penstock.schedule.budget import StepCost, StepLoad
from penstock.schedule.queue_limit import FIRST_GUESS_TOKENS_PER_S
from penstock.schedule.scheduler import Scheduler

MAX_HASHES = 16_384  # in one document; of more, only those that a number divides
LONGEST_STEP = 8_192  # tokens, where nothing bounds a step


def short_hash(block_hash: bytes) -> int:
    """Shortens the hash of a block to the four bytes that are published: one in a million is mistaken for another."""
    return int.from_bytes(block_hash[:4], "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Says what a router has to know of a prompt."""

    num_tokens: int
    hashes: tuple[int, ...] = ()  # of its whole blocks, each over all before it; none: nothing is known of it

    @classmethod
    def of(cls, tokens: Sequence[int], root: bytes, block_size: int) -> Wanted:
        """Hashes the blocks of a prompt as its cache does."""
        return cls(num_tokens=len(tokens), hashes=tuple(map(short_hash, block_hashes(tokens, root, block_size))))


def reading_s(cost: Sequence[float], step_tokens: int, beside: StepLoad, start: int, end: int) -> float:
    """Predicts how long tokens [start, end) of a prompt take in steps of a size, `beside` decodes that run on."""
    num_tokens = end - start
    if num_tokens <= 0:
        return 0.0
    step, token, token_context, decode_context, chunk_context = cost
    num_steps = -(-num_tokens // step_tokens)
    fetched = num_steps * start + step_tokens * num_steps * (num_steps - 1) // 2
    every_step_s = step + token * beside.num_tokens + decode_context * beside.decode_contexts
    read_s = token * num_tokens + token_context * (num_tokens * start + num_tokens * num_tokens // 2)
    return num_steps * every_step_s + read_s + chunk_context * fetched


class Load(Document):
    """Describes a replica at one moment: what it holds, what waits there, and what its steps take."""

    version: Literal[1] = 1
    model: str
    at_s: float  # by the wall clock of its machine
    identity: str  # of the model, dtype and what else makes keys and values differ
    rotary: str  # of prompts whose length does not change the rotation
    block_size: int
    num_blocks: int
    num_free_blocks: int  # that a prompt can get; cached ones are among them
    num_running: int
    num_waiting: int
    num_decodes: int  # of those that run
    decode_contexts: int  # tokens before them
    num_unread_tokens: int  # of prompts that wait or are being read
    step_tokens: int  # that a step reads of prompts
    # Seconds: step, token, token x context, decode and chunk context.
    step_cost: tuple[float, float, float, float, float]
    backlog_s: float  # until every prompt that is there has been read
    hash_divisor: int = 1  # hashes that it does not divide are left out
    cached: str = ""  # the first four bytes of the hash of each cached block, in base64

    def reading_s(self, start: int, end: int) -> float:
        """Predicts how long tokens [start, end) of a prompt take beside the decodes that run."""
        beside = StepLoad(num_tokens=self.num_decodes, decode_contexts=self.decode_contexts)
        return reading_s(self.step_cost, self.step_tokens, beside, start, end)

    @property
    def hashes(self) -> frozenset[int]:
        return frozenset(array("I", b64decode(self.cached)))


def packed(hashes: Iterable[int]) -> tuple[int, str]:
    """Packs hashes into (their divisor, base64), so many as a document may hold."""
    found, divisor = list(hashes), 1
    while len(found) > MAX_HASHES:
        divisor *= 2
        found = [one for one in found if one % divisor == 0]
    return divisor, b64encode(array("I", found).tobytes()).decode()


class LoadMeter:
    """Reads the load of a scheduler, and fits what its steps take where the scheduler itself does not."""

    def __init__(self) -> None:
        self._cost = StepCost((0.0, 1 / FIRST_GUESS_TOKENS_PER_S, 0.0, 0.0, 0.0))

    def take_step(self, plan: StepPlan, result: StepResult) -> None:
        self._cost.observe(StepLoad.of(plan.chunks), result.elapsed_s)

    def load(self, scheduler: Scheduler, *, model: str, identity: str, rotary: str) -> Load:
        """Reads it between two steps."""
        limits, budget, pool = scheduler.limits, scheduler.budget, scheduler.pool
        cost = self._cost if budget.cost is None else budget.cost
        prompts = [s for s in scheduler.sequences.values() if s.is_prefilling]
        decodes = [s for s in scheduler.running.values() if not s.is_prefilling]
        ceiling = budget.ceiling or LONGEST_STEP
        beside = StepLoad(num_tokens=len(decodes), decode_contexts=sum(s.num_computed for s in decodes))
        known = [] if scheduler.prefix is None else scheduler.prefix.hashes
        divisor, cached = packed(map(short_hash, known))
        unread = [(s.num_computed, max(s.num_prompt_tokens, s.request.num_announced)) for s in prompts]
        load = Load(
            model=model,
            at_s=time.time(),
            identity=identity,
            rotary=rotary,
            block_size=limits.block_size,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_available,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_decodes=len(decodes),
            decode_contexts=beside.decode_contexts,
            num_unread_tokens=sum(end - start for start, end in unread),
            step_tokens=max(budget.floor, 1, budget.allowance(beside, 0, ceiling)),
            step_cost=tuple(cost.pace * value for value in cost.coefficients),
            backlog_s=0.0,
            hash_divisor=divisor,
            cached=cached,
        )
        return load.model_copy(update={"backlog_s": sum(load.reading_s(start, end) for start, end in unread)})
