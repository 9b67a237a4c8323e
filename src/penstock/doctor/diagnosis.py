"""A diagnosis: what was found, and what to do about it."""

from __future__ import annotations

import re
from enum import Enum

from pydantic import model_validator

from penstock.document import Document
from penstock.errors import PenstockError


class Severity(Enum):
    GOOD = "good"
    NOTE = "note"  # it works, and could be better
    PROBLEM = "problem"  # something will be refused, or be far slower than it need be


class Diagnosis(Document):
    topic: str
    status: Severity
    finding: str
    remedy: str | None = None  # None: there is nothing to do

    @model_validator(mode="after")
    def _has_a_way_out(self) -> Diagnosis:
        assert (self.remedy is None) == (self.status is Severity.GOOD), "what is not good has a remedy, and only that"
        return self


def good(topic: str, finding: str) -> Diagnosis:
    return Diagnosis(topic=topic, status=Severity.GOOD, finding=finding)


def note(topic: str, finding: str, remedy: str) -> Diagnosis:
    return Diagnosis(topic=topic, status=Severity.NOTE, finding=finding, remedy=remedy)


def problem(topic: str, finding: str, remedy: str) -> Diagnosis:
    return Diagnosis(topic=topic, status=Severity.PROBLEM, finding=finding, remedy=remedy)


def refused(topic: str, error: PenstockError) -> Diagnosis:
    """Errors end with their way out."""
    message = str(error).strip().rstrip(".")
    found = list(re.finditer(r"[;.] ", message))
    if not found:
        return problem(topic, message, "Mend it, and ask again")
    cut = found[-1]
    way_out = message[cut.end() :]
    return problem(topic, message[: cut.start()], way_out[:1].upper() + way_out[1:])
