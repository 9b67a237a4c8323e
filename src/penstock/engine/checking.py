"""The self-check of a model that transformers runs: kept from an earlier load, or made now, and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.loading import attention_backend, return_freed_memory
from penstock.engine.planning import kept_verdict
from penstock.lanes.lane import GENERIC_MULTIMODAL, GENERIC_TEXT, SEQ2SEQ_SOURCE, LaneFacts
from penstock.lanes.selfcheck import check_class
from penstock.lanes.verdicts import Finding, Verdict, Way, save_verdict, verdict_key
from penstock.models.files import ModelFiles
from penstock.models.pretrained import causal_class, image_text_class, quiet_library, seq2seq_class
from penstock.plan.machine import forget_peak

COPIES_OF_WEIGHTS = 3.5  # beside each other while bfloat16 is held against float32, with room for activations
GIB = 2**30
# What finds the library's class and config of a model, by the lane that runs it.
CLASS_BY_LANE: dict[str, Callable[[ModelFiles], tuple[type, Any]]] = {
    GENERIC_TEXT: causal_class,
    GENERIC_MULTIMODAL: image_text_class,
    SEQ2SEQ_SOURCE: seq2seq_class,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The verdict of one model on one lane, as far as it was made. `facts` are the lane's before any check."""

    files: ModelFiles
    facts: LaneFacts
    dtype: str
    device: torch.device
    verdict: Verdict

    @classmethod
    def of(
        cls,
        files: ModelFiles,
        facts: LaneFacts,
        dtype: str,
        device: torch.device,
        *,
        rerun: bool = False,
    ) -> Checks:
        """The part that needs no weights."""
        verdict = None if rerun else kept_verdict(files, facts, dtype, device.type)
        if verdict is not None:
            return cls(files=files, facts=facts, dtype=dtype, device=device, verdict=verdict)
        with quiet_library():
            model_class, config = CLASS_BY_LANE[facts.id](files)
            verdict = check_class(model_class, config, device=device, make_attention=attention_backend)
        _forget_check(device)
        checks = cls(files=files, facts=facts, dtype=dtype, device=device, verdict=verdict)
        checks.keep()
        return checks

    def keep(self) -> None:
        key = verdict_key(self.files.config, dtype=self.dtype, lane=self.facts.id, backend=self.device.type)
        save_verdict(key, self.verdict)

    def with_finding(self, part: str, found: Finding) -> Checks:
        """The verdict with one more part of it; it is exact while all of them are."""
        changes: dict[str, Any] = {part: found}
        if not found.exact:
            changes |= {"exact": False, "max_difference": found.max_difference, "reason": found.reason}
            if self.verdict.way in (Way.PACKED, Way.PAGED):  # what failed is not used to read whole prompts either
                changes["way"] = Way.OWN_CACHE
        checks = dataclasses.replace(self, verdict=self.verdict.model_copy(update=changes))
        checks.keep()
        return checks

    def with_real_weights(self, model: Any, free_bytes: int, check: Callable[[], Finding]) -> Checks:
        """`check` holds a narrow dtype to float32; it is made where it is due and memory allows."""
        if not self.needs_real_weights or COPIES_OF_WEIGHTS * _weight_bytes(model) > free_bytes:
            return self
        checks = self.with_finding("real_weights", check())
        _forget_check(self.device)
        return checks

    @property
    def needs_real_weights(self) -> bool:
        return self.dtype != "float32" and self.verdict.exact and self.verdict.real_weights is None

    def noted(self, facts: LaneFacts, model: Any) -> LaneFacts:
        """The facts, with a word on the part that memory did not allow."""
        if not self.needs_real_weights:
            return facts
        needed = COPIES_OF_WEIGHTS * _weight_bytes(model) / GIB
        skipped = f"the {self.dtype} weights were not compared with float32, which takes {needed:.1f} GiB of --memory"
        return dataclasses.replace(facts, reason=f"{facts.reason}; {skipped}")


def _forget_check(device: torch.device) -> None:
    """What a check took is no request's memory."""
    return_freed_memory()
    forget_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _weight_bytes(model: Any) -> int:
    return sum({parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}.values())
