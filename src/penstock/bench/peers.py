"""`Reader`: Penstock, transformers or llama.cpp, each in a process of its own and asked in the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from penstock.config import cache_folder
from penstock.document import Document
from penstock.errors import InvalidSetting, PenstockError
from penstock.models.files import ModelFiles, resolve
from penstock.plan.machine import num_physical_cores

PROCESS = Path(__file__).with_name("peer_process.py")
TRANSFORMERS_CHUNK = 512
AS_STORED = "as stored"
Answer = TypeVar("Answer")


class Loaded(Document):
    version: str  # of the library
    load_s: float
    library_bytes: int  # resident before the model is loaded
    load_peak_bytes: int
    loaded_bytes: int  # resident when the model is ready


class PeerReading(Document):
    """One prompt read and an answer written. The first token counts as read, the others as written."""

    read_s: float
    write_s: float
    peak_bytes: int  # resident or, where a GPU is used, allocated on it, since the reading began
    token_ids: tuple[int, ...]


class ReaderSettings(Document):
    """`chunk_size` is the reader's own: 0 reads whole, None is its default."""

    name: str
    reader: str = "penstock"
    model: str
    files: str = ""  # what a peer reads: a GGUF file or a folder
    dtype: str = "auto"
    quantize: str | None = None
    threads: int | None = None
    context: int | None = None
    chunk_size: int | None = None
    device: str | None = None
    lane: str | None = None
    python: str | None = None  # the interpreter that has the reader's library; None: this one


class PeerFailed(PenstockError):
    """A reader's process ended before it answered."""


class Reader:
    """A process that holds a loaded model; closing ends it."""

    def __init__(self, settings: ReaderSettings) -> None:
        self.settings = settings
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open for as long as the process
        self._process = subprocess.Popen(
            [settings.python or sys.executable, "-P", str(PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_own_environment(),
        )
        self.loaded = self._answer(Loaded, settings.model_dump())

    def read(self, prompt: Sequence[int], num_tokens: int = 1, **options: Any) -> PeerReading:
        """`options` are Penstock's own, of one request."""
        return self._ask(PeerReading, "read", prompt=prompt, num_tokens=num_tokens, **options)

    def write_together(self, prompts: list[list[int]], num_tokens: int) -> float:
        return self._ask(float, "write_together", prompts=prompts, num_tokens=num_tokens)

    def losses(self, text: str, num_tokens: int) -> list[float]:
        return self._ask(list[float], "losses", text=text, num_tokens=num_tokens)

    def _ask(self, kind: type[Answer], do: str, **arguments: Any) -> Answer:
        """`do`: a method of the adapter."""
        return self._answer(kind, {"do": do, "arguments": arguments})

    def _answer(self, kind: type[Answer], question: dict[str, Any]) -> Answer:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        if answer := stdout.readline():
            return TypeAdapter(kind).validate_json(answer)
        raise self._failed()

    def _failed(self) -> PeerFailed:
        self._process.communicate()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        self._errors.close()
        reason = said[-1] if said else f"its process ended with {self._process.returncode}"
        return PeerFailed(f"{self.settings.name} failed: {reason}")

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _own_environment() -> dict[str, str]:
    """How threads wait is each library's own: what suits ours halves the speed at which llama.cpp writes."""
    return {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


def peer_settings(
    peers: Sequence[str],
    model: str,
    *,
    context: int,
    threads: int | None = None,
    device: str = "cpu",
    dtypes: Sequence[str] = ("bfloat16",),
    chunk_sizes: Sequence[int] = (TRANSFORMERS_CHUNK, 0),
    formats: Sequence[str] = ("bfloat16", AS_STORED),
    llama_python: str | None = None,
) -> list[ReaderSettings]:
    """Each peer's ways: transformers in `dtypes`, in chunks and whole; llama.cpp in `formats` of a GGUF file."""
    if not peers:
        return []
    files = resolve(model)
    shared: Any = {"model": model, "threads": threads or num_physical_cores(), "device": device}
    shared["context"] = context
    settings: list[ReaderSettings] = []
    if "transformers" in peers:
        settings += [
            ReaderSettings(
                name=f"transformers {dtype}, {f'chunks of {size}' if size else 'whole'}",
                reader="transformers",
                files=str(files.folder or converted("transformers", files, dtype)),
                dtype=dtype,
                chunk_size=size,
                **shared,
            )
            for dtype in dtypes
            for size in chunk_sizes
        ]
    if "llama.cpp" in peers:
        if files.gguf is None:
            raise InvalidSetting(f"llama.cpp reads GGUF files, and {model} is a folder. Leave it out of --peers.")
        settings += [
            ReaderSettings(
                name=f"llama.cpp {weights}",
                reader="llama.cpp",
                files=str(
                    files.gguf.path if weights == AS_STORED else converted("llama.cpp", files, weights, llama_python)
                ),
                python=llama_python,
                **shared,
            )
            for weights in formats
        ]
    return settings


def converted(reader: str, files: ModelFiles, weights: str, python: str | None = None) -> Path:
    """A GGUF file as the peer reads it best; made once, in the cache folder."""
    target = cache_folder("peers") / f"{files.identity[:16]}-{reader}-{weights}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = f"{target}.unfinished"
        (stored,) = files.weight_files
        command = [python or sys.executable, "-P", str(PROCESS), reader, str(stored), weights, unfinished]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            reason = (finished.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise PeerFailed(f"{stored} could not be converted for {reader}: {reason}")
        Path(unfinished).rename(target)
    return target
