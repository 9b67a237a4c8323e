"""`Workbench`: what probes work with: one engine, seeded prompts, readers in fresh processes, and a yardstick."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.bench.peers import Reader, ReaderSettings, peer_settings
from penstock.bench.prompts import seeded_prompt
from penstock.config import DEFAULT_MODEL
from penstock.document import Document

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.engine.engine import Engine
    from penstock.request import Output

OWN = "penstock"
YARDSTICK_NUMBERS = 60_000  # written out in some ten milliseconds


class BenchSettings(Document):
    model: str = DEFAULT_MODEL
    peers: tuple[str, ...] = ()
    seed: int = 0
    dtype: str = "auto"
    threads: int | None = None
    device: str = "auto"
    lane: str | None = None


class ProbeSizes(Document):
    """How large the probes are. A chunk size of 0 reads the prompt whole."""

    repeats: int
    least_seconds: float = 0.0  # of a probe: short ones go through more rounds
    ttft_tokens: int
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    sweep_tokens: int
    chunk_sizes: tuple[int, ...]
    memory_lengths: tuple[int, ...]
    num_streams: int
    beside_tokens: int
    latency_target_ms: float
    num_turns: int
    turn_tokens: int
    answer_tokens: int
    reopen_tokens: int

    @property
    def context(self) -> int:
        """The longest of all, and room for an answer."""
        chat = self.num_turns * (self.turn_tokens + self.answer_tokens)
        prompts = (*self.prompt_lengths, self.sweep_tokens, self.beside_tokens, self.reopen_tokens, chat)
        return max(prompts) + max(self.output_lengths) + 1024


class Workbench:
    """`trace`: where the steps of its engine are written."""

    def __init__(self, settings: BenchSettings, sizes: ProbeSizes, *, trace: Path | None = None) -> None:
        self.settings = settings
        self.sizes = sizes
        self._trace = trace
        self._stack = ExitStack()

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @cached_property
    def engine(self) -> Engine:
        """Loaded when a probe first needs it, warm, and shared by all that measure times."""
        from penstock.engine.engine import Engine

        settings = self.settings
        engine = Engine.load(
            settings.model,
            context=self.sizes.context,
            dtype=settings.dtype,
            threads=settings.threads,
            device=settings.device,
            lane=settings.lane,
            trace=self._trace,
        )
        self._stack.enter_context(engine)
        engine.generate(self.prompt(64, "warm"), max_tokens=4, ignore_eos=True)
        return engine

    def prompt(self, length: int, *key: object) -> list[int]:
        """Seeded tokens: equal keys give equal prompts, others share no prefix."""
        return seeded_prompt(self.settings.model, length, self.settings.seed, *key)

    def write(self, prompt: list[int], num_tokens: int = 1, *, chunk_size: int | None = None) -> Output:
        return self.engine.generate(prompt, max_tokens=num_tokens, ignore_eos=True, chunk_size=chunk_size)

    def forget_prefixes(self) -> None:
        engine = self.engine
        if engine.scheduler.prefix is not None:
            engine.scheduler.prefix.clear()
        if engine.states is not None:
            engine.states.clear()

    def yardstick(self) -> float:
        """Seconds of fixed work, so that a machine that others slow down is told from code that became slow.

        Work for the interpreter: whoever shares the core slows it as much as a step, where a hash would not notice.
        """
        started = time.perf_counter()
        _ = {number: str(number) for number in range(YARDSTICK_NUMBERS)}
        return time.perf_counter() - started

    def own_reader(self, name: str, *, context: int, chunk_size: int | None) -> ReaderSettings:
        settings = self.settings
        return ReaderSettings(
            name=name,
            model=settings.model,
            context=context,
            chunk_size=chunk_size,
            dtype=settings.dtype,
            threads=settings.threads,
            device=settings.device,
            lane=settings.lane,
        )

    def peer_readers(self, context: int) -> list[ReaderSettings]:
        settings = self.settings
        dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
        return peer_settings(
            settings.peers,
            settings.model,
            context=context,
            threads=settings.threads,
            device=settings.device,
            dtypes=(dtype,),
        )

    @contextmanager
    def peers(self, context: int) -> Generator[list[Reader]]:
        """Every way of every peer, loaded and waiting."""
        with ExitStack() as stack:
            yield [stack.enter_context(Reader(settings)) for settings in self.peer_readers(context)]
