"""Says in which waves a GPU attends for the tokens of a chunk, and which chunks fill them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """Describes attention in tiles: every head takes a prompt's tokens tile by tile, and a wave of tiles runs at once.

    A wave takes its time however many tiles it has. Our own kernels split the keys instead, so that they fill the
    card with any chunk, and take `own_ratio` times as long as full waves do.
    """

    tile_tokens: int
    num_heads: int
    tiles_at_once: int
    own_ratio: float = math.inf  # inf: they are never asked

    def tokens_filled(self, num_tokens: int) -> int:
        """Counts the tokens that would take as long: those of the last wave too, however few tiles it has."""
        num_tiles = -(-num_tokens // self.tile_tokens) * self.num_heads
        return -(-num_tiles // self.tiles_at_once) * self.tiles_at_once * self.tile_tokens // self.num_heads

    def tokens_within(self, num_tokens: int) -> int:
        """Counts the most of these that leave no wave half empty; 0 where they do not fill one."""
        per_wave = self.tiles_at_once // self.num_heads * self.tile_tokens
        return num_tokens // per_wave * per_wave if per_wave else 0

    def are_filled_by(self, num_tokens: int) -> bool:
        """Tells whether waves read so many tokens at least as fast as our own kernels would."""
        return self.tokens_filled(num_tokens) <= self.own_ratio * num_tokens

    def tokens_charged(self, num_tokens: int) -> float:
        """Counts the tokens of full waves that take as long as these, read in the faster of both ways."""
        return min(self.tokens_filled(num_tokens), self.own_ratio * num_tokens)
