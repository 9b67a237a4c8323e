"""Named, seeded measurements. Each round goes through all variants, so that noise hits them alike."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.bench.peers import Reader, ReaderSettings
from penstock.bench.samples import Measure, ProbeResult
from penstock.bench.work import Beside, Streams
from penstock.bench.workbench import OWN, BenchSettings, EngineSubject, ProbeSizes, Workbench
from penstock.config import PrefillPriority
from penstock.errors import PenstockError
from penstock.request import Output

STREAM_CONTEXT = 100
NUM_QUIET_STEPS = 4
MAX_WRITTEN = 16_000  # of a stream beside a long prompt
MAX_SECONDS_BESIDE = 300.0
MAX_ROUNDS = 100
PENSTOCK = (sys.executable, "-m", "penstock.cli.main")

Probe = Callable[[Workbench], ProbeResult]


class Measuring:
    """A probe while it runs: samples as they come in, in whatever order the variants are interleaved."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.only_drawn: set[str] = set()  # quantities that are not compared with earlier runs
        self._samples: dict[tuple[str, str, int | None], list[float]] = {}
        self._yardstick_s: list[float] = []
        self._started = time.perf_counter()

    def note(self, variant: str, quantity: str, value: float, x: int | None = None) -> None:
        self._samples.setdefault((variant, quantity, x), []).append(value)

    def rounds(self, fewest: int | None = None, *, least_s: float | None = None) -> Iterator[int]:
        """Goes on until the probe has lasted for a while: a neighbour busy for a second hits some samples, not all."""
        fewest = fewest or self.bench.sizes.repeats
        least_s = self.bench.sizes.least_seconds if least_s is None else least_s
        for index in range(max(fewest, MAX_ROUNDS)):
            self._yardstick_s.append(self.bench.yardstick())
            if index >= fewest and self._seconds >= least_s:
                break
            yield index

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def measures(self) -> tuple[Measure, ...]:
        return tuple(
            Measure(
                variant=variant,
                quantity=quantity,
                x=x,
                samples=tuple(samples),
                is_compared=quantity not in self.only_drawn,
            )
            for (variant, quantity, x), samples in self._samples.items()
        )

    def result(self, name: str, axis: str | None) -> ProbeResult:
        return ProbeResult(
            name=name,
            axis=axis,
            seed=self.bench.settings.seed,
            seconds=self._seconds,
            yardstick_s=tuple(self._yardstick_s),
            measures=self.measures,
        )


# In the order in which suites take them: those that start fresh processes come first, before this one holds a model.
PROBES: dict[str, Probe] = {}


def probe(name: str, axis: str | None = None) -> Callable[[Callable[[Measuring], None]], Probe]:
    """Makes a probe of that name out of what a function measures; `axis`: what its `x` counts."""

    def add(measure: Callable[[Measuring], None]) -> Probe:
        def run(bench: Workbench) -> ProbeResult:
            measuring = Measuring(bench)
            measure(measuring)
            return measuring.result(name, axis)

        PROBES[name] = run
        return run

    return add


@probe("start-up")
def start_up(measuring: Measuring) -> None:
    """Times commands that need no torch, from the start of their process to its end."""
    commands = {
        "penstock --help": ("--help",),
        "penstock plan": ("plan", measuring.bench.settings.model, "--prompt-tokens", "64"),
    }
    for _ in measuring.rounds():
        for name, arguments in commands.items():
            started = time.perf_counter()
            subprocess.run([*PENSTOCK, *arguments], stdout=subprocess.DEVNULL, check=True)
            measuring.note(name, "wall_s", time.perf_counter() - started)


@probe("cold-load")
def cold_load(measuring: Measuring) -> None:
    """Times a process that starts, loads the model and writes one token."""
    bench = measuring.bench
    prompt, context = bench.prompt(bench.sizes.ttft_tokens), bench.sizes.ttft_tokens + 64
    readers = [bench.own_reader(OWN, context=context), *bench.peer_readers(context)]
    for _ in measuring.rounds():
        for settings in readers:
            started = time.perf_counter()
            with Reader(settings) as reader:
                reader.read(prompt)
                measuring.note(settings.name, "first_token_s", time.perf_counter() - started)
                measuring.note(settings.name, "load_s", reader.loaded.load_s)


@probe("memory", axis="prompt tokens")
def memory(measuring: Measuring) -> None:
    """Tells the peak of a fresh process that reads one prompt, against its length."""
    bench = measuring.bench
    for _ in measuring.rounds(1, least_s=0.0):
        for length in bench.sizes.memory_lengths:
            context = length + 64
            own = [
                bench.own_reader(f"{OWN}, {way}", context=context, chunk_size=size)
                for way, size in (("in chunks", None), ("whole", 0))
            ]
            for settings in (*own, *bench.peer_readers(context)):
                peak_bytes = _peak_bytes(settings, bench.prompt(length, "memory"))
                measuring.note(settings.name, "peak_bytes", peak_bytes, length)


@probe("warm-ttft", axis="prompt tokens")
def warm_ttft(measuring: Measuring) -> None:
    """Times a short prompt to its first token, on an engine that is ready."""
    bench, length = measuring.bench, measuring.bench.sizes.ttft_tokens
    bench.write(bench.prompt(length, "warm"))
    for index in measuring.rounds(3 * bench.sizes.repeats):
        measuring.note(OWN, "ttft_s", _ttft_s(bench.write(bench.prompt(length, "ttft", index))), length)


@probe("prompt-scaling", axis="prompt tokens")
def prompt_scaling(measuring: Measuring) -> None:
    """Times reading, against the length of the prompt."""
    bench, lengths = measuring.bench, measuring.bench.sizes.prompt_lengths
    with bench.warm(bench.peer_readers(max(lengths) + 64)) as readers:
        bench.write(bench.prompt(min(lengths), "warm"))
        for index in measuring.rounds():
            for length in lengths:
                prompt = bench.prompt(length, "scaling", index)
                measuring.note(OWN, "read_s", _ttft_s(bench.write(prompt)), length)
                for reader in readers:
                    measuring.note(reader.settings.name, "read_s", reader.read(prompt).read_s, length)


@probe("output-scaling", axis="written tokens")
def output_scaling(measuring: Measuring) -> None:
    """Times writing, against the length of the answer. The first token counts as read."""
    bench, sizes = measuring.bench, measuring.bench.sizes
    with bench.warm(bench.peer_readers(sizes.ttft_tokens + max(sizes.output_lengths) + 64)) as readers:
        for index in measuring.rounds():
            for length in sizes.output_lengths:
                prompt = bench.prompt(sizes.ttft_tokens, "output", length, index)
                measuring.note(OWN, "write_s", bench.write(prompt, length + 1).decode_s, length)
                for reader in readers:
                    measuring.note(reader.settings.name, "write_s", reader.read(prompt, length + 1).write_s, length)


@probe("chunk-sweep", axis="chunk size")
def chunk_sweep(measuring: Measuring) -> None:
    """Tells time and peak of one prompt, against the chunk size; 0 is the whole prompt in one chunk."""
    bench, length = measuring.bench, measuring.bench.sizes.sweep_tokens
    for index in measuring.rounds():
        for chunk_size in bench.sizes.chunk_sizes:
            prompt = bench.prompt(length, "sweep", chunk_size, index)
            output = bench.write(prompt, chunk_size=chunk_size)
            measuring.note(OWN, "read_s", _ttft_s(output), chunk_size)
    for chunk_size in bench.sizes.chunk_sizes:
        settings = bench.own_reader(OWN, context=length + 64, chunk_size=chunk_size)
        measuring.note(OWN, "peak_bytes", _peak_bytes(settings, bench.prompt(length, "sweep")), chunk_size)


@probe("concurrency")
def concurrency(measuring: Measuring) -> None:
    """Tells the gaps between the tokens of running streams while a long prompt is read beside them."""
    from penstock.engine.calibration import calibrate

    bench, sizes, engine = measuring.bench, measuring.bench.sizes, measuring.bench.engine
    measuring.only_drawn.add("gap_s")
    with engine.limits() as budget:
        budget.cost, ceiling = budget.cost or calibrate(engine), budget.ceiling
        variants = {
            f"target {sizes.latency_target_ms:g} ms": (ceiling, sizes.latency_target_ms / 1e3),
            f"chunks of {ceiling}": (ceiling, None),
            "whole prompt": (0, None),
        }
        for index in measuring.rounds():
            for name, (budget.ceiling, budget.target_s) in variants.items():
                beside, num_read = _beside(bench, MAX_SECONDS_BESIDE, index)
                if num_read < sizes.beside_tokens:
                    raise PenstockError(f"{name}: {num_read} tokens in {MAX_SECONDS_BESIDE:g} s, not all of them.")
                for gap_s in beside.gaps_s:
                    measuring.note(name, "gap_s", gap_s)
                measuring.note(name, "longest_gap_s", beside.gap_s(1.0))
                measuring.note(name, "ttft_s", beside.seconds)
                bench.engine.forget_prefixes()


@probe("chat-growth", axis="turn")
def chat_growth(measuring: Measuring) -> None:
    """Times the first token of each turn of a conversation, with its earlier turns kept and without."""
    bench, sizes = measuring.bench, measuring.bench.sizes
    for index in measuring.rounds():
        for name, keeps_prefixes in (("prefix kept", True), ("read again", False)):
            bench.engine.forget_prefixes()
            conversation: list[int] = []
            for turn in range(1, sizes.num_turns + 1):
                conversation += bench.prompt(sizes.turn_tokens, "turn", turn, index)
                output = bench.write(conversation, sizes.answer_tokens)
                measuring.note(name, "ttft_s", _ttft_s(output), turn)
                measuring.note(name, "unread_tokens", len(conversation) - output.num_cached_tokens, turn)
                conversation += output.token_ids
                if not keeps_prefixes:
                    bench.engine.forget_prefixes()


@probe("reopen", axis="prompt tokens")
def reopen(measuring: Measuring) -> None:
    """Times a prompt that was cancelled half-way and comes again, beside the same prompt when it is new."""
    bench, length = measuring.bench, measuring.bench.sizes.reopen_tokens
    for index in measuring.rounds():
        prompt = bench.prompt(length, "reopen", index)
        bench.engine.forget_prefixes()
        measuring.note("new", "ttft_s", _ttft_s(bench.write(prompt)), length)
        bench.engine.forget_prefixes()
        _cancel_half_way(bench, prompt)
        again = bench.write(prompt)
        measuring.note("after a cancel", "ttft_s", _ttft_s(again), length)
        measuring.note("after a cancel", "unread_tokens", length - again.num_cached_tokens, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class StallResult:
    """Gaps are times between two tokens of one stream, from the long prompt's arrival to its first token."""

    name: str
    num_gaps: int
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    num_read: int  # of the long prompt; less than all of it where the time ran out
    seconds: float  # to its first token, or until the time ran out
    tokens_per_s: float  # prompt tokens read and tokens written, together


def stalls(settings: BenchSettings, sizes: ProbeSizes, most_seconds: float) -> Iterator[StallResult]:
    """Measures the gaps under each priority and a target, in chunks without one, and with chunking off.

    `most_seconds`: of one variant; a priority may keep the prompt waiting for very long. None of its tokens may come
    from the prefix cache.
    """
    target_ms, context = sizes.latency_target_ms, sizes.beside_tokens + 16_384
    bench = Workbench(settings, sizes, context=context, latency_target_ms=target_ms, prefix_cache=False)
    with bench, bench.engine.limits() as budget:
        ceiling = budget.ceiling
        variants: dict[str, tuple[PrefillPriority, int, float | None]] = {
            f"{priority.value}, target {target_ms:.0f} ms": (priority, ceiling, target_ms / 1e3)
            for priority in PrefillPriority
        }
        variants[f"interleaved, chunks of {ceiling}, no target"] = (PrefillPriority.INTERLEAVED, ceiling, None)
        variants["chunking off"] = (PrefillPriority.INTERLEAVED, 0, None)
        for name, (priority, budget.ceiling, budget.target_s) in variants.items():
            bench.engine.set_priority(priority)
            beside, num_read = _beside(bench, most_seconds)
            yield StallResult(
                name=name,
                num_gaps=len(beside.gaps_s),
                gap_p50_ms=beside.gap_s(0.5) * 1e3,
                gap_p99_ms=beside.gap_s(0.99) * 1e3,
                gap_max_ms=beside.gap_s(1.0) * 1e3,
                num_read=num_read,
                seconds=beside.seconds,
                tokens_per_s=(num_read + beside.num_written) / beside.seconds,
            )


def _beside(bench: Workbench, most_seconds: float, *key: int) -> tuple[Beside, int]:
    """What the streams saw, and how much of the long prompt was read."""
    subject, engine = EngineSubject(bench.engine), bench.engine
    prompts = [bench.prompt(STREAM_CONTEXT, "stream", n, *key) for n in range(bench.sizes.num_streams)]
    streams = Streams(subject, prompts, min(MAX_WRITTEN, engine.scheduler.capacity - STREAM_CONTEXT))
    streams.run_quietly(NUM_QUIET_STEPS)
    long_prompt = bench.prompt(bench.sizes.beside_tokens, "beside", *key)
    beside = streams.read_beside(long_prompt, most_seconds=most_seconds)
    unread = engine.scheduler.sequences.get(beside.request)  # None: its only token is written
    num_read = len(long_prompt) if unread is None else unread.num_computed
    subject.abort([*streams.ids, beside.request])
    return beside, num_read


def _cancel_half_way(bench: Workbench, prompt: list[int]) -> None:
    engine = bench.engine
    # Eight chunks, so that there is a half-way on any machine.
    request_id = engine.submit(prompt, max_tokens=1, chunk_size=max(1, len(prompt) // 8))
    while engine.scheduler.sequences[request_id].num_computed < len(prompt) // 2:
        engine.step()
    engine.abort(request_id)


def _peak_bytes(settings: ReaderSettings, prompt: list[int]) -> int:
    with Reader(settings) as reader:
        return reader.read(prompt, 2).peak_bytes


def _ttft_s(output: Output) -> float:
    assert output.ttft_s is not None, "a request without a token"
    return output.ttft_s
