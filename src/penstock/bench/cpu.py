"""Reading and writing on a processor beside other programs: each in its own process, asked in turns."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock.bench.peers import AS_STORED, Reader, ReaderSettings, peer_settings
from penstock.bench.prompts import seeded_prompt
from penstock.bench.versions import versions
from penstock.document import Document
from penstock.models.files import resolve
from penstock.models.packing import Packing, matrix_bytes, packing_of, stored_formats
from penstock.models.projections import Projection, layer_projections, outer_projection
from penstock.models.spec import decoder_spec
from penstock.plan.machine import num_physical_cores, processor_name

PARTS = ("reading", "chunks", "writing", "streams", "memory", "quality", "qwen3")
NUM_WRITTEN = 32
NUM_WARMING = 48
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
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


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


class Limits(Document):
    product_gflops: float
    read_gb_per_s: float


class CpuReport(Document):
    started_at: str  # ISO 8601, UTC
    processor: str
    versions: dict[str, str]  # of what this process uses, and of each program that was asked
    model: str
    threads: int
    repeats: int  # OWN_ROUNDS times as many where we are compared with ourselves
    limits: Limits
    rows: list[Row]
    memory: list[MemoryRow]
    quality: list[QualityRow]
    text_sha256: str  # of what the quality is measured on


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSettings:
    model: str
    parts: tuple[str, ...]
    peers: tuple[str, ...]
    repeats: int
    threads: int
    lengths: tuple[int, ...]
    say: Callable[[str], None] = field(repr=False)

    def own(self, context: int | None = None) -> list[ReaderSettings]:
        shared: dict[str, Any] = {"model": self.model, "threads": self.threads, "context": context}
        is_quantized = bool(stored_formats(resolve(self.model)))
        ways = {name: more for name, more in OURS.items() if is_quantized or more["quantize"] != "keep"}
        return [ReaderSettings(name=name, **shared, **more) for name, more in ways.items()]

    def readers(self, context: int) -> list[ReaderSettings]:
        theirs = peer_settings(self.peers, self.model, context=context, threads=self.threads, **THEIRS)
        return [*self.own(context), *theirs]


def measure_cpu(settings: CpuSettings) -> CpuReport:
    with _fresh_process() as process:
        limits = process.submit(limits_of_processor, settings.threads).result()
    report = CpuReport(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=processor_name(),
        versions=versions(),
        model=settings.model,
        threads=settings.threads,
        repeats=settings.repeats,
        limits=limits,
        rows=[],
        memory=[],
        quality=[],
        text_sha256=hashlib.sha256(_text().encode()).hexdigest(),
    )
    for part in settings.parts:
        settings.say(f"{part} ...")
        MEASURES[part](settings, report)
    return report


def _fresh_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def limits_of_processor(threads: int) -> Limits:
    """The best of some tries: a product of many bfloat16 rows, and one sum over memory."""
    import torch

    torch.set_num_threads(threads)
    one, two, memory = torch.randn(1024, 1024), torch.randn(4096, 1024), torch.ones(64 * 2**20)
    one, two = one.bfloat16(), two.bfloat16()
    product = min(_seconds(lambda: one @ two.T) for _ in range(8))
    reading = min(_seconds(memory.sum) for _ in range(8))
    flops = 2 * one.numel() * two.shape[0]
    return Limits(product_gflops=flops / product / 1e9, read_gb_per_s=memory.nbytes / reading / 1e9)


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def make_random_model(config: dict[str, Any], folder: str) -> None:
    """A folder with a config, random weights in bfloat16, and a tokenizer that knows one word."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    shape = transformers.AutoConfig.for_model(**config)
    transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(f"{folder}/tokenizer.json")


@contextmanager
def _together(settings: list[ReaderSettings], report: CpuReport) -> Generator[list[Reader]]:
    """Each has read and written a little before it is measured."""
    with ExitStack() as stack:
        readers = [stack.enter_context(Reader(one)) for one in settings]
        for reader in readers:
            reader.read(_prompt(reader, NUM_WARMING, 0), 4)
            report.versions[reader.settings.reader] = reader.loaded.version
        yield readers


def _prompt(reader: Reader, length: int, seed: int) -> list[int]:
    return seeded_prompt(reader.settings.model, length, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    what: str
    who: str
    num_tokens: int
    run: Callable[[int], float]  # seed -> seconds


def _reads(reader: Reader, length: int, what: str) -> Work:
    def run(seed: int) -> float:
        return reader.read(_prompt(reader, length, seed)).read_s

    return Work(what=what, who=reader.settings.name, num_tokens=length, run=run)


def _reads_in_chunks(reader: Reader, length: int, chunk_size: int) -> Work:
    def run(seed: int) -> float:
        return reader.read(_prompt(reader, length, seed), chunk_size=chunk_size).read_s

    who = f"{reader.settings.name}, chunk {chunk_size}"
    return Work(what=f"{length} tokens", who=who, num_tokens=length, run=run)


def _writes(reader: Reader, context: int, what: str) -> Work:
    def run(seed: int) -> float:
        return reader.read(_prompt(reader, context, seed), NUM_WRITTEN + 1).write_s

    return Work(what=what, who=reader.settings.name, num_tokens=NUM_WRITTEN, run=run)


def _writes_together(reader: Reader, context: int, num_streams: int) -> Work:
    def run(seed: int) -> float:
        prompts = [_prompt(reader, context, seed * num_streams + stream) for stream in range(num_streams)]
        return reader.write_together(prompts, NUM_WRITTEN)

    what = f"{num_streams} at {context}"
    return Work(what=what, who=reader.settings.name, num_tokens=NUM_WRITTEN * num_streams, run=run)


def _in_turns(settings: CpuSettings, part: str, works: Sequence[Work], *, rounds: int = 1) -> list[Row]:
    """`rounds`: of all repeats, more than one where rows that are close to each other are compared."""
    samples: list[list[float]] = [[] for _ in works]
    for repeat in range(settings.repeats * rounds):
        for work, found in zip(works, samples, strict=True):
            found.append(work.num_tokens / work.run(repeat))
    rows = [
        Row(part=part, what=work.what, who=work.who, tokens_per_s=statistics.median(found), samples=found)
        for work, found in zip(works, samples, strict=True)
    ]
    for row in rows:
        settings.say(f"{part:<8} {row.what:<12} {row.who:<28} {row.tokens_per_s:>8.1f} tok/s")
    return rows


def _by_length(
    settings: CpuSettings,
    report: CpuReport,
    part: str,
    lengths: Sequence[int],
    work_of: Callable[[Reader, int, str], Work],
) -> None:
    """The shortest prompt is given to all; longer ones to us in every format and to each peer's fastest way so far."""
    with _together(settings.readers(max(lengths) + 64), report) as readers:
        for length in sorted(lengths):
            rows = _in_turns(settings, part, [work_of(reader, length, f"{length} tokens") for reader in readers])
            report.rows.extend(_with_share(settings, row, report.limits) for row in rows)
            kept = {*OURS, *fastest_ways(rows, {reader.settings.name: reader.settings.reader for reader in readers})}
            readers = [reader for reader in readers if reader.settings.name in kept]


def fastest_ways(rows: list[Row], programs: Mapping[str, str]) -> set[str]:
    """The names of the rows that are the fastest of their program."""
    best: dict[str, Row] = {}
    for row in rows:
        before = best.get(programs[row.who])
        if before is None or row.tokens_per_s > before.tokens_per_s:
            best[programs[row.who]] = row
    return {row.who for row in best.values()}


def _with_share(settings: CpuSettings, row: Row, limits: Limits) -> Row:
    """Of our own: the products of a prompt's layers, or the weights that each token has to read, by the limit."""
    if row.who not in OURS:
        return row
    files = resolve(settings.model)
    spec = decoder_spec(files.config)
    layers = [matrix for index in range(spec.num_layers) for matrix in layer_projections(spec, index).values()]
    if row.part == "reading":
        flops = 2 * sum(matrix.num_outputs * matrix.num_inputs for matrix in layers)
        share = row.tokens_per_s * flops / (limits.product_gflops * 1e9)
    else:
        head = outer_projection(spec, "embeddings" if spec.has_tied_embeddings else "head")
        packing = packing_of(files, OURS[row.who]["quantize"])
        share = row.tokens_per_s * sum(_bytes(matrix, packing) for matrix in (*layers, head))
        share /= limits.read_gb_per_s * 1e9
    return row.model_copy(update={"share_of_limit": share})


def _bytes(matrix: Projection, packing: Packing | None) -> int:
    packed = None if packing is None else packing.format(matrix)
    if packed is None:
        return 2 * matrix.num_outputs * matrix.num_inputs
    return matrix_bytes(packed, matrix.num_outputs, matrix.num_inputs)


def _reading(settings: CpuSettings, report: CpuReport) -> None:
    _by_length(settings, report, "reading", settings.lengths, _reads)


def _writing(settings: CpuSettings, report: CpuReport) -> None:
    """After prompts of at most 8,192 tokens, whose reading is not counted."""
    contexts = {min(length, 8192) for length in settings.lengths}
    _by_length(settings, report, "writing", sorted(contexts), _writes)


def _chunks(settings: CpuSettings, report: CpuReport) -> None:
    length = min(8192, max(settings.lengths))
    with _together(settings.own(length + 64)[:1], report) as (reader,):
        works = [_reads_in_chunks(reader, length, size) for size in CHUNK_SIZES]
        report.rows.extend(_in_turns(settings, "chunks", works, rounds=OWN_ROUNDS))


def _streams(settings: CpuSettings, report: CpuReport) -> None:
    with _together(settings.own(2048), report) as readers:
        works = [_writes_together(reader, 1024, num_streams) for num_streams in (1, 8) for reader in readers]
        report.rows.extend(_in_turns(settings, "streams", works, rounds=OWN_ROUNDS))


def _memory(settings: CpuSettings, report: CpuReport) -> None:
    """One process after another, each with a prompt of 8,192 tokens."""
    length = min(8192, max(settings.lengths))
    for one in settings.readers(length + 64):
        with Reader(one) as reader:
            loaded, reading = reader.loaded, reader.read(_prompt(reader, length, 0))
        base, peak = loaded.library_bytes, max(loaded.load_peak_bytes, reading.peak_bytes)
        report.versions[one.reader] = loaded.version
        report.memory.append(MemoryRow(who=one.name, num_tokens=length, base_bytes=base, peak_bytes=peak))
        settings.say(f"memory   {length} tokens {one.name:<28} {peak / 1e6:>8.0f} MB, {base / 1e6:.0f} of it libraries")


def _text() -> str:
    """Prose that every Python has."""
    from pydoc_data.topics import topics

    return topics["class"] + topics["import"]


def _quality(settings: CpuSettings, report: CpuReport) -> None:
    """Perplexity of a text, and how far a token's log-probability is from float32's."""
    exact: list[float] = []
    for weights, more in FORMATS.items():
        if weights == "keep" and resolve(settings.model).gguf is None:
            continue
        with Reader(ReaderSettings(name=weights, model=settings.model, threads=settings.threads, **more)) as reader:
            losses = reader.losses(_text(), 1024)
        exact = exact or losses
        errors = [abs(one - other) for one, other in zip(losses, exact, strict=True)]
        row = QualityRow(
            weights=weights,
            perplexity=math.exp(statistics.mean(losses)),
            mean_error=statistics.mean(errors),
            largest_error=max(errors),
        )
        report.quality.append(row)
        settings.say(
            f"quality  {weights:<9} perplexity {row.perplexity:.4f}, log-probability off by {row.mean_error:.4f} "
            f"on average and {row.largest_error:.3f} at most"
        )


def _qwen3(settings: CpuSettings, report: CpuReport) -> None:
    """A larger shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        with _fresh_process() as process:
            process.submit(make_random_model, QWEN3, folder).result()
        own = ReaderSettings(name="penstock bfloat16", model=folder, dtype="bfloat16", threads=settings.threads)
        peers = [peer for peer in settings.peers if peer == "transformers"]
        theirs = peer_settings(peers, folder, context=8192 + 64, threads=settings.threads, chunk_sizes=(0,))
        with _together([own, *theirs], report) as readers:
            for length in (2048, 8192):
                works = [_reads(reader, length, f"read {length}") for reader in readers]
                report.rows.extend(_in_turns(settings, "qwen3", works))
            works = [_writes(reader, 2048, "write at 2048") for reader in readers]
            report.rows.extend(_in_turns(settings, "qwen3", works))


MEASURES: dict[str, Callable[[CpuSettings, CpuReport], None]] = {
    "reading": _reading,
    "chunks": _chunks,
    "writing": _writing,
    "streams": _streams,
    "memory": _memory,
    "quality": _quality,
    "qwen3": _qwen3,
}
assert tuple(MEASURES) == PARTS


def default_settings(**chosen: Any) -> CpuSettings:
    usual: dict[str, Any] = {
        "model": "smollm2",
        "parts": PARTS,
        "peers": (),
        "repeats": 3,
        "threads": num_physical_cores(),
        "lengths": (2048, 8192, 16_384),
        "say": lambda line: print(line, file=sys.stderr, flush=True),
    }
    return CpuSettings(**usual | {name: value for name, value in chosen.items() if value is not None})
