"""Reading and writing on a processor beside other programs: each in its own process, asked in turns."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from penstock.bench.cpu_peers import Peer, own_peer
from penstock.models.files import resolve
from penstock.plan.machine import num_physical_cores

PARTS = ("reading", "chunks", "writing", "streams", "memory", "quality", "qwen3")
PEERS = ("transformers", "llama.cpp")
NUM_WRITTEN = 32
CHUNK_SIZES = (256, 512, 1024, 2048)
OURS: dict[str, dict[str, Any]] = {"penstock bfloat16": {"dtype": "bfloat16"}, "penstock packed": {}}
THEIRS = {"transformers bfloat16": "bfloat16", "transformers float32": "float32"}
LLAMA_WEIGHTS = ("bf16", "q8_0", "as stored")
FORMATS: dict[str, dict[str, Any]] = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}}
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


class Row(BaseModel):
    part: str
    what: str
    who: str
    tokens_per_s: float
    samples: list[float]


class MemoryRow(BaseModel):
    who: str
    base_bytes: int
    peak_bytes: int


class QualityRow(BaseModel):
    weights: str
    perplexity: float
    mean_error: float  # of a token's log-probability, against float32
    largest_error: float


class Limits(BaseModel):
    product_gflops: float
    read_gb_per_s: float


class CpuReport(BaseModel):
    model: str
    threads: int
    repeats: int
    limits: Limits
    rows: list[Row]
    memory: list[MemoryRow]
    quality: list[QualityRow]
    text_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSettings:
    model: str
    parts: tuple[str, ...]
    peers: tuple[str, ...]
    repeats: int
    threads: int
    llama_python: str
    lengths: tuple[int, ...]
    say: Callable[[str], None] = field(repr=False)


def measure_cpu(settings: CpuSettings) -> CpuReport:
    with _together(partial(own_peer, "machine", "machine")) as (machine,):
        limits = Limits(**machine.ask("limits", threads=settings.threads))
    report = CpuReport(
        model=settings.model,
        threads=settings.threads,
        repeats=settings.repeats,
        limits=limits,
        rows=[],
        memory=[],
        quality=[],
    )
    with tempfile.TemporaryDirectory() as folder:
        for part in settings.parts:
            settings.say(f"{part} ...")
            MEASURES[part](settings, Path(folder), report)
    return report


@contextmanager
def _together(*makers: Callable[[], Peer]) -> Generator[list[Peer]]:
    peers: list[Peer] = []
    try:
        peers.extend(make() for make in makers)
        yield peers
    finally:
        for peer in peers:
            peer.close()


def _makers(settings: CpuSettings, folder: Path, context: int) -> list[Callable[[], Peer]]:
    shared: dict[str, Any] = {"model": settings.model, "threads": settings.threads}
    makers: list[Callable[[], Peer]] = []
    makers += [partial(own_peer, "penstock", name, context=context, **shared, **more) for name, more in OURS.items()]
    if "transformers" in settings.peers:
        makers += [partial(own_peer, "transformers", name, dtype=dtype, **shared) for name, dtype in THEIRS.items()]
    if "llama.cpp" in settings.peers:
        makers += [partial(llama_peer, settings, folder, weights, context) for weights in LLAMA_WEIGHTS]
    return makers


def llama_peer(settings: CpuSettings, folder: Path, weights: str, context: int) -> Peer:
    gguf = resolve(settings.model).gguf
    assert gguf is not None, "llama.cpp reads GGUF files"
    asked: dict[str, Any] = {"gguf": str(gguf), "folder": str(folder), "weights": weights}
    asked |= {"threads": settings.threads, "context": context}
    script = Path(__file__).with_name("llama_peer.py")
    return Peer(f"llama.cpp {weights}", [settings.llama_python, str(script), json.dumps(asked)])


def _asking(peer: Peer, what: str, **arguments: Any) -> Callable[[int], float]:
    def ask(seed: int) -> float:
        return peer.ask(what, seed=seed, **arguments)

    return ask


def _in_turns(
    settings: CpuSettings, part: str, what: str, num_tokens: int, asks: dict[str, Callable[[int], float]]
) -> list[Row]:
    """One round of everybody first, which is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in asks}
    for repeat in range(settings.repeats + 1):
        for name, ask in asks.items():
            seconds = ask(repeat)
            if repeat:
                samples[name].append(num_tokens / seconds)
    rows = [
        Row(part=part, what=what, who=name, tokens_per_s=statistics.median(found), samples=found)
        for name, found in samples.items()
    ]
    for row in rows:
        settings.say(f"{part:<8} {what:<12} {row.who:<26} {row.tokens_per_s:>8.1f} tok/s")
    return rows


def _reading(settings: CpuSettings, folder: Path, report: CpuReport) -> None:
    with _together(*_makers(settings, folder, max(settings.lengths) + 64)) as peers:
        for length in settings.lengths:
            asks = {peer.name: _asking(peer, "read", num_tokens=length) for peer in peers}
            report.rows += _in_turns(settings, "reading", f"{length} tokens", length, asks)


def _chunks(settings: CpuSettings, folder: Path, report: CpuReport) -> None:
    length = min(8192, max(settings.lengths))
    with _together(*_makers(settings, folder, length + 64)[: len(OURS)]) as peers:
        asks = {
            f"{peer.name}, chunk {size}": _asking(peer, "read", num_tokens=length, chunk_size=size)
            for peer in peers
            for size in CHUNK_SIZES
        }
        report.rows += _in_turns(settings, "chunks", f"{length} tokens", length, asks)


def _writing(settings: CpuSettings, folder: Path, report: CpuReport) -> None:
    contexts = [length for length in settings.lengths if length <= 8192]
    with _together(*_makers(settings, folder, max(contexts) + 512)) as peers:
        for context in contexts:
            asks = {p.name: _asking(p, "write", context=context, num_tokens=NUM_WRITTEN) for p in peers}
            report.rows += _in_turns(settings, "writing", f"at {context}", NUM_WRITTEN, asks)


def _streams(settings: CpuSettings, folder: Path, report: CpuReport) -> None:
    with _together(*_makers(settings, folder, 2048)[: len(OURS)]) as peers:
        for num_streams in (1, 8):
            work = {"context": 1024, "num_tokens": NUM_WRITTEN, "num_streams": num_streams}
            asks = {peer.name: _asking(peer, "write", **work) for peer in peers}
            what, count = f"{num_streams} at 1024", NUM_WRITTEN * num_streams
            report.rows += _in_turns(settings, "streams", what, count, asks)


def _memory(settings: CpuSettings, folder: Path, report: CpuReport) -> None:
    """One process after another, each with a prompt of 8,192 tokens."""
    length = min(8192, max(settings.lengths))
    for maker in _makers(settings, folder, length + 64):
        with _together(maker) as (peer,):
            peer.ask("read", num_tokens=length, seed=0)
            base, peak = peer.ask("memory")
            report.memory.append(MemoryRow(who=peer.name, base_bytes=base, peak_bytes=peak))
            settings.say(
                f"memory   {length} tokens {peer.name:<26} {peak / 1e6:>8.0f} MB, {base / 1e6:.0f} of it libraries"
            )


def _quality(settings: CpuSettings, folder: Path, report: CpuReport) -> None:
    """Perplexity of a text that every Python has, and how far a token's log-probability is from float32's."""
    from pydoc_data.topics import topics

    text = topics["class"] + topics["import"]
    report.text_sha256 = hashlib.sha256(text.encode()).hexdigest()
    exact: list[float] = []
    for weights, more in FORMATS.items():
        if weights == "keep" and resolve(settings.model).gguf is None:
            continue
        asked = {"model": settings.model, "threads": settings.threads, **more}
        with _together(partial(own_peer, "penstock", weights, **asked)) as (peer,):
            losses = peer.ask("losses", text=text, num_tokens=1024)
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


def _qwen3(settings: CpuSettings, folder: Path, report: CpuReport) -> None:
    """A larger shape with random weights."""
    made = folder / "qwen3"
    with _together(partial(own_peer, "machine", "machine")) as (machine,):
        machine.ask("make_random_model", config=QWEN3, folder=str(made))
    shared: dict[str, Any] = {"model": str(made), "dtype": "bfloat16", "threads": settings.threads}
    kinds = ["penstock", *[kind for kind in settings.peers if kind == "transformers"]]
    makers = [partial(own_peer, kind, f"{kind} bfloat16", **shared) for kind in kinds]
    with _together(*makers) as peers:
        for length in (2048, 8192):
            asks = {peer.name: _asking(peer, "read", num_tokens=length) for peer in peers}
            report.rows += _in_turns(settings, "qwen3", f"read {length}", length, asks)
        asks = {p.name: _asking(p, "write", context=2048, num_tokens=NUM_WRITTEN) for p in peers}
        report.rows += _in_turns(settings, "qwen3", "write at 2048", NUM_WRITTEN, asks)


MEASURES: dict[str, Callable[[CpuSettings, Path, CpuReport], None]] = {
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
        "peers": PEERS,
        "repeats": 3,
        "threads": num_physical_cores(),
        "llama_python": sys.executable,
        "lengths": (2048, 8192, 16_384),
        "say": lambda line: print(line, file=sys.stderr, flush=True),
    }
    return CpuSettings(**usual | {name: value for name, value in chosen.items() if value is not None})
