"""`Reader`: Penstock, transformers or llama.cpp, each in a process of its own and asked in the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from penstock.errors import InvalidSetting, PenstockError
from penstock.models.files import ModelFiles, resolve
from penstock.plan.machine import num_physical_cores

if TYPE_CHECKING:
    from types import TracebackType

PEERS = ("transformers", "llama.cpp")
PYTHON_VARIABLE = "PENSTOCK_PEER_PYTHON"  # an interpreter that has llama_cpp, where our own has not
PROCESS = Path(__file__).with_name("peer_process.py")
TRANSFORMERS_CHUNK = 512


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Loaded(_Answer):
    load_s: float
    load_peak_bytes: int
    loaded_bytes: int  # resident when the model is ready


class Reading(_Answer):
    """One prompt read and an answer written. The first token counts as read, the others as written."""

    read_s: float
    write_s: float
    peak_bytes: int  # resident or, where a GPU is used, allocated on it, since the reading began
    token_ids: tuple[int, ...]

    @property
    def written_tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.write_s if self.write_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """`chunk_size` is the reader's own: 0 reads whole, None is its default."""

    name: str
    reader: str  # penstock, transformers or llama.cpp
    model: str
    files: str  # what the peers read: a GGUF file or a folder
    dtype: str
    threads: int
    context: int
    chunk_size: int | None = None
    device: str | None = None
    lane: str | None = None


class PeerFailed(PenstockError):
    """A reader's process ended before it answered."""


class Reader:
    """A process that holds a loaded model; closing ends it."""

    def __init__(self, settings: ReaderSettings) -> None:
        self.settings = settings
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open for as long as the process
        environment = os.environ | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        self._process = subprocess.Popen(
            [interpreter(settings.reader), "-P", str(PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.loaded = Loaded.model_validate_json(self._ask(asdict(settings)))

    def read(self, prompt: Sequence[int], num_tokens: int = 1) -> Reading:
        return Reading.model_validate_json(self._ask({"prompt": list(prompt), "num_tokens": num_tokens}))

    def _ask(self, request: dict[str, object]) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        if answer := stdout.readline():
            return answer
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def interpreter(reader: str) -> str:
    return os.environ.get(PYTHON_VARIABLE) or sys.executable if reader == "llama.cpp" else sys.executable


def own_settings(
    name: str,
    model: str,
    *,
    context: int,
    chunk_size: int | None,
    dtype: str = "auto",
    threads: int | None = None,
    device: str | None = None,
    lane: str | None = None,
) -> ReaderSettings:
    """Penstock as a reader."""
    return ReaderSettings(
        name=name,
        reader="penstock",
        model=model,
        files="",
        dtype=dtype,
        threads=threads or num_physical_cores(),
        context=context,
        chunk_size=chunk_size,
        device=device,
        lane=lane,
    )


def peer_settings(
    peers: Sequence[str], model: str, *, context: int, threads: int | None = None, dtype: str = "bfloat16"
) -> list[ReaderSettings]:
    """Each peer's ways to read, with its own best settings: transformers whole and in chunks, llama.cpp in bfloat16.

    llama.cpp also reads a quantized file as it is, which nobody else here does.
    """
    if unknown := sorted(set(peers) - set(PEERS)):
        raise InvalidSetting(f"--peers names {unknown[0]!r}; known ones are {', '.join(PEERS)}.")
    files = resolve(model)
    shared: Any = {"model": model, "dtype": dtype, "threads": threads or num_physical_cores(), "context": context}
    settings: list[ReaderSettings] = []
    if "transformers" in peers:
        folder = str(files.folder or converted("transformers", files, dtype))
        settings += [
            ReaderSettings(name=f"transformers, {way}", reader="transformers", files=folder, chunk_size=size, **shared)
            for way, size in (("whole", 0), (f"chunks of {TRANSFORMERS_CHUNK}", TRANSFORMERS_CHUNK))
        ]
    if "llama.cpp" in peers:
        if files.gguf is None:
            raise InvalidSetting(f"llama.cpp reads GGUF files, and {model} is a folder. Leave it out of --peers.")
        settings += [
            ReaderSettings(name=f"llama.cpp, {weights}", reader="llama.cpp", files=str(path), **shared)
            for weights, path in (("bfloat16", converted("llama.cpp", files)), ("the file as it is", files.gguf))
        ]
    return settings


def converted(reader: str, files: ModelFiles, *dtype: str) -> Path:
    """A GGUF file as the peer reads it best, in 16 bits like ours; made once, in the cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    target = Path(base) / "penstock" / "peers" / "-".join((files.identity[:16], reader, *dtype))
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [interpreter(reader), "-P", str(PROCESS), reader, str(files.gguf), *dtype, str(target)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            reason = (finished.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise PeerFailed(
                f"{files.gguf} could not be converted for {reader}: {reason}. Install penstock[peers], or name an "
                f"interpreter that has llama_cpp in {PYTHON_VARIABLE}."
            )
    return target
