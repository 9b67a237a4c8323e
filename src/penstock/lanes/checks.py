"""The self-check of a model on its lane: kept from an earlier load, or made now, and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.attention.pick import attention_backend
from penstock.config import GIB
from penstock.foreign.pretrained import quiet_library
from penstock.lanes.lane import LaneFacts
from penstock.lanes.place import Place
from penstock.lanes.table import LANES
from penstock.plan.machine import forget_peak, return_freed_memory
from penstock.proof.selfcheck import check_class
from penstock.proof.verdict import Finding, Verdict, Way, judged

COPIES_OF_WEIGHTS = 3.5  # beside each other while bfloat16 is held against float32, with room for activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The verdict of one model in its place, as far as it was made."""

    place: Place
    verdict: Verdict

    @classmethod
    def of(cls, place: Place, *, rerun: bool = False) -> Checks:
        """The part that needs no weights."""
        verdict = None if rerun else place.kept_verdict()
        if verdict is not None:
            return cls(place=place, verdict=verdict)
        device = torch.device(place.device)
        with quiet_library():
            model_class, config = LANES[place.lane.id].loader_class().library_class(place.files)
            verdict = check_class(model_class, config, device=device, make_attention=attention_backend)
        _forget_check(device)
        place.keep_verdict(verdict)
        return cls(place=place, verdict=verdict)

    def facts(self, model: Any = None) -> LaneFacts:
        """The lane's facts for the way that the verdict allows, and of a loaded model what memory did not allow."""
        facts = judged(self.place.lane, self.verdict, is_strict=self.place.config.strict)
        if model is None or not self.needs_real_weights:
            return facts
        needed = COPIES_OF_WEIGHTS * _weight_bytes(model) / GIB
        dtype = self.place.dtype
        skipped = f"the {dtype} weights were not compared with float32, which takes {needed:.1f} GiB of --memory"
        return dataclasses.replace(facts, reason=f"{facts.reason}; {skipped}")

    def with_finding(self, part: str, found: Finding) -> Checks:
        """The verdict with one more part of it; it is exact while all of them are."""
        changes: dict[str, Any] = {part: found}
        if not found.exact:
            changes |= {"exact": False, "max_difference": found.max_difference, "reason": found.reason}
            if self.has_pages:  # what failed is not used to read whole prompts either
                changes["way"] = Way.OWN_CACHE
        return self.with_changes(changes)

    def with_changes(self, changes: dict[str, Any]) -> Checks:
        """The verdict with other fields, which is kept for the next load."""
        checks = dataclasses.replace(self, verdict=self.verdict.model_copy(update=changes))
        self.place.keep_verdict(checks.verdict)
        return checks

    @property
    def has_pages(self) -> bool:
        return self.verdict.way in (Way.PACKED, Way.PAGED)

    def with_real_weights(self, model: Any, check: Callable[[], Finding]) -> Checks:
        """`check` holds a narrow dtype to float32; it is made where it is due and memory allows."""
        free_bytes = self.place.budget_bytes - self.place.runtime_bytes
        if not self.needs_real_weights or COPIES_OF_WEIGHTS * _weight_bytes(model) > free_bytes:
            return self
        checks = self.with_finding("real_weights", check())
        _forget_check(torch.device(self.place.device))
        return checks

    @property
    def needs_real_weights(self) -> bool:
        return self.place.dtype != "float32" and self.verdict.exact and self.verdict.real_weights is None


def _forget_check(device: torch.device) -> None:
    """What a check took is no request's memory."""
    return_freed_memory()
    forget_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _weight_bytes(model: Any) -> int:
    return sum({parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}.values())
