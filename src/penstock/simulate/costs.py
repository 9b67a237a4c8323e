"""What a step takes on two machines: models fitted to measured figures, with the figures and their source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from penstock.schedule.budget import StepLoad, fit_coefficients

Reading = Literal["chunks", "sweeps", "auto"]  # auto: whichever is predicted to be faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Work of one or several steps, and the seconds that it took."""

    features: tuple[float, ...]
    elapsed_s: float


def reading(num_tokens: int, *, chunk_size: int, elapsed_s: float) -> Measurement:
    """A whole prompt read alone: the sum over its chunks."""
    starts = range(0, num_tokens, chunk_size)
    loads = [StepLoad().with_chunk(start, min(chunk_size, num_tokens - start)) for start in starts]
    features = tuple(sum(column) for column in zip(*(load.features for load in loads), strict=True))
    return Measurement(features=features, elapsed_s=elapsed_s)


def decoding(batch: int, *, context: int, elapsed_s: float) -> Measurement:
    """One step of `batch` decodes."""
    load = StepLoad(num_tokens=batch, decode_contexts=batch * context)
    return Measurement(features=load.features, elapsed_s=elapsed_s)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A cost model and the settings that make sense with it."""

    name: str
    source: str
    measurements: tuple[Measurement, ...]
    ceiling: int  # tokens per step
    floor: int
    num_blocks: int
    max_running: int
    num_layers: int
    scale: str  # how the scenarios were fitted to the machine
    reading: Reading = "chunks"  # how long prompts are read

    @cached_property
    def coefficients(self) -> tuple[float, ...]:
        """Fits seconds to the features of a StepLoad.

        All but a chunk's context: prompts in chunks of one size do not tell it from their tokens. A chunk fetches keys
        at least as a decode does, and counts as that.
        """
        *found, _ = fit_coefficients([((*m.features[:-1], 0.0), m.elapsed_s) for m in self.measurements])
        return (*found, found[-1])

    def seconds(self, features: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))


MACHINES = {
    "h200": Machine(
        name="h200",
        source="vLLM 0.24.0 on one NVIDIA H200, a decoder of the shape of Qwen3-8B in bf16",
        # It reads in steps of 8,192 tokens on this card unless told otherwise.
        measurements=(
            reading(2_048, chunk_size=8_192, elapsed_s=0.0484),
            reading(8_192, chunk_size=8_192, elapsed_s=0.209),
            reading(32_768, chunk_size=8_192, elapsed_s=1.236),
            reading(131_072, chunk_size=8_192, elapsed_s=11.061),
            decoding(1, context=1_024, elapsed_s=0.00522),
            decoding(8, context=1_024, elapsed_s=0.00576),
            decoding(64, context=1_024, elapsed_s=0.00817),
            decoding(256, context=1_024, elapsed_s=0.0198),
            decoding(8, context=32_768, elapsed_s=0.0148),
        ),
        ceiling=8_192,
        floor=64,
        num_blocks=45_000,  # 720,000 tokens of 144 KiB in about 100 GiB
        max_running=256,
        num_layers=36,
        scale="as named",
    ),
    "cpu": Machine(
        name="cpu",
        source="Penstock with SmolLM2-135M in bf16 on two threads of a two-core machine with AVX-512 bf16",
        measurements=(
            reading(2_048, chunk_size=1_024, elapsed_s=2_048 / 794),
            reading(6_115, chunk_size=1_024, elapsed_s=6_115 / 383),
            decoding(1, context=50, elapsed_s=1 / 28),
            decoding(1, context=2_400, elapsed_s=1 / 20),
            decoding(1, context=6_100, elapsed_s=1 / 12.7),
        ),
        ceiling=1_024,
        floor=16,
        num_blocks=4_096,  # 65,536 tokens of 22.5 KiB in 1.4 GiB
        max_running=16,
        num_layers=30,
        scale="about a tenth of the lengths and fewer requests at a time",
    ),
}
