"""Peaks of memory as planned and as measured, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

MB = 1e6
LARGEST_GAP = 0.10  # of the measured peak, between a plan and the measurement
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    prompt_tokens: int
    planned: int  # by `penstock plan`
    predicted: int  # by the engine that ran, which knows what its libraries take
    measured: int
    kv_bytes: int
    run: dict[str, Any]  # what `penstock run` printed

    @property
    def gap(self) -> float:
        return self.planned / self.measured - 1

    @property
    def gap_of_engine(self) -> float:
        return self.predicted / self.measured - 1


def printed_json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def peak_of(*model: str, source: str, settings: list[str]) -> Peak:
    """Of a prompt that is read from a file, by the command line."""
    run = printed_json([*PENSTOCK, "run", *model, "-f", source, "--max-tokens", "2", *settings, "--json"])
    length = ["--prompt-tokens", str(run["prompt_tokens"])]
    plan = printed_json([*PENSTOCK, "plan", *model, *length, *settings, "--json"])
    return Peak(
        prompt_tokens=run["prompt_tokens"],
        planned=plan["peak_bytes"],
        predicted=run["peak_bytes"]["predicted"],
        measured=run["peak_bytes"]["measured"],
        kv_bytes=plan["kv_bytes"],
        run=run,
    )
