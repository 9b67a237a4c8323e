"""What the memory model says of an engine's next step."""

from __future__ import annotations

from penstock.cache.states import StatePool
from penstock.config import EngineConfig
from penstock.engine.loading import LoadedModel
from penstock.errors import InvalidSetting


class StepMemory:
    def __init__(self, model: LoadedModel, config: EngineConfig, states: StatePool | None) -> None:
        self.is_strict = config.strict and config.chunk_size is not None
        self._memory = model.memory
        self.budget_bytes = model.budget_bytes
        self._capacity_tokens = model.num_blocks * config.block_size
        self._states = states

    def chunk_limit(self, start: int, resident_tokens: int, wanted: int) -> int:
        """Under --strict a chunk smaller than the wanted one is refused."""
        allowed = self._largest_chunk(start, resident_tokens, wanted)
        if allowed < wanted and self.is_strict:
            raise InvalidSetting(
                f"--strict: after {start} tokens the memory budget allows a chunk of {allowed}, not {wanted}. "
                "Raise --memory or lower --chunk-size."
            )
        return allowed

    def fits_first(self, num_tokens: int) -> bool:
        """Whether a prompt may begin with a chunk of that size while nothing else is held."""
        return self._largest_chunk(0, 0, num_tokens) == num_tokens

    def peak_estimate(self, chunk: int, context: int, resident_tokens: int) -> int:
        return self._memory.peak_bytes(
            chunk=chunk, context=context, resident_tokens=resident_tokens, state_slots=self._resident_states
        )

    def _largest_chunk(self, start: int, resident_tokens: int, wanted: int) -> int:
        return self._memory.largest_chunk(
            start=start,
            budget_bytes=self.budget_bytes,
            upper=wanted,
            resident_tokens=resident_tokens,
            capacity_tokens=self._capacity_tokens,
            state_slots=self._resident_states,
        )

    @property
    def _resident_states(self) -> int:
        return self._states.high_water if self._states is not None else 0
