"""`Document`: what goes out as JSON and comes in again."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def from_fields_of(cls, source: object, **others: Any) -> Self:
        """Takes each field from the others, or from what the source has under the same name."""
        names = [name for name in cls.model_fields if name not in others and hasattr(source, name)]
        return cls(**{name: getattr(source, name) for name in names}, **others)
