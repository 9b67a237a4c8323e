"""Which layers stay in memory and which are read again for every step, where the weights do not fit. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.config import CPU_GFLOPS_OF_A_CORE, DISK_BYTES_PER_S, MB, MIB
from penstock.document import Document
from penstock.plan.expert_slots import Mixture

NUM_SLOTS = 3  # of the ring: one layer is computed, one is there, one is being read
NUM_READERS = 2  # threads that read
READ_BYTES = 4 * MIB  # that a reader asks for at a time, and has a buffer for
PAGE = 4096  # to which reads past the page cache are aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layers that stream, through a ring of slots; the others stay."""

    streamed: tuple[int, ...] = ()
    num_layers: int = 0
    pass_bytes: int = 0  # that a pass over all layers reads
    slot_bytes: int = 0
    mixture: Mixture | None = None  # whose experts stream
    streams_experts_alone: bool = False  # all else of a layer stays
    cache_bytes: int = 0  # for experts beside the ring

    @property
    def ring_bytes(self) -> int:
        """Counts the slots, the room for experts, and the buffers of those who read."""
        if not self.streamed:
            return 0
        return min(NUM_SLOTS, len(self.streamed)) * self.slot_bytes + self.cache_bytes + NUM_READERS * READ_BYTES

    @property
    def token_bytes(self) -> int:
        """Counts what a pass of one token reads at most."""
        return self.pass_bytes - sum(self.mixture.spared_bytes(index) for index in self.streamed if self.mixture)

    @property
    def saved_bytes(self) -> int:
        return self.pass_bytes - self.ring_bytes


def spread(num_streamed: int, num_layers: int) -> tuple[int, ...]:
    """Spreads streamed layers evenly, so that the others are computed while they are read."""
    return tuple((2 * index + 1) * num_layers // (2 * num_streamed) for index in range(num_streamed))


def place_layers(layer_bytes: Sequence[int], *, lacking_bytes: int, mixture: Mixture | None = None) -> Placement | None:
    """Streams as few layers as save what is lacking; None where that cannot be had.

    Of a mixture the experts alone, if that saves it: all else is needed for every token. What is left is for experts.
    """
    if lacking_bytes <= 0:
        return Placement(num_layers=len(layer_bytes))
    of_experts = [] if mixture is None else [mixture.layer_bytes(index) for index in range(len(layer_bytes))]
    experts = _placed(of_experts, lacking_bytes)
    found = experts or _placed(layer_bytes, lacking_bytes)
    if found is None or mixture is None:
        return found
    cache_bytes = (found.saved_bytes - lacking_bytes) // PAGE * PAGE
    return replace(found, mixture=mixture, streams_experts_alone=experts is not None, cache_bytes=cache_bytes)


def _placed(layer_bytes: Sequence[int], lacking_bytes: int) -> Placement | None:
    """Streams as few layers as save that much, of those that have bytes to stream."""
    layers = [index for index, num_bytes in enumerate(layer_bytes) if num_bytes]
    for num_streamed in range(1, len(layers) + 1):
        streamed = tuple(layers[at] for at in spread(num_streamed, len(layers)))
        sizes = [layer_bytes[index] for index in streamed]
        slot_bytes = -(-max(sizes) // PAGE) * PAGE
        found = Placement(streamed=streamed, num_layers=len(layer_bytes), pass_bytes=sum(sizes), slot_bytes=slot_bytes)
        if found.saved_bytes >= lacking_bytes:
            return found
    return None


class StreamingPlan(Document):
    """Tells what streaming costs: of every pass over the layers, whatever the number of tokens."""

    num_streamed: int  # layers that are read again for each step
    num_layers: int  # of the model
    pass_bytes: int  # that each step reads
    pass_s: float  # that reading them takes
    bytes_per_s: float  # of the disk
    is_measured: bool  # whether the disk was measured for this plan; else it was assumed
    compute_bound_tokens: int  # of a step, from which on computing takes longer than reading
    token_bytes: int | None = None  # that a single token of a mixture reads at most; None: as every step
    cache_bytes: int = 0  # for experts that were used lately, beside the ring

    @classmethod
    def of(
        cls, placement: Placement, *, flops_per_token: float, num_cores: int, bytes_per_s: float | None = None
    ) -> StreamingPlan | None:
        """None where nothing streams. `bytes_per_s`: of the disk, measured; None: it is assumed."""
        if not placement.streamed:
            return None
        speed = bytes_per_s or DISK_BYTES_PER_S
        pass_s = placement.pass_bytes / speed
        tokens = pass_s * num_cores * CPU_GFLOPS_OF_A_CORE * 1e9 / flops_per_token
        return cls(
            num_streamed=len(placement.streamed),
            num_layers=placement.num_layers,
            pass_bytes=placement.pass_bytes,
            pass_s=pass_s,
            bytes_per_s=speed,
            is_measured=bytes_per_s is not None,
            compute_bound_tokens=max(1, round(tokens)),
            token_bytes=None if placement.mixture is None else placement.token_bytes,
            cache_bytes=placement.cache_bytes,
        )

    def summary(self) -> str:
        """Says it in a sentence."""
        known = "as measured" if self.is_measured else "as assumed"
        told = (
            f"{self.num_streamed} of {self.num_layers} layers stream from disk: {self.pass_bytes / MB:,.0f} MB for "
            f"each step, {self.pass_s:.1f} s at {self.bytes_per_s / MB:,.0f} MB/s {known}; steps of "
            f"{self.compute_bound_tokens:,} tokens and more take longer to compute"
        )
        if self.token_bytes is None:
            return told
        token_s = self.token_bytes / self.bytes_per_s
        written = f"about {self.token_bytes / MB:,.0f} MB for each token that is written, {token_s:.1f} s"
        return f"{told}; {written}, as it reads no experts but its own"
