"""`Ledger`: what was measured on a machine, run after run, one line each in one file per machine."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from penstock.bench.samples import ProbeResult
from penstock.bench.workbench import BenchSettings, ProbeSizes
from penstock.config import GIB
from penstock.document import Document
from penstock.errors import InvalidSetting
from penstock.plan.machine import named_values, num_physical_cores, processor_name

FORMAT = 1


class Fingerprint(Document):
    """What makes two machines comparable. Versions of libraries are no part of it: their changes are to be seen."""

    processor: str
    num_cores: int  # that this process may use
    memory_gib: int
    gpus: tuple[str, ...]
    system: str

    @classmethod
    def of_this_machine(cls) -> Fingerprint:
        return cls(
            processor=processor_name(),
            num_cores=num_physical_cores(),
            memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB),
            gpus=gpu_names(),
            system=f"{platform.system()} {platform.machine()}",
        )

    @property
    def key(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class BenchRun(Document):
    format: Literal[1] = FORMAT
    suite: str
    started_at: str  # ISO 8601, UTC
    seconds: float
    fingerprint: Fingerprint
    versions: dict[str, str]
    model_identity: str
    settings: BenchSettings
    sizes: ProbeSizes
    probes: tuple[ProbeResult, ...]

    @property
    def command(self) -> str:
        """Writes the command that measures the same."""
        chosen = self.settings.model_dump(exclude_defaults=True)
        flags = [f"--{name} {','.join(v) if isinstance(v, tuple) else v}" for name, v in chosen.items()]
        return " ".join(("penstock bench", self.suite, *flags))

    def has_same_work(self, other: BenchRun) -> bool:
        names = ("suite", "fingerprint", "model_identity", "settings", "sizes")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class Ledger:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def path(self, fingerprint: Fingerprint) -> Path:
        return self.folder / f"{fingerprint.key}.jsonl"

    def runs(self, fingerprint: Fingerprint) -> list[BenchRun]:
        """Oldest first. Lines that this version cannot read stay in the file and are left out here."""
        try:
            lines = self.path(fingerprint).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [run for line in lines if (run := _read(line)) is not None]

    def last_like(self, run: BenchRun) -> BenchRun | None:
        """The latest run of the same work on the same machine."""
        return next((old for old in reversed(self.runs(run.fingerprint)) if old.has_same_work(run)), None)

    def append(self, run: BenchRun) -> None:
        path = self.path(run.fingerprint)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(run.model_dump_json() + "\n")
        except OSError as error:
            raise InvalidSetting(
                f"The ledger {path} cannot be written: {error.strerror}. Choose another with --ledger."
            ) from error


def default_folder() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "penstock" / "bench"


def gpu_names() -> tuple[str, ...]:
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return tuple(named_values(path).get("Model", "") for path in found)


def _read(line: str) -> BenchRun | None:
    try:
        return BenchRun.model_validate_json(line)
    except ValidationError:
        return None
