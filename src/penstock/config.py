"""Every default in one file. A value comes from, in this order: the flag, PENSTOCK_*, penstock.toml, the default."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.errors import InvalidSetting

DEFAULT_MODEL = "smollm2"
CONFIG_FILE = "penstock.toml"
DTYPES = ("auto", "float32", "bfloat16")
QUANTIZE = ("auto", "none", "keep", "int8", "int4")
CPU_KERNELS = ("auto", "torch")
DEVICES = ("auto", "cpu", "cuda", "mps")

HOPPER = (9, 0)  # the compute capability of NVIDIA's H100 and H200

# What becomes resident with the first chunk: the code and buffers of the matrix library.
FIRST_CALL_BYTES_ESTIMATE = 28 * 2**20
# Resident bytes of Python and torch on x86-64 Linux with torch 2.13, with the first chunk. The engine measures its own.
# 263 to 312 MB were seen before that chunk, of the same libraries: what the system has of their files counts too.
# This is the middle: weights in few bits leave a plan less to be wrong about than half of that range.
RUNTIME_BYTES_ESTIMATE = 275 * 2**20 + FIRST_CALL_BYTES_ESTIMATE
# Of a tokenizer: 410 for words, 590 for byte pairs from a GGUF file.
TOKENIZER_BYTES_PER_TOKEN_ESTIMATE = 500
# What importing a model class of transformers adds: 196 to 226 MB.
TRANSFORMERS_BYTES_ESTIMATE = 200 * 2**20
# Share of the free memory left to others when no budget is given.
FREE_MEMORY_MARGIN = 0.1
# Of the memory beside the weights that recurrent states may take.
STATE_SHARE = 0.25
# Tokens of a GPU's step that a latency target cuts. Each size has matrix kernels of its own, loaded when it is first
# used, so they are few; the smaller ones are recorded ahead of time.
GPU_STEP_SIZES = (
    *range(64, 1025, 64),
    *range(1152, 2049, 128),
    *range(2560, 4097, 512),
    *range(5120, 8193, 1024),
)
# And of a CPU's: its products take 32 rows together.
CPU_STEP_SIZES = range(32, 2**20, 32)
# The most that `auto` picks. A CPU gains nothing past it. A GPU's products are fastest there, and answers beside a
# prompt wait as long as such a chunk takes; where a latency target says how long that may be, it alone limits chunks.
CPU_AUTO_CHUNK, GPU_AUTO_CHUNK = 1024, 2048
GPU_TARGET_CHUNK = GPU_STEP_SIZES[-1]
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
    strict: bool = False  # refuse instead of adjusting
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "auto"  # keep: matrices in few bits as the GGUF has them; int8, int4: packed on load; none: neither
    threads: int | None = None  # None: the physical cores this process may use
    cpu_kernels: str = "auto"  # auto: compiled C kernels where they can run; torch: never
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

    @property
    def most_prompt_tokens(self) -> int:
        """Of a step; 0: no limit."""
        return self.most_auto_tokens if self.chunk_size is None else self.chunk_size

    @property
    def most_auto_tokens(self) -> int:
        return self.max_chunk_size or CPU_AUTO_CHUNK

    def on_device(self, device: str) -> EngineConfig:
        """With what depends on the device filled in."""
        if device != "cuda" or self.max_chunk_size is not None:
            return self
        return replace(self, max_chunk_size=GPU_AUTO_CHUNK if self.latency_target_ms is None else GPU_TARGET_CHUNK)

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
        for name in (
            "memory",
            "context",
            "threads",
            "block_size",
            "max_chunk_size",
            "min_chunk_size",
            "max_running",
            "floor",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidSetting(f"{name} is {value}; it must be at least 1, or left out.")
        for name in ("max_waiting", "max_waiting_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidSetting(f"{name} is {value}; it must be at least 1, or left out.")
        if self.max_checkpoints < 0:
            raise InvalidSetting(f"max_checkpoints is {self.max_checkpoints}; it must be 0 or more.")
        if self.latency_target_ms is not None and not 1 <= self.latency_target_ms <= 60_000:
            raise InvalidSetting(f"The latency target is {self.latency_target_ms} ms; it must be 1 to 60000.")
        if self.dtype not in DTYPES:
            raise InvalidSetting(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        if self.quantize not in QUANTIZE:
            raise InvalidSetting(f"quantize is {self.quantize!r}; it must be one of {', '.join(QUANTIZE)}.")
        if self.cpu_kernels not in CPU_KERNELS:
            raise InvalidSetting(f"cpu_kernels is {self.cpu_kernels!r}; it must be one of {', '.join(CPU_KERNELS)}.")
        if self.device not in DEVICES:
            raise InvalidSetting(f"device is {self.device!r}; it must be one of {', '.join(DEVICES)}.")


def load_config(
    flags: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
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
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSetting(f"{path} cannot be read as TOML: {error}. Mend or remove it.") from error
    settings = {name.replace("-", "_"): value for name, value in content.items()}
    if unknown := sorted(set(settings) - set(PARSERS)):
        raise InvalidSetting(f"{path} has the unknown key {unknown[0]!r}; known keys are {', '.join(PARSERS)}.")
    return settings


def parse_bytes(value: str | int) -> int:
    """'6GiB', '500 MB', '1.5g' or a number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value), flags=re.IGNORECASE)
    if match is None:
        raise InvalidSetting(f"Memory is {value!r}; write a size such as 6GiB, 512MiB or a number of bytes.")
    number, prefix, binary = match.groups()
    exponent = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    # '6g' is what people type for 6 GiB; '6GB' is decimal.
    is_decimal = prefix and not binary and str(value).strip().lower().endswith("b")
    return int(float(number) * (1000 if is_decimal else 1024) ** exponent)


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
        raise InvalidSetting(f"{name} is {value!r}; it must be {allowed}.") from None


def _parse_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in words:
        raise InvalidSetting(f"{name} is {value!r}; it must be true or false.")
    return words[str(value).lower()]


def parse_priority(value: str | PrefillPriority) -> PrefillPriority:
    if isinstance(value, PrefillPriority):
        return value
    try:
        return PrefillPriority(str(value).lower().replace("_", "-"))
    except ValueError:
        names = ", ".join(priority.value for priority in PrefillPriority)
        raise InvalidSetting(f"Priority is {value!r}; it must be one of {names}.") from None


def _parse_milliseconds(value: object) -> float:
    try:
        return float(value)  # ty: ignore[invalid-argument-type]
    except (TypeError, ValueError):
        raise InvalidSetting(f"The latency target is {value!r}; write a number of milliseconds.") from None


def _parser_for(name: str) -> Any:
    if name == "chunk_size":
        return parse_chunk_size
    if name == "memory":
        return parse_bytes
    if name == "priority":
        return parse_priority
    if name == "latency_target_ms":
        return _parse_milliseconds
    if name in ("strict", "prefix_cache"):
        return lambda value: _parse_bool(name, value)
    if name in ("lane", "device", "dtype", "quantize", "cpu_kernels"):
        return str
    return lambda value: _parse_int(name, value, "a whole number")


PARSERS = {field.name: _parser_for(field.name) for field in fields(EngineConfig)}
