"""What a self-check found, and where it is kept: the user's cache folder, one small JSON file per model. No torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from pydantic import ValidationError

from penstock.config import cache_folder
from penstock.document import Document
from penstock.errors import UnsupportedModel
from penstock.lanes.lane import LaneFacts

FORMAT = 4  # changes when a verdict of an earlier version may not be believed any more
LIBRARIES = ("torch", "transformers")


class Way(Enum):
    """How a transformers model is run."""

    PACKED = "packed"  # many sequences in one call, over our pages
    PAGED = "paged"  # our pages, one sequence per call
    OWN_CACHE = "own-cache"  # the model's cache object, one sequence per call
    RECOMPUTED = "recomputed"  # no cache: every call reads the sequence from its start
    TILES = "tiles"  # a source, layer by layer


class Finding(Document):
    """One thing that was measured. `max_difference` is None where it could not be."""

    exact: bool
    max_difference: float | None
    reason: str

    @classmethod
    def unmeasured(cls, reason: str) -> Finding:
        return cls(exact=False, max_difference=None, reason=reason)


class Verdict(Finding):
    """Whether prompts may be read in chunks (`exact`), by how much chunked logits differ, and how the model is run."""

    way: Way
    passes_mask: bool = False  # to a model with its own cache
    passes_positions: bool = True  # to the same; some count theirs from another number than 0
    packing: Finding  # several sequences in one call against each alone
    answer_chunks: Finding | None = None  # of a decoder over its source; a begun answer is refused where not exact
    picture: Finding | None = None  # among text, on the loaded model; None: no picture was tried
    real_weights: Finding | None = None  # in their own dtype; None where that dtype is float32

    @property
    def summary(self) -> str:
        word = "exact" if self.exact else "read whole"
        parts = [part.reason for part in (self, self.picture) if part is not None]
        return f"{word} ({self.way.value}): {', '.join(dict.fromkeys(parts))}"


def judged(facts: LaneFacts, verdict: Verdict | None, *, is_strict: bool) -> LaneFacts:
    """The facts of a lane that runs a model in the way that the verdict allows. None: it was not checked yet."""
    if verdict is None:
        return replace(facts, reason=f"{facts.reason}; not checked yet, which happens when it is first loaded")
    if is_strict and not verdict.exact:
        raise UnsupportedModel(
            f"--strict: this model cannot be read in exact chunks ({verdict.reason}). Leave --strict out to read "
            "prompts whole."
        )
    facts = replace(facts, reason=f"{facts.reason}; {verdict.summary}", reads_whole=not verdict.exact)
    if verdict.way is Way.TILES:
        return facts
    has_pages = verdict.way in (Way.PACKED, Way.PAGED)
    return replace(
        facts, shares_prefixes=has_pages, chunk_mask_mode="offset-causal" if has_pages else "the model's own"
    )


def verdict_key(config: Mapping[str, Any], *, dtype: str, lane: str, backend: str) -> str:
    """Changes with everything that the verdict depends on."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    facts = {"format": FORMAT, "config": dict(config), "versions": versions, "run": [dtype, lane, backend]}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def load_verdict(key: str) -> Verdict | None:
    """None when there is none, or none that can be read."""
    try:
        return Verdict.model_validate_json((cache_folder("selfcheck") / f"{key}.json").read_bytes())
    except (OSError, ValidationError):
        return None


def save_verdict(key: str, verdict: Verdict) -> None:
    """Writes a verdict whole or not at all. A folder that cannot be written costs a check at every load, no more."""
    folder = cache_folder("selfcheck")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            file.write(verdict.model_dump_json(indent=2))
        os.replace(file.name, folder / f"{key}.json")
    except OSError:
        return
