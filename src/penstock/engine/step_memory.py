"""What the memory model says of an engine's next step."""

from __future__ import annotations

from dataclasses import replace

from penstock.cache.states import StatePool
from penstock.config import EngineConfig, written_budget
from penstock.engine.loading import LoadedModel
from penstock.errors import InvalidSetting
from penstock.plan.chunks import last_chunks
from penstock.plan.placement import Placement
from penstock.plan.prompt_plan import ANSWER_TOKENS

MARGIN = 1.02  # what a process holds before the weights differs by that much from run to run


class StepMemory:
    def __init__(self, model: LoadedModel, config: EngineConfig, states: StatePool | None) -> None:
        self.is_strict = config.strict and config.chunk_size is not None
        self._config = config
        self._memory = model.memory
        self.budget_bytes = model.budget_bytes
        self._capacity_tokens = model.num_blocks * config.block_size
        self._states = states
        # The pages of a card are all there from the start, and so are its slots for states.
        self._is_all_taken = model.device.type != "cpu" and model.lane.facts.shares_prefixes

    def chunk_limit(self, start: int, resident_tokens: int, wanted: int) -> int:
        """Finds the largest chunk that fits; under --strict one smaller than the wanted one is refused."""
        allowed = self._largest_chunk(start, resident_tokens, wanted)
        if allowed < wanted and self.is_strict:
            raise InvalidSetting(
                f"--strict: the memory budget allows {allowed} tokens in the next step, not {wanted}. "
                "Raise --memory or lower --chunk-size."
            )
        return allowed

    def fits_first(self, num_tokens: int) -> bool:
        """Whether a prompt may begin with a chunk of that size while nothing else is held."""
        return self._largest_chunk(0, 0, num_tokens) == num_tokens

    def budget_for(self, num_tokens: int) -> str:
        """Writes the budget under which a prompt of that length is read in chunks as asked for, and answered.

        All layers would stay there, as they do wherever they leave room for a prompt.
        """
        config, memory = self._config, replace(self._memory, placement=Placement())
        chunk = max(config.min_chunk_size, min(config.most_prompt_tokens or num_tokens, num_tokens))
        return written_budget(MARGIN * memory.budget_for(num_tokens + ANSWER_TOKENS, chunk=chunk))

    def peak_estimate(self, chunk: int, context: int, resident_tokens: int) -> int:
        return self._memory.peak_bytes(
            chunk=chunk,
            context=context,
            resident_tokens=self._resident_tokens(resident_tokens),
            state_slots=self._resident_states,
        )

    def final_peak(self, chunk: int, num_tokens: int) -> int:
        """Predicts the peak of a whole prompt in such chunks; they shrink before they pass the budget."""
        peaks = [self.peak_estimate(size, end, end) for size, end in last_chunks(num_tokens, chunk)]
        return min(self.budget_bytes, max(peaks))

    def _largest_chunk(self, start: int, resident_tokens: int, wanted: int) -> int:
        return self._memory.largest_chunk(
            start=start,
            budget_bytes=self.budget_bytes,
            upper=wanted,
            resident_tokens=self._resident_tokens(resident_tokens),
            capacity_tokens=self._capacity_tokens,
            state_slots=self._resident_states,
        )

    def _resident_tokens(self, num_written: int) -> int:
        return self._capacity_tokens if self._is_all_taken else num_written

    @property
    def _resident_states(self) -> int:
        if self._states is None:
            return 0
        if self._is_all_taken:
            return self._memory.num_running_states + self._memory.num_checkpoints
        return self._states.high_water
