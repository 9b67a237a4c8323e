"""Every default in one file. A value comes from, in this order: the flag, PENSTOCK_*, penstock.toml, the default."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from penstock.errors import InvalidSetting, brief, first_line

DEFAULT_MODEL = "smollm2"
CONFIG_FILE = "penstock.toml"
MAX_CONFIG_BYTES = 1 << 20
# Settings that take one of a few words, and those that are whole numbers from 1.
CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "quantize": ("auto", "none", "keep", "int8", "int4"),
    "cpu_kernels": ("auto", "torch", "avx512", "avx2", "neon"),
    "device": ("auto", "cpu", "cuda", "mps"),
}
AT_LEAST_ONE = ("memory", "context", "threads", "block_size", "max_chunk_size", "min_chunk_size", "max_running")
AT_LEAST_ONE += ("floor", "max_waiting", "max_waiting_tokens")

MB, GB, KIB, MIB, GIB = 1e6, 1e9, 2**10, 2**20, 2**30
MAX_BYTES = 2**60
DEFAULT_DISK_BYTES = 8 * GIB
LEAST_DISK_BYTES = 16 * MIB  # fewer hold no prefix that is worth it
LEAST_MB_MEANT = 100  # by a bare number for the memory; fewer are gigabytes
HOPPER = (9, 0)  # the compute capability of NVIDIA's H100 and H200

# What becomes resident with the first chunk and what follows: code and buffers of the matrix library, a chat's threads.
FIRST_CALL_BYTES_ESTIMATE = 34 * 2**20
# Resident bytes of Python and torch on x86-64 Linux with torch 2.13, with the first chunk. The engine measures its own.
# 242 to 312 MB were seen before that chunk, of the same libraries: what the system has of their files counts too, and
# two installations of one version differed by 66 MB. With that chunk's, this is the middle.
RUNTIME_BYTES_ESTIMATE = 255 * MIB + FIRST_CALL_BYTES_ESTIMATE
# Of a tokenizer: 250 to 430 for byte pairs and words, 1,100 for a unigram model of 32,100 tokens.
TOKENIZER_BYTES_PER_TOKEN_ESTIMATE = 400
# What importing a model class of transformers adds: 179 to 226 MB.
TRANSFORMERS_BYTES_ESTIMATE = 206 * MIB
# Share of the free memory left to others when no budget is given.
FREE_MEMORY_MARGIN = 0.1
# Of the memory beside the weights that recurrent states may take.
STATE_SHARE = 0.25
# Tokens of a GPU's step that a latency target cuts. Each size has matrix kernels of its own, loaded when it is first
# used, so they are few; the smaller ones are captured ahead of time.
GPU_STEP_SIZES = (*range(64, 1025, 64), *range(1152, 2049, 128), *range(2560, 4097, 512), *range(5120, 8193, 1024))
# And of a CPU's: its products take 32 rows together.
CPU_STEP_SIZES = range(32, 2**20, 32)
# The most that `auto` picks. A CPU gains nothing past it. A GPU's products are fastest there, and answers beside a
# prompt wait as long as such a chunk takes; where a latency target says how long that may be, it alone limits chunks.
# A step reads the weights of nearly all experts however few tokens it has, so theirs are wide too.
CPU_AUTO_CHUNK, GPU_AUTO_CHUNK = 1024, 2048
GPU_WIDE_CHUNK = GPU_STEP_SIZES[-1]
# A processor cuts wider steps into tiles of this size inside each layer.
TILE_TOKENS = CPU_AUTO_CHUNK
# Layers stay in memory where that leaves room for so many tokens. Where they cannot, fewer stay, so that there is room
# for these; a pass over layers on disk takes long, and the wider a step, the fewer there are.
RESIDENT_TOKENS, STREAMED_TOKENS, SWEEP_TOKENS = 512, 4096, 8192
STREAMED_TILES = (TILE_TOKENS, 256, 64)  # smaller ones where memory asks for it
# What a disk reads and a core computes in a second where neither was measured.
DISK_BYTES_PER_S, CPU_GFLOPS_OF_A_CORE = 1e9, 150
# Checkpoints of recurrent state that are kept lie at least this far apart; the newest of a sequence is kept besides.
CHECKPOINT_TOKENS = 512


class PrefillPriority(Enum):
    """Who goes first where prompts and answers share steps."""

    PREFILL_FIRST = "prefill-first"  # all chunks before any decode
    INTERLEAVED = "interleaved"  # every step carries the decodes and a prefill chunk
    DECODE_PRIORITY = "decode-priority"  # prefill runs when no decode waits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    chunk_size: int | None = None  # None: the memory model picks it; 0: prompts are read whole
    overlap: int = 0
    memory: int | None = None  # bytes; None: what is free, less a margin
    context: int | None = None  # tokens; None: the model's own limit
    lane: str | None = None  # None: the lane table picks
    text_only: bool | None = None  # None: of an image-text model, where nothing can encode its images
    mmproj: str | None = None  # the vision tower of a GGUF; None: what lies beside it and fits
    adapter: str | None = None  # a LoRA's folder or hub id, merged into the weights
    strict: bool = False  # refuse instead of adjusting
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "auto"  # keep: few bits as the GGUF has them; int8, int4: quantized on load; none: neither
    threads: int | None = None  # None: the physical cores this process may use
    cpu_kernels: str = "auto"  # auto: compiled C kernels where they can run; torch: never; or these alone
    block_size: int = 16
    max_chunk_size: int | None = None  # the most that `auto` picks; None: what suits the device
    min_chunk_size: int = 16  # the KV pool leaves room for at least this chunk
    max_running: int = 64
    priority: PrefillPriority = PrefillPriority.INTERLEAVED
    latency_target_ms: float | None = None  # None: steps are as large as the chunk size allows
    floor: int = 16  # prompt tokens that a step carries even where the target is missed
    max_waiting: int | None = None  # requests that wait for others to end; None: no limit
    max_waiting_tokens: int | None = None
    prefix_cache: bool = True
    max_checkpoints: int = 32  # of recurrent state, for prefixes that come again
    cache_dir: str | None = None  # a folder that keeps keys and values when the process ends; None: nothing is kept
    cache_disk: int | None = None  # most bytes that it takes; None: DEFAULT_DISK_BYTES

    @property
    def disk_bytes(self) -> int:
        """Bounds what the cache folder takes."""
        return self.cache_disk or DEFAULT_DISK_BYTES

    @property
    def most_prompt_tokens(self) -> int:
        """Tells how many prompt tokens a step may have at most; 0 means no limit."""
        return self.most_auto_tokens if self.chunk_size is None else self.chunk_size

    @property
    def most_auto_tokens(self) -> int:
        return self.max_chunk_size or CPU_AUTO_CHUNK

    def on_device(self, device: str, *, gains_from_width: bool = False) -> EngineConfig:
        """Fills in what depends on the device. `gains_from_width`: the model has experts, which our own kernels run."""
        if device != "cuda" or self.max_chunk_size is not None:
            return self
        is_wide = gains_from_width or self.latency_target_ms is not None
        return replace(self, max_chunk_size=GPU_WIDE_CHUNK if is_wide else GPU_AUTO_CHUNK)

    def refuse_if_strict(self, what: str, way_out: str) -> None:
        """Refuses what would be changed and told otherwise."""
        if self.strict:
            raise InvalidSetting(f"--strict: {what}. {way_out}")

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 0:
            raise InvalidSetting(f"Chunk size is {self.chunk_size}; it must be 0 (whole prompt), 1 or more, or auto.")
        if self.overlap < 0:
            raise InvalidSetting(f"Overlap is {self.overlap}; it must be 0 or more.")
        if self.chunk_size and self.overlap >= self.chunk_size:
            raise InvalidSetting(
                f"Overlap is {self.overlap}, chunk size {self.chunk_size}; lower the overlap below the chunk size."
            )
        if self.chunk_size is None and self.overlap >= self.min_chunk_size:
            raise InvalidSetting(
                f"Overlap is {self.overlap}; with an automatic chunk size it must be below {self.min_chunk_size}. "
                "Lower it or give --chunk-size."
            )
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidSetting(f"{name} is {value}; it must be at least 1, or left out.")
        if self.max_checkpoints < 0:
            raise InvalidSetting(f"max_checkpoints is {self.max_checkpoints}; it must be 0 or more.")
        if self.cache_disk is not None and self.cache_disk < LEAST_DISK_BYTES:
            raise InvalidSetting(
                f"cache_disk is {self.cache_disk} bytes; it must be at least {LEAST_DISK_BYTES // MIB}MiB."
            )
        if self.cache_disk is not None and self.cache_dir is None:
            raise InvalidSetting(f"cache_disk is {self.cache_disk} without a folder. Give --cache-dir too.")
        if self.latency_target_ms is not None and not 1 <= self.latency_target_ms <= 60_000:
            raise InvalidSetting(f"The latency target is {self.latency_target_ms} ms; it must be 1 to 60000.")
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InvalidSetting(f"{name} is {brief(value)}; it must be one of {', '.join(choices)}.")


def load_config(
    flags: Mapping[str, Any], *, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> EngineConfig:
    """`flags` holds what was given on the command line or as arguments; None means not given."""
    environment = os.environ if environment is None else environment
    if unknown := sorted(set(flags) - set(PARSERS)):
        raise InvalidSetting(f"There is no setting {unknown[0]!r}; known ones are {', '.join(PARSERS)}.")
    merged: dict[str, Any] = _from_toml((folder or Path.cwd()) / CONFIG_FILE)
    for name in PARSERS:
        if (value := environment.get(f"PENSTOCK_{name.upper()}")) not in (None, ""):
            merged[name] = value
    merged.update({name: value for name, value in flags.items() if value is not None})
    return EngineConfig(**{name: PARSERS[name](value) for name, value in merged.items()})


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise InvalidSetting(f"{path} has more than {MAX_CONFIG_BYTES:,} bytes, the limit. Shorten or remove it.")
        content = tomllib.loads(text.decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # ValueError: of TOML, of UTF-8, of numbers without end
        raise InvalidSetting(f"{path} cannot be read as TOML: {first_line(error)}. Mend or remove it.") from error
    settings = {name.replace("-", "_"): value for name, value in content.items()}
    if unknown := sorted(set(settings) - set(PARSERS)):
        raise InvalidSetting(f"{path} has the unknown key {brief(unknown[0])}; known keys are {', '.join(PARSERS)}.")
    return settings


def parse_bytes(value: str | int, name: str = "Memory") -> int:
    """'6GiB', '500 MB', '1.5g' or a number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value), flags=re.IGNORECASE)
    if match is None:
        raise InvalidSetting(f"{name} is {brief(value)}; write a size such as 6GiB, 512MiB or a number of bytes.")
    number, prefix, binary = match.groups()
    exponent = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    # '6g' is what people type for 6 GiB; '6GB' is decimal.
    is_decimal = prefix and not binary and str(value).strip().lower().endswith("b")
    num_bytes = float(number) * (1000 if is_decimal else 1024) ** exponent
    if num_bytes >= MAX_BYTES:
        raise InvalidSetting(f"{name} is {brief(value)}; it must be below {MAX_BYTES // GIB:,} GiB.")
    return int(num_bytes)


def written_budget(num_bytes: float) -> str:
    """Writes bytes as --memory takes them, rounded up to three digits or to whole megabytes."""
    megabytes = ceil(num_bytes / MB)
    return f"{megabytes}MB" if megabytes < 1000 else f"{ceil(num_bytes / MB / 10) / 100:g}GB"


def told_budget(num_bytes: int) -> str:
    """Writes a budget in the unit that makes it a round number, as it was given; else as `--memory` takes it."""
    for unit, size in (("GiB", GIB), ("GB", 1000 * MB), ("MiB", 1 << 20)):
        tenths = round(num_bytes * 10 / size)
        if num_bytes >= size and abs(num_bytes - tenths * size / 10) < 1:
            return f"{tenths / 10:g}{unit}"
    return written_budget(num_bytes)


def parse_chunk_size(value: str | int) -> int | None:
    if value == "auto":
        return None
    return _parse_int("Chunk size", value, "0 (whole prompt), 1 or more, or auto")


def _parse_int(name: str, value: object, allowed: str) -> int:
    try:
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            raise ValueError
        return int(value)
    except ValueError:
        raise InvalidSetting(f"{name} is {brief(value)}; it must be {allowed}.") from None


def _parse_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in words:
        raise InvalidSetting(f"{name} is {brief(value)}; it must be true or false.")
    return words[str(value).lower()]


def parse_priority(value: str | PrefillPriority) -> PrefillPriority:
    if isinstance(value, PrefillPriority):
        return value
    try:
        return PrefillPriority(str(value).lower().replace("_", "-"))
    except ValueError:
        names = ", ".join(priority.value for priority in PrefillPriority)
        raise InvalidSetting(f"Priority is {brief(value)}; it must be one of {names}.") from None


def _parse_milliseconds(value: object) -> float:
    try:
        return float(value)  # ty: ignore[invalid-argument-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidSetting(f"The latency target is {brief(value)}; write a number of milliseconds.") from None


def _parse_memory(value: str | int) -> int:
    num_bytes = parse_bytes(value)
    if 0 < num_bytes < MB and str(value).strip().isdigit():
        meant = f"{num_bytes}{'MB' if num_bytes >= LEAST_MB_MEANT else 'GiB'}"
        raise InvalidSetting(f"Memory is {num_bytes} bytes, too few for any model; did you mean {meant}?")
    return num_bytes


# Settings that are not read as their type says.
OWN_PARSERS: dict[str, Callable[[Any], Any]] = {
    "chunk_size": parse_chunk_size,
    "memory": _parse_memory,
    "cache_disk": partial(parse_bytes, name="cache_disk"),
    "priority": parse_priority,
    "latency_target_ms": _parse_milliseconds,
}


def _parser_for(name: str, kind: str) -> Callable[[Any], Any]:
    if kind.startswith("str"):
        return str
    if kind.startswith("bool"):
        return partial(_parse_bool, name)
    return partial(_parse_int, name, allowed="a whole number")


PARSERS = {field.name: _parser_for(field.name, str(field.type)) for field in fields(EngineConfig)} | OWN_PARSERS


def cache_folder(name: str) -> Path:
    """Returns the folder in which the user's cache keeps one kind of thing, whether it is there or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / name
