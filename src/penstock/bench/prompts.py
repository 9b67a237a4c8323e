"""Seeded prompts of random tokens."""

from __future__ import annotations

from functools import cache
from random import Random

from penstock.models.files import resolve


@cache
def vocabulary_size(model: str) -> int:
    config = resolve(model, weights=False).config
    return int((config.get("text_config") or config)["vocab_size"])


def seeded_prompt(model: str, length: int, *key: object) -> list[int]:
    """Equal keys give equal prompts; others share no prefix."""
    generator, size = Random(f"{length} {key}"), vocabulary_size(model)
    return [generator.randrange(size) for _ in range(length)]
