"""`Workbench`: what measurements work with: engines, seeded prompts, readers in fresh processes, and a yardstick."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from penstock.bench.peers import Reader, ReaderSettings, peer_settings
from penstock.bench.work import GREEDY, Streams
from penstock.config import DEFAULT_MODEL
from penstock.document import Document
from penstock.engine.calibration import random_prompt
from penstock.models.files import resolve
from penstock.prompt.random_tokens import random_tokens
from penstock.request import Token

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.request import Output

OWN = "penstock"
OF_ENGINE = {"model", "dtype", "threads", "device", "lane"}  # settings of a measurement that an engine is loaded with
NUM_WARMING = 48  # tokens that a reader reads before it is measured
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
    """How large the probes are, small unless said. A chunk size of 0 reads the prompt whole."""

    repeats: int = 5
    least_seconds: float = 0.0  # of a probe: short ones go through more rounds
    ttft_tokens: int = 128
    prompt_lengths: tuple[int, ...] = (128, 512, 1024)
    output_lengths: tuple[int, ...] = (8, 32)
    sweep_tokens: int = 768
    chunk_sizes: tuple[int, ...] = (0, 64, 256)
    memory_lengths: tuple[int, ...] = (512, 2048)
    num_streams: int = 3
    beside_tokens: int = 1280
    latency_target_ms: float = 150
    num_turns: int = 20
    turn_tokens: int = 16
    answer_tokens: int = 1
    reopen_tokens: int = 1024

    @property
    def context(self) -> int:
        """The longest of all, and room for an answer."""
        chat = self.num_turns * (self.turn_tokens + self.answer_tokens)
        prompts = (*self.prompt_lengths, self.sweep_tokens, self.beside_tokens, self.reopen_tokens, chat)
        return max(prompts) + max(self.output_lengths) + 1024


@cache
def vocabulary_size(model: str) -> int:
    config = resolve(model, weights=False).config
    return int((config.get("text_config") or config)["vocab_size"])


def seeded_prompt(model: str, length: int, *key: object) -> list[int]:
    """Draws tokens: equal keys give equal prompts; others share no prefix."""
    return random_tokens(length, f"{length} {key}", end=vocabulary_size(model))


class EngineSubject:
    """Our engine, as the fixed work sees any engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sampling = GREEDY

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def submit(self, prompt: Sequence[int], num_tokens: int) -> int:
        temperature, top_p = self.sampling.temperature, self.sampling.top_p
        return self.engine.submit(prompt, max_tokens=num_tokens, ignore_eos=True, temperature=temperature, top_p=top_p)

    def step(self) -> list[int]:
        return [event.request_id for event in self.engine.step() if isinstance(event, Token)]

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> None:
        for prompt, count in zip(prompts, num_tokens, strict=True):
            self.submit(prompt, count)
        self.abort(())

    def write_together(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, spare: int = 256, until: float = math.inf
    ) -> tuple[int, float]:
        """Tells what `Streams.write` does; `spare`: what those that begin first may write before the last."""
        streams = Streams(self, prompts, num_tokens + spare)
        found = streams.write(num_tokens, until=until)
        self.abort(streams.ids)
        return found

    def losses(self, tokens: list[int], chunk_size: int) -> list[float]:
        """Tells the loss of each token but the first in nats."""
        found = self.engine.generate(tokens, max_tokens=1, prompt_logprobs=0, chunk_size=chunk_size).prompt_logprobs
        return [-entry.logprob for entry in found or () if entry is not None]

    def abort(self, ids: Sequence[int]) -> None:
        """Ends these, and runs the others to their end."""
        for request_id in ids:
            self.engine.abort(request_id)
        while self.engine.has_work:
            self.engine.step()


class Workbench:
    """`shape`: the config of engines with random weights, in place of a model. `llama_python`: an interpreter that has
    llama_cpp. `loading`: settings of its engines beyond those of the measurement.
    """

    def __init__(
        self,
        settings: BenchSettings,
        sizes: ProbeSizes | None = None,
        *,
        shape: Mapping[str, Any] | None = None,
        llama_python: str | None = None,
        **loading: Any,
    ) -> None:
        self.settings = settings
        self.sizes = sizes or ProbeSizes()
        self._shape = shape
        self._loading = {"context": self.sizes.context, **loading}
        self._llama_python = llama_python
        self._has_files = shape is None
        self._stack = ExitStack()

    @classmethod
    def over(cls, engine: Engine, sizes: ProbeSizes | None = None) -> Workbench:
        """Works with an engine that is loaded already, and stays open."""
        bench = cls(BenchSettings(model=engine.model.name), sizes)
        bench.engine, bench._has_files = engine, False
        return bench

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @cached_property
    def engine(self) -> Engine:
        """Loaded when a probe first needs it, warm, and shared by all that measure times."""
        engine = self._stack.enter_context(self.load())
        engine.generate(random_prompt(engine, 64), max_tokens=4, ignore_eos=True)
        return engine

    def load(self, **others: Any) -> Engine:
        """Loads an engine that has computed nothing yet; `others`: settings in place of those of the workbench."""
        from penstock.bench.random_model import random_engine
        from penstock.engine.engine import Engine

        settings: dict[str, Any] = {**self.settings.model_dump(include=OF_ENGINE), **self._loading, **others}
        return Engine.load(**settings) if self._shape is None else random_engine(**settings | {"model": self._shape})

    def prompt(self, length: int, *key: object) -> list[int]:
        """Seeded tokens: equal keys give equal prompts, others share no prefix."""
        key = (self.settings.seed, *key)
        if self._has_files:
            return seeded_prompt(self.settings.model, length, *key)
        return random_prompt(self.engine, length, f"{length} {key}")

    def write(self, prompt: list[int], num_tokens: int = 1, *, chunk_size: int | None = None) -> Output:
        return self.engine.generate(prompt, max_tokens=num_tokens, ignore_eos=True, chunk_size=chunk_size)

    def yardstick(self) -> float:
        """Seconds of fixed work, so that a machine that others slow down is told from code that became slow.

        Work for the interpreter: whoever shares the core slows it as much as a step, where a hash would not notice.
        """
        started = time.perf_counter()
        _ = {number: str(number) for number in range(YARDSTICK_NUMBERS)}
        return time.perf_counter() - started

    def own_reader(self, name: str, **others: Any) -> ReaderSettings:
        """Says how a fresh process loads what the engine here loads, but for what is named."""
        return ReaderSettings(name=name, **(self.settings.model_dump(include=OF_ENGINE) | others))

    def peer_readers(self, context: int, **ways: Any) -> list[ReaderSettings]:
        """Lists every way of every peer; `ways`: others than those that are measured beside one data type."""
        usual: dict[str, Any] = self.settings.model_dump(include={"peers", "model", "threads", "device"})
        usual["dtypes"] = ("bfloat16" if self.settings.dtype == "auto" else self.settings.dtype,)
        return peer_settings(**(usual | ways), context=context, llama_python=self._llama_python)

    @contextmanager
    def warm(self, settings: Iterable[ReaderSettings]) -> Generator[list[Reader]]:
        """Loads readers that wait beside each other; each has read and written a little before it is measured."""
        with ExitStack() as stack:
            readers = [stack.enter_context(Reader(one)) for one in settings]
            for reader in readers:
                reader.read(seeded_prompt(reader.settings.model, NUM_WARMING, "warm"), 4)
            yield readers
