"""How and where a model will run: lane, settings, device, dtype, bytes; and what every lane's price is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import (
    RESIDENT_TOKENS,
    STATE_SHARE,
    STREAMED_TILES,
    STREAMED_TOKENS,
    SWEEP_TOKENS,
    EngineConfig,
    told_budget,
    written_budget,
)
from penstock.errors import InvalidSetting, MemoryTooSmall
from penstock.kernels import build
from penstock.lanes.lane import LaneFacts
from penstock.models.files import ModelFiles
from penstock.models.quantization import Quantization, expanded_types, has_codes_for_card, quantization_of, stored_types
from penstock.models.shapes import DTYPE_BYTES
from penstock.plan.devices import DeviceMemory
from penstock.plan.expert_slots import Mixture
from penstock.plan.machine import default_memory_budget
from penstock.plan.memory import AttentionTiling, MemoryModel, ModelShape
from penstock.plan.placement import place_layers
from penstock.plan.recordings import LARGEST_CHUNKS, LARGEST_DECODES, captured_size, recording_bytes
from penstock.proof.verdict import Verdict, load_verdict, save_verdict, verdict_key

CPU_TILING = AttentionTiling(query_rows=512, key_rows=1024)
# On a GPU scores stay in registers; partial results exist only for chunks too small to fill the card.
CUDA_TILING = AttentionTiling(query_rows=256, key_rows=64)
TILINGS = {"cpu": CPU_TILING, "cuda": CUDA_TILING, "mps": CPU_TILING}
# A CPU's matrix library packs panels: 67 MB in bfloat16 or 134 MB in float32 take no more than this.
MAX_PACKED_BYTES = {"cpu": 16 * 2**20, "cuda": None, "mps": None}
NO_SHARED_PREFIXES = "the prefix cache is off: the model keeps its own cache for each sequence"
TEXT_ALONE = "; --text-only reads its text part as a text model, which shares prefixes where its check allows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Says how and where a model will run, and with how many bytes."""

    files: ModelFiles
    lane: LaneFacts
    config: EngineConfig
    device: str
    dtype: str
    runtime_bytes: int = 0
    budget_bytes: int = 0

    def with_memory(self, gpu: DeviceMemory | None, runtime_bytes: int) -> Place:
        """Makes the place with the budget, and what is taken before the weights: that, or what the card says."""
        budget_bytes = self.config.memory or (gpu.default_budget if gpu else default_memory_budget())
        return replace(self, runtime_bytes=gpu.runtime_bytes if gpu else runtime_bytes, budget_bytes=budget_bytes)

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def most_captured(self) -> int:
        """Counts the sequences of the largest step of decodes that is captured."""
        return min(self.config.max_running, LARGEST_DECODES)

    @property
    def most_captured_tokens(self) -> int:
        """Counts the tokens of the largest step with chunks that is captured."""
        config = self.config
        return captured_size(
            config.most_prompt_tokens + config.max_running if config.most_prompt_tokens else LARGEST_CHUNKS
        )

    def with_recordings(self, memory: MemoryModel, *, most_chunks: int = 0) -> MemoryModel:
        """Counts what captured steps keep, on a card."""
        if self.device != "cuda":
            return memory
        kept = recording_bytes(memory, most_decodes=self.most_captured, most_chunks=most_chunks)
        return replace(memory, recording_bytes=kept)

    @property
    def multiplies_codes(self) -> bool:
        """Whether rows are multiplied with weights in few bits as they lie; they are dequantized otherwise."""
        return self.device == "cuda" or (self.dtype == "bfloat16" and build.can_run(self.config.cpu_kernels))

    @property
    def quantize(self) -> str:
        """The format of the matrices. What was asked for is refused where it cannot be had."""
        asked = self.config.quantize
        if not self.lane.keeps_codes:
            return "none"
        if self.device == "cuda" and asked in ("auto", "keep") and has_codes_for_card(self.files):
            return "keep"
        if asked == "auto":
            is_kept = self.device == "cpu" and bool(stored_types(self.files)) and self.multiplies_codes
            return "keep" if is_kept else "none"
        if asked != "none" and self.device != "cpu":
            raise InvalidSetting(
                f"--quantize {asked} is for processors; on device {self.device!r} weights stay in the model's dtype, "
                "but for experts of gpt-oss in MXFP4. Leave it out or use --device cpu."
            )
        if asked == "keep" and not stored_types(self.files):
            raise InvalidSetting("--quantize keep needs a GGUF file with quantized weights; use int8 or int4 here.")
        return asked

    @property
    def quantization(self) -> Quantization | None:
        return quantization_of(self.files, self.quantize, self.device)

    def memory(self, shape: ModelShape, **others: Any) -> MemoryModel:
        """The memory model of a shape here; `others` are what only some lanes need."""
        usual: dict[str, Any] = {
            "tiling": TILINGS[self.device],
            "most_packed_bytes": MAX_PACKED_BYTES[self.device],
            "runtime_bytes": self.runtime_bytes,
            "block_size": self.config.block_size,
        }
        if self.device == "mps":  # attends by torch, with the scores in view
            shape = replace(shape, attends_through_scores=True)
        return MemoryModel(shape=shape, **usual | others)

    def state_slots(self, shape: ModelShape, *, has_checkpoints: bool) -> tuple[int, int]:
        """Counts (running sequences, checkpoints) whose recurrent state may be resident; at least one sequence runs."""
        if not shape.state_bytes:
            return 0, 0
        free_bytes = self.budget_bytes - self.runtime_bytes - shape.weight_bytes
        num_slots = max(1, int(free_bytes * STATE_SHARE) // shape.state_bytes)
        num_checkpoints = min(num_slots // 2, self.config.max_checkpoints) if has_checkpoints else 0
        return min(self.config.max_running, num_slots - num_checkpoints), num_checkpoints

    def streaming(self, memory: MemoryModel, layer_bytes: Sequence[int], mixture: Mixture | None) -> MemoryModel:
        """Makes layers stream where those that stay would leave no room to read a prompt."""
        config, budget = self.config, self.budget_bytes
        longest = memory.shape.max_context
        if memory.kv_capacity(budget_bytes=budget, chunk=config.min_chunk_size) >= min(RESIDENT_TOKENS, longest):
            return memory
        num_tokens = min(config.context or STREAMED_TOKENS, longest)
        while num_tokens >= config.min_chunk_size:
            for tile in STREAMED_TILES:
                narrow = replace(memory, tile_tokens=tile)
                needed = narrow.budget_for(num_tokens, chunk=min(num_tokens, SWEEP_TOKENS))
                placement = place_layers(layer_bytes, lacking_bytes=needed - budget, mixture=mixture)
                if placement is not None:
                    streams = f"{len(placement.streamed)} of {placement.num_layers} layers would stream from disk"
                    config.refuse_if_strict(f"{streams} for each step", f"Raise --memory to {written_budget(needed)}.")
                    return replace(narrow, placement=placement)
            num_tokens //= 2
        return memory

    def with_placement(self, memory: MemoryModel) -> Place:
        """Makes the place whose steps are as wide as pays where layers stream."""
        if not memory.placement.streamed or self.config.max_chunk_size is not None:
            return self
        return replace(self, config=replace(self.config, max_chunk_size=SWEEP_TOKENS))

    def room(self, memory: MemoryModel) -> int:
        """Tokens whose KV the budget holds; refuses a budget that not even the smallest chunk fits."""
        config, budget = self.config, self.budget_bytes
        if self.device != "cpu":
            # Pages of a GPU are all taken at load, so room for a chunk is kept beside them: the largest, or half...
            longest = memory.shape.max_context
            chunk = config.most_prompt_tokens or min(config.context or longest, longest)
            while chunk > config.min_chunk_size:
                if (capacity := memory.kv_capacity(budget_bytes=budget, chunk=chunk)) >= chunk:
                    return capacity
                chunk //= 2
        capacity = memory.kv_capacity(budget_bytes=budget, chunk=config.min_chunk_size)
        if capacity < config.min_chunk_size:
            least = memory.peak_bytes(chunk=config.min_chunk_size, context=config.min_chunk_size)
            raise MemoryTooSmall(
                f"The memory budget is {told_budget(budget)}; this model needs at least {written_budget(least)} "
                f"({written_budget(memory.weight_bytes)} of it weights). Raise --memory or take a smaller model."
            )
        return capacity

    def context_limit(self, model_context: int) -> tuple[int, list[str]]:
        """The context that holds, and what to say when it goes past what the model was trained for."""
        asked = self.config.context
        if asked is None or asked <= model_context:
            return asked or model_context, []
        message = f"context {asked} is past the {model_context} that the model was trained for"
        self.config.refuse_if_strict(message, "Lower --context.")
        return asked, [f"{message}; answers may be poor"]

    def lane_adjustments(self) -> list[str]:
        """What the way of running takes away from what was asked for."""
        lane, config = self.lane, self.config
        found: list[str] = []
        if lane.why_text_only and config.text_only is None:
            found.append(f"only the text part is read: {lane.why_text_only}")
        if self.files.adapter is not None and self.quantize != "none" and self.device == "cpu":
            found.append("matrices that the adapter changes are expanded and packed again; --quantize none rounds less")
        if lane.reads_whole and config.chunk_size != 0:
            found.append(f"prompts are read whole: {lane.reason}")
        if not lane.shares_prefixes and config.prefix_cache:
            found.append(NO_SHARED_PREFIXES + TEXT_ALONE * lane.reads_images)
        if not lane.shares_prefixes and config.overlap:
            found.append(f"overlap {config.overlap} lowered to 0: the model's own cache cannot be rewound")
            config.refuse_if_strict(found[-1], "Lower --overlap to 0.")
        if self.files.why_no_tower:
            found.append(self.files.why_no_tower)
        if self.quantize == "keep" and (names := expanded_types(self.files)):
            found.append(f"weights in {', '.join(names)} are expanded to {self.dtype}: nothing multiplies their codes")
        if config.cache_dir is not None and not self.uses_disk:
            found.append(f"nothing is kept in the cache folder: {self.why_no_disk}")
            config.refuse_if_strict(found[-1], "Leave --cache-dir out.")
        if lane.reads_source and config.overlap:
            found.append(f"overlap {config.overlap} has no meaning for a source; it is 0")
        return found

    @property
    def why_no_disk(self) -> str:
        """Says why a lane or a device has no part in the cache folder; empty: they have."""
        if self.lane.reads_source or not self.lane.shares_prefixes:
            return "the model keeps its own cache for each sequence, of which no part is shared"
        if not self.config.prefix_cache:
            return "prefix_cache is off"
        return "" if self.device == "cpu" else f"it is for processors so far, not for {self.device}"

    @property
    def uses_disk(self) -> bool:
        return self.config.cache_dir is not None and not self.why_no_disk

    def settings_that_hold(self) -> EngineConfig:
        """The settings, without what this lane cannot do with its model."""
        config = self.config
        if self.lane.reads_source:  # its states depend on all of it: no part is shared or computed twice
            config = replace(config, overlap=0, prefix_cache=False)
        return replace(config, chunk_size=0, overlap=0) if self.lane.reads_whole else config

    @property
    def verdict_key(self) -> str:
        return verdict_key(self.files.config, dtype=self.dtype, lane=self.lane.id, backend=self.device)

    def kept_verdict(self) -> Verdict | None:
        """Loads the verdict of an earlier check of this config with these libraries; None when there was none."""
        return load_verdict(self.verdict_key)

    def keep_verdict(self, verdict: Verdict) -> None:
        save_verdict(self.verdict_key, verdict)
