"""The trace: one versioned JSON document of what ran where, every step and every request. No torch."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.document import Document
from penstock.errors import InvalidSetting, InvalidTrace

if TYPE_CHECKING:
    from penstock.lanes.lane import LaneFacts

FORMAT = "penstock-trace"
VERSION = 2  # 1 was JSON lines without environment, plan and requests

Outcome = Literal["stop", "length", "cancelled", "deadline", "failed"]
Count = Annotated[int, Ge(0)]
Milliseconds = Annotated[float, Ge(0)]


class _Part(Document):
    model_config = ConfigDict(allow_inf_nan=False)


class TraceLane(_Part):
    id: str
    eligible: bool
    applied: bool
    reason: str
    boundary: str
    mask_mode: str

    @classmethod
    def of(cls, facts: LaneFacts) -> TraceLane:
        return cls.from_fields_of(facts)


class Environment(_Part):
    """Describes where it ran."""

    penstock: str
    commit: str | None  # of the source; None: installed from a package
    python: str
    torch: str | None  # None: not installed
    transformers: str | None
    system: str
    processor: str
    device: str
    num_threads: Count


class TraceModel(_Part):
    name: str
    adapter: str | None = None  # merged into the weights
    dtype: str
    num_parameters: Count
    weight_bytes: Count
    max_context: Count


class TraceLimits(_Part):
    """What the steps had to keep to."""

    memory_budget_bytes: Count
    chunk_size: Count | None  # None: the memory model picks it; 0: prompts are read whole
    overlap: Count
    priority: str
    latency_target_ms: float | None
    num_blocks: Count
    block_size: Count
    max_running: Count


class TracePlan(_Part):
    """Tells the plan of the longest prompt in the trace."""

    prompt_tokens: Count
    chunk_size: Count
    num_chunks: Count
    peak_bytes: Count
    fits: bool


class TraceLayers(_Part):
    """Layers [first, end) of all, where a chunk stops between layers."""

    first: Count
    end: Count
    num_layers: Count


class TraceChunk(_Part):
    """Tokens [start, end) of one request in one step."""

    request_id: Count
    kind: Literal["prefill", "decode"]
    start: Count
    end: Count
    prompt_tokens: Count | None  # None while the prompt's length is unknown
    cached_tokens: Count
    layers: TraceLayers | None = None  # that it went through; None: all

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class TraceMove(_Part):
    """Tells of a slab of keys and values that went to the cache folder or came from it beside the steps."""

    kind: Literal["store", "load"]
    start: Count
    end: Count
    bytes: Count
    ms: Milliseconds
    is_done: bool  # False: it could not be stored, or was a miss


class TraceStep(_Part):
    type: Literal["step"] = "step"
    step: Count
    started_s: float  # since the trace began
    elapsed_ms: Milliseconds
    predicted_ms: Milliseconds | None  # None: nothing predicts times, because there is no latency target
    memory_bytes: Count  # resident after the step
    peak_bytes: Count  # the most so far
    predicted_bytes: Count
    token_budget: Count
    num_waiting: Count
    kv_share: Annotated[float, Ge(0), Le(1)]  # of the blocks, held
    reason: str
    admitted: tuple[Count, ...]
    preempted: tuple[Count, ...]
    chunks: tuple[TraceChunk, ...]
    moves: tuple[TraceMove, ...] = ()  # that had ended when it did

    @property
    def ended_s(self) -> float:
        return self.started_s + self.elapsed_ms / 1e3

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_read(self) -> int:
        done = (c for c in self.chunks if c.layers is None or c.layers.end == c.layers.num_layers)
        return sum(chunk.num_tokens for chunk in done if chunk.kind == "prefill")


class ChunkTime(_Part):
    step: Count
    start: Count
    end: Count
    ms: Milliseconds  # of the whole step, or of all steps that took it through some layers


class TraceRequest(_Part):
    type: Literal["request"] = "request"
    id: Count
    arrived_s: float  # since the trace began
    queue_ms: Milliseconds | None  # None: it never ran
    ttft_ms: Milliseconds | None  # None: it has no token
    ended_s: float | None  # None: it still ran when the trace was taken
    outcome: Outcome | None  # None: the same
    error: str | None  # why it failed; None: it did not
    prompt_tokens: Count | None  # None: its length was never known
    cached_tokens: Count  # of the prompt, from the prefix cache
    written_tokens: Count
    num_preemptions: Count
    chunks: tuple[ChunkTime, ...]  # of the prompt
    gaps_ms: tuple[Milliseconds, ...]  # between one token and the next
    adjustments: tuple[str, ...]


class Trace(_Part):
    """A document; without steps and requests it is also the first record of a live timeline."""

    type: Literal["trace"] = "trace"
    format: Literal["penstock-trace"] = FORMAT
    version: Literal[2] = VERSION
    began_at: str  # wall clock, ISO 8601
    environment: Environment
    model: TraceModel
    lane: TraceLane
    limits: TraceLimits
    plan: TracePlan | None = None  # None: no prompt was read
    adjustments: tuple[str, ...] = ()
    num_dropped_steps: Count = 0  # older than those kept
    steps: tuple[TraceStep, ...] = ()
    requests: tuple[TraceRequest, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Trace:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise InvalidTrace(f"{path} cannot be read: {error.strerror}. Check the path.") from error
        _require_version(path, text)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))[:200] or "its top"
            raise InvalidTrace(f"{path} is no valid trace: {where}: {first['msg'][:200]}. Write it again.") from error

    def write(self, path: Path) -> None:
        """Writes the document whole or not at all."""
        try:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
                part = Path(folder) / path.name
                part.write_bytes(self.model_dump_json().encode() + b"\n")
                os.replace(part, path)
        except OSError as error:
            raise InvalidTrace(f"The trace {path} cannot be written: {error.strerror}. Name another file.") from error


class _Stamp(BaseModel):
    type: str | None = None
    format: str | None = None
    version: int | None = None

    @classmethod
    def read(cls, text: bytes) -> _Stamp:
        """Reads what a document calls itself; version 1 was lines, of which the first does."""
        for part in (text, text.partition(b"\n")[0]):
            with suppress(ValidationError):
                return cls.model_validate_json(part)
        return cls()


def _require_version(path: Path, text: bytes) -> None:
    stamp = _Stamp.read(text)
    if stamp.version is None or (stamp.format != FORMAT and stamp.type != "trace"):
        raise InvalidTrace(f"{path} is no trace of Penstock. Give a file that --trace or the server's /trace wrote.")
    if stamp.version != VERSION:
        raise InvalidTrace(
            f"{path} is a trace of version {stamp.version}; this Penstock reads version {VERSION}. "
            "Open it with the Penstock that wrote it, or record it again."
        )


def require_writable(path: Path) -> Path:
    """Refuses a file before a model is loaded, not after it has run."""
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        raise InvalidSetting(f"--trace is {str(path)!r}; it must be a file in a folder that can be written.")
    return path
