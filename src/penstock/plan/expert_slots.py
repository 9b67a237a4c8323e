"""Experts of streamed layers in slots of their own, and which steps read whole layers instead. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What the experts of a model take."""

    num_experts: int  # of a layer
    num_active: int  # of a row
    expert_bytes: tuple[int, ...]  # one expert's, by layer; 0: the layer has none

    def layer_bytes(self, index: int) -> int:
        return self.num_experts * self.expert_bytes[index]

    def spared_bytes(self, index: int) -> int:
        """Counts what a row of its own does not read of a layer."""
        return (self.num_experts - self.num_active) * self.expert_bytes[index]

    def reads_chosen(self, num_rows: int, num_slots: int) -> bool:
        """Whether rows read their experts alone: where they would take all, the next layer is read meanwhile."""
        share = 1 - (1 - self.num_active / self.num_experts) ** num_rows
        return share <= 0.5 and num_rows * self.num_active <= num_slots


class ExpertSlots:
    """Which slot has which expert of which layer; the one that was used longest ago leaves first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._held: dict[tuple[int, int], int] = {}  # slots by (layer, expert), the longest unused first

    def take(self, layer: int, experts: Iterable[int]) -> tuple[dict[int, int], list[int]]:
        """Gives (slots by expert, experts that have to be read into theirs); none of them pushes another one out."""
        wanted = sorted(set(experts))
        assert len(wanted) <= self.num_slots, "a step that needs more reads whole layers"
        missing = [expert for expert in wanted if (layer, expert) not in self._held]
        for expert in wanted:
            if (layer, expert) in self._held:
                self._held[layer, expert] = self._held.pop((layer, expert))
        for expert in missing:
            slot = self._free.pop() if self._free else self._held.pop(next(iter(self._held)))
            self._held[layer, expert] = slot
        return {expert: self._held[layer, expert] for expert in wanted}, missing

    def drop(self, layer: int, experts: Iterable[int]) -> None:
        """Forgets experts that could not be read."""
        self._free += [self._held.pop((layer, expert)) for expert in experts]

    def drop_below(self, end: int) -> None:
        """Forgets what the slots before `end` have: something else was read there."""
        for key in [key for key, slot in self._held.items() if slot < end]:
            self._free.append(self._held.pop(key))


def slot_places(areas: Iterable[tuple[int, int]], slot_bytes: int) -> list[int]:
    """Finds where slots begin in areas of memory, (first byte, end) each."""
    return [place for first, end in areas for place in range(first, end - slot_bytes + 1, slot_bytes)]
