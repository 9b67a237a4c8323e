"""Reading and writing on a processor beside other programs: each in its own process, asked in turns."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from penstock.bench.limits import DeviceLimits, least_product_s, least_step_s, limits_of_processor
from penstock.bench.peers import AS_STORED, Reader, ReaderSettings
from penstock.bench.probes import Measuring
from penstock.bench.work import SHAPES
from penstock.bench.workbench import BenchSettings, ProbeSizes, Workbench, seeded_prompt
from penstock.document import Document
from penstock.models.files import resolve
from penstock.models.quantization import quantization_of, stored_types
from penstock.models.spec import decoder_spec
from penstock.plan.machine import num_physical_cores, processor_name
from penstock.trace.environment import versions

NUM_WRITTEN = 32
LENGTHS = (2048, 8192, 16_384)
LONGEST_CONTEXT = 8192  # of all parts but reading
CHUNK_SIZES = (256, 512, 1024, 2048)
OWN_ROUNDS = 2  # where we are compared with ourselves, and a few hundredths decide
OURS: dict[str, dict[str, Any]] = {
    "penstock bfloat16": {"dtype": "bfloat16", "quantize": "none"},
    "penstock packed": {"quantize": "keep"},
}
THEIRS: dict[str, Any] = {
    "dtypes": ("bfloat16", "float32"),
    "chunk_sizes": (0,),
    "formats": ("bfloat16", "q8_0", AS_STORED),
}
FORMATS: dict[str, dict[str, Any]] = {name: {"dtype": name, "quantize": "none"} for name in ("float32", "bfloat16")}
FORMATS |= {name: {"quantize": name} for name in ("keep", "int8", "int4")}


class Row(Document):
    part: str
    what: str
    who: str
    tokens_per_s: float
    samples: list[float]
    share_of_limit: float | None = None  # of products where it reads, of memory where it writes; None: not known


class MemoryRow(Document):
    who: str
    num_tokens: int  # of the prompt
    base_bytes: int
    peak_bytes: int


class QualityRow(Document):
    weights: str
    perplexity: float
    mean_error: float  # of a token's log-probability, against float32
    largest_error: float


class CpuReport(Document):
    started_at: str  # ISO 8601, UTC
    processor: str
    versions: dict[str, str]  # of what this process uses, and of each program that was asked
    model: str
    threads: int
    repeats: int  # OWN_ROUNDS times as many where we are compared with ourselves
    limits: DeviceLimits  # the larger of those measured before and after the rows
    limit_faults: tuple[str, ...] = ()  # rows beyond a limit: then the limit is wrong, and the row's share with it
    rows: list[Row]
    memory: list[MemoryRow]
    quality: list[QualityRow]
    text_sha256: str  # of what the quality is measured on


def judged(report: CpuReport, limits: DeviceLimits) -> CpuReport:
    """Says of our own rows how much of the limit they reach, and which of them show that the limit is wrong."""
    rows = [_with_share(report.model, row, limits) for row in report.rows]
    faults = tuple(
        f"{row.part}, {row.what}, {row.who}: {row.share_of_limit:.0%} of a limit that was measured too low"
        for row in rows
        if row.share_of_limit is not None and row.share_of_limit > 1
    )
    return report.model_copy(update={"limits": limits, "rows": rows, "limit_faults": faults})


def _with_share(model: str, row: Row, limits: DeviceLimits) -> Row:
    """Adds to our rows their share of the limit: of products when reading, of the weights' bytes when writing."""
    if row.who not in OURS or row.part not in ("reading", "writing"):
        return row
    files, num_tokens = resolve(model), int(row.what.split()[0])
    spec = decoder_spec(files.config)
    if row.part == "reading":
        least_s = least_product_s(spec, num_tokens, limits) / num_tokens
    else:
        least_s = least_step_s(spec, [num_tokens], limits, quantization_of(files, OURS[row.who]["quantize"]))
    return row.model_copy(update={"share_of_limit": row.tokens_per_s * least_s})


def _in_fresh_process(function: Callable[..., Any], *arguments: object) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one reader does in its turn."""

    what: str
    who: str
    num_tokens: int
    run: Callable[[int], float]  # seed -> seconds


class CpuBench(Workbench):
    """A processor, measured part by part."""

    def __init__(
        self,
        model: str,
        *,
        peers: tuple[str, ...] = (),
        repeats: int = 3,
        lengths: Iterable[int] | None = None,
        threads: int | None = None,
        llama_python: str | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        measure_limits: Callable[[int], DeviceLimits] = lambda threads: _in_fresh_process(limits_of_processor, threads),
    ) -> None:
        self.threads = threads or num_physical_cores()
        settings = BenchSettings(model=model, peers=peers, threads=self.threads, device="cpu")
        sizes = ProbeSizes(repeats=repeats, prompt_lengths=tuple(lengths or LENGTHS))
        super().__init__(settings, sizes, llama_python=llama_python)
        self.context = min(LONGEST_CONTEXT, max(sizes.prompt_lengths))
        self.say = say
        self._measure_limits = partial(measure_limits, self.threads)
        self._versions = versions()
        self._rows: list[Row] = []
        self._peaks: list[MemoryRow] = []
        self._qualities: list[QualityRow] = []

    def run(self, parts: Iterable[str]) -> CpuReport:
        lengths = self.sizes.prompt_lengths
        every: dict[str, Callable[[], None]] = {
            "reading": lambda: self._by_length("reading", lengths, _reads),
            "chunks": self._chunks,
            # After prompts whose reading is not counted.
            "writing": lambda: self._by_length("writing", {min(n, LONGEST_CONTEXT) for n in lengths}, _writes),
            "streams": self._streams,
            "memory": self._memory,
            "quality": self._quality,
            "qwen3": self._qwen3,
        }
        started_at, limits = datetime.now(UTC).isoformat(timespec="seconds"), self._measure_limits()
        for part in parts:
            self.say(f"{part} ...")
            every[part]()
        report = CpuReport(
            started_at=started_at,
            processor=processor_name(),
            versions=self._versions,
            model=self.settings.model,
            threads=self.threads,
            repeats=self.sizes.repeats,
            limits=limits,
            rows=self._rows,
            memory=self._peaks,
            quality=self._qualities,
            text_sha256=hashlib.sha256(_text().encode()).hexdigest(),
        )
        return judged(report, limits.larger(self._measure_limits()))

    def _chunks(self) -> None:
        with self.warm(self._own(self.context + 64)[:1]) as (reader,):
            works = [_reads(reader, self.context, f"{self.context} tokens", chunk_size=size) for size in CHUNK_SIZES]
            self.in_turns("chunks", works, rounds=OWN_ROUNDS)

    def _streams(self) -> None:
        with self.warm(self._own(2048)) as readers:
            works = [_writes_together(reader, 1024, num_streams) for num_streams in (1, 8) for reader in readers]
            self.in_turns("streams", works, rounds=OWN_ROUNDS)

    def _memory(self) -> None:
        """Measures one process after another, each with one prompt."""
        length = self.context
        for one in self._readers(length + 64):
            with Reader(one) as reader:
                loaded, reading = reader.loaded, reader.read(_prompt(reader, length, 0))
            base, peak = loaded.library_bytes, max(loaded.load_peak_bytes, reading.peak_bytes)
            self._versions[one.reader] = loaded.version
            self._peaks.append(MemoryRow(who=one.name, num_tokens=length, base_bytes=base, peak_bytes=peak))
            self.say(f"memory   {length} tokens {one.name:<28} {peak / 1e6:>8.0f} MB, {base / 1e6:.0f} of it libraries")

    def _quality(self) -> None:
        """Measures the perplexity of a text, and how far a token's log-probability is from float32's."""
        exact: list[float] = []
        for weights, more in FORMATS.items():
            if weights == "keep" and resolve(self.settings.model).gguf is None:
                continue
            with Reader(self.own_reader(weights, **more)) as reader:
                losses = reader.losses(_text(), 1024)
            exact = exact or losses
            errors = [abs(one - other) for one, other in zip(losses, exact, strict=True)]
            row = QualityRow(
                weights=weights,
                perplexity=math.exp(statistics.mean(losses)),
                mean_error=statistics.mean(errors),
                largest_error=max(errors),
            )
            self._qualities.append(row)
            self.say(
                f"quality  {weights:<9} perplexity {row.perplexity:.4f}, log-probability off by {row.mean_error:.4f} "
                f"on average and {row.largest_error:.3f} at most"
            )

    def _qwen3(self) -> None:
        """Measures a larger shape with random weights."""
        from penstock.bench.random_model import save_random_model

        with tempfile.TemporaryDirectory() as folder:
            _in_fresh_process(save_random_model, SHAPES["qwen3-0.6b"], folder)
            shared: dict[str, Any] = {"model": folder, "context": 8192 + 64}
            own = self.own_reader("penstock bfloat16", dtype="bfloat16", **shared)
            peers = [peer for peer in self.settings.peers if peer == "transformers"]
            with self.warm([own, *self.peer_readers(**shared, peers=peers, chunk_sizes=(0,))]) as readers:
                for length in (2048, 8192):
                    self.in_turns("qwen3", [_reads(reader, length, f"read {length}") for reader in readers])
                self.in_turns("qwen3", [_writes(reader, 2048, "write at 2048") for reader in readers])

    def in_turns(self, part: str, works: Sequence[Job], *, rounds: int = 1) -> list[Row]:
        """`rounds`: of all repeats, more than one where rows that are close to each other are compared."""
        measuring, rows = Measuring(self), []
        for seed in measuring.rounds(self.sizes.repeats * rounds):
            for work in works:
                measuring.note(f"{work.what}, {work.who}", f"{part}_s", work.run(seed))
        for work, measure in zip(works, measuring.measures, strict=True):
            speeds = [work.num_tokens / seconds for seconds in measure.samples]
            median = statistics.median(speeds)
            rows.append(Row(part=part, what=work.what, who=work.who, tokens_per_s=median, samples=speeds))
            self.say(f"{part:<8} {work.what:<12} {work.who:<28} {median:>8.1f} tok/s")
        self._rows.extend(rows)
        return rows

    @contextmanager
    def warm(self, settings: Iterable[ReaderSettings]) -> Generator[list[Reader]]:
        with super().warm(settings) as readers:
            self._versions.update({reader.settings.reader: reader.loaded.version for reader in readers})
            yield readers

    def _own(self, context: int) -> list[ReaderSettings]:
        is_quantized = bool(stored_types(resolve(self.settings.model)))
        ways = {name: more for name, more in OURS.items() if is_quantized or more["quantize"] != "keep"}
        return [self.own_reader(name, context=context, **more) for name, more in ways.items()]

    def _readers(self, context: int) -> list[ReaderSettings]:
        return [*self._own(context), *self.peer_readers(context, **THEIRS)]

    def _by_length(self, part: str, lengths: Collection[int], work_of: Callable[[Reader, int, str], Job]) -> None:
        """Gives the shortest prompt to all; longer ones to us in every format and to each peer's fastest way so far."""
        with self.warm(self._readers(max(lengths) + 64)) as readers:
            for length in sorted(lengths):
                rows = self.in_turns(part, [work_of(reader, length, f"{length} tokens") for reader in readers])
                programs = {reader.settings.name: reader.settings.reader for reader in readers}
                kept = {*OURS, *fastest_ways(rows, programs)}
                readers = [reader for reader in readers if reader.settings.name in kept]


def fastest_ways(rows: Iterable[Row], programs: Mapping[str, str]) -> set[str]:
    """The names of the rows that are the fastest of their program."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.tokens_per_s):
        best[programs[row.who]] = row
    return {row.who for row in best.values()}


def _prompt(reader: Reader, length: int, seed: int) -> list[int]:
    return seeded_prompt(reader.settings.model, length, seed)


def _reads(reader: Reader, length: int, what: str, **options: int) -> Job:
    who = ", ".join((reader.settings.name, *(f"chunk {size}" for size in options.values())))
    prompt = partial(_prompt, reader, length)
    return Job(what=what, who=who, num_tokens=length, run=lambda seed: reader.read(prompt(seed), **options).read_s)


def _writes(reader: Reader, context: int, what: str) -> Job:
    who, prompt, count = reader.settings.name, partial(_prompt, reader, context), NUM_WRITTEN
    return Job(what=what, who=who, num_tokens=count, run=lambda seed: reader.read(prompt(seed), count + 1).write_s)


def _writes_together(reader: Reader, context: int, num_streams: int) -> Job:
    def run(seed: int) -> float:
        prompts = [_prompt(reader, context, seed * num_streams + stream) for stream in range(num_streams)]
        return reader.write_together(prompts, NUM_WRITTEN)

    what = f"{num_streams} at {context}"
    return Job(what=what, who=reader.settings.name, num_tokens=NUM_WRITTEN * num_streams, run=run)


def _text() -> str:
    """Prose that every Python has."""
    from pydoc_data.topics import topics

    return topics["class"] + topics["import"]
