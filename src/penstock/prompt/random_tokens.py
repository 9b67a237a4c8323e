"""Random token ids for what is measured rather than answered. Needs nothing but Python: other engines import it too."""

from __future__ import annotations

from random import Random


def random_tokens(length: int, seed: int | str, *, end: int, first: int = 0, never: int | None = None) -> list[int]:
    """Draws tokens from `first` up to `end`; equal seeds give equal tokens. In place of `never` stands the next one."""
    generator = Random(seed)
    drawn = (generator.randrange(first, end) for _ in range(length))
    return [(token + 1) % end if token == never else token for token in drawn]
