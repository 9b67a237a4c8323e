"""`Document`: what goes out as JSON and comes in again."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
