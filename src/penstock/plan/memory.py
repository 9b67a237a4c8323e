"""What a chunk costs in bytes, and the largest chunk that a budget allows. Pure arithmetic, no torch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, fields
from math import ceil
from typing import Any

from penstock.config import CHECKPOINT_TOKENS, MB, STATE_SHARE
from penstock.plan.chunks import ChunkedPrefillConfig, num_chunks
from penstock.plan.placement import Placement

LOGIT_BYTES = 4  # logits are sampled in float32
NUM_TOKENS_WITHOUT_KV = 2**30  # a recurrent model's tokens cost nothing; another limit will hold


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the memory of a decoder depends on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    num_parameters: int
    largest_matrix: int  # elements of the largest matrix of a layer: a product may pack it anew
    dtype_bytes: int
    max_context: int
    attends_through_scores: bool = False  # softcaps: scores are materialised tile by tile
    num_recurrent_layers: int = 0  # without keys and values
    state_bytes: int = 0  # of one sequence, in all recurrent layers
    recurrent_bytes_per_token: int = 0  # that live while a recurrent layer is computed
    expert_bytes_per_token: int = 0  # that live while a GPU computes a mixture, or a CPU one in few bits
    layer_input_values: int = 0  # of a token, that live through a step beside what its layers compute
    state_bytes_per_token: int = 0  # kept beside keys and values as long as the token is
    num_quantized: int = 0  # parameters kept in few bits
    quantized_bytes: int = 0  # that those take
    dequantized_tile_bytes: int = 0  # of them, where rows are not multiplied with their codes
    group_sum_bytes_per_token: int = 0  # where they are
    copied_bytes_per_token: int = 0  # of the context, while a layer attends: models that keep their own cache
    kv_values_per_token: int | None = None  # of all layers; None: they are all alike
    swept_bytes_per_token: int = 0  # that a step keeps from layer to layer where it is cut into tiles

    @classmethod
    def of(cls, spec: object, **others: Any) -> ModelShape:
        """Takes each size from the others, or from what the spec has under the same name."""
        names = [field.name for field in fields(cls) if field.name not in others and hasattr(spec, field.name)]
        return cls(**{name: getattr(spec, name) for name in names}, **others)

    @property
    def weight_bytes(self) -> int:
        return (self.num_parameters - self.num_quantized) * self.dtype_bytes + self.quantized_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        num_values = self.kv_values_per_token
        if num_values is None:
            num_values = 2 * (self.num_layers - self.num_recurrent_layers) * self.num_kv_heads * self.head_size
        return num_values * self.dtype_bytes + self.state_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiling:
    """How many query rows and keys an attention call handles at once; its workspace follows from them."""

    query_rows: int
    key_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Predicts the resident bytes of the whole process while a chunk is computed."""

    shape: ModelShape
    tiling: AttentionTiling
    runtime_bytes: int
    block_size: int
    num_running_states: int = 0  # slots of the pool, where the model has recurrent state
    num_checkpoints: int = 0
    media_bytes: int = 0  # kept for features of media and for one call of their encoder
    num_logit_rows: int = 1  # whose logits exist at once
    most_packed_bytes: int | None = None  # of a matrix, while a product runs; None: all of it
    tile_tokens: int | None = None  # that a wider step is cut into inside each layer; None: it is not cut
    placement: Placement = field(default_factory=Placement)  # of layers: all stay, or some stream
    recording_bytes: int = 0  # that captures of a GPU's steps keep

    @property
    def weight_bytes(self) -> int:
        """Counts those that are resident, and the ring that others stream through."""
        return self.shape.weight_bytes - self.placement.saved_bytes

    def state_bytes(self, num_tokens: int) -> int:
        """Counts the bytes of one sequence of that many tokens: its own state and the checkpoints kept on the way."""
        num_kept = min(self.num_checkpoints, num_tokens // CHECKPOINT_TOKENS + 2)
        return (1 + num_kept) * self.shape.state_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks * self.block_size * self.shape.kv_bytes_per_token

    def activation_bytes(self, chunk: int, context: int) -> int:
        """Everything that lives only while `chunk` tokens that end at `context` are computed."""
        tile = min(chunk, self.tile_tokens or chunk)
        kept = chunk * self.shape.swept_bytes_per_token if tile < chunk else 0
        return kept + self.layer_bytes(tile) + self._attention_bytes(tile, context) + self._packing_bytes(tile)

    def logits_bytes(self, num_rows: int) -> int:
        """Logits in the model's dtype, in float32, and their softmax."""
        return num_rows * self.shape.vocab_size * (self.shape.dtype_bytes + 2 * LOGIT_BYTES)

    def peak_bytes(
        self, *, chunk: int, context: int, resident_tokens: int | None = None, state_slots: int | None = None
    ) -> int:
        """`resident_tokens`: all tokens whose KV is resident, where more than this sequence's `context`.

        `state_slots`: those that are resident, where known.
        """
        kv_tokens = context if resident_tokens is None else max(resident_tokens, context)
        return self.fixed_bytes(kv_tokens, state_slots) + self.activation_bytes(chunk, context)

    def fixed_bytes(self, kv_tokens: int, state_slots: int | None = None) -> int:
        """Counts all but the activations."""
        resident = self.runtime_bytes + self.weight_bytes + self.media_bytes + self.recording_bytes
        states = self.state_bytes(kv_tokens) if state_slots is None else state_slots * self.shape.state_bytes
        return resident + self.kv_bytes(kv_tokens) + states + self.logits_bytes(self.num_logit_rows)

    def largest_chunk(
        self,
        *,
        start: int,
        budget_bytes: int,
        upper: int,
        resident_tokens: int = 0,
        capacity_tokens: int | None = None,
        state_slots: int | None = None,
    ) -> int:
        """The most tokens after `start` whose peak stays within the budget; 0 if not even one does."""

        def peak(chunk: int) -> int:
            context = start + chunk
            resident = max(resident_tokens + chunk, context)
            if capacity_tokens is not None:
                resident = min(resident, capacity_tokens)
            return self.peak_bytes(chunk=chunk, context=context, resident_tokens=resident, state_slots=state_slots)

        return bisect_right(range(1, upper + 1), budget_bytes, key=peak)

    def kv_capacity(self, *, budget_bytes: int, chunk: int) -> int:
        """Tokens whose KV fits the budget beside the smallest chunk that must still run; a whole number of blocks."""
        slots = self.num_running_states + self.num_checkpoints
        fixed = self.peak_bytes(chunk=chunk, context=chunk, resident_tokens=0, state_slots=slots) - self.kv_bytes(chunk)
        free = max(0, budget_bytes - fixed)
        # Besides its KV, a token of the context may be copied by the layer that attends to it.
        per_token = self.shape.kv_bytes_per_token + self.shape.copied_bytes_per_token
        num_tokens = free // per_token if per_token else NUM_TOKENS_WITHOUT_KV * (free > 0)
        return num_tokens // self.block_size * self.block_size

    def budget_for(self, num_tokens: int, *, chunk: int) -> int:
        """Counts the bytes of a budget that holds so many tokens beside such a chunk: turns `kv_capacity` around."""
        slots = self.num_running_states + self.num_checkpoints
        fixed = self.peak_bytes(chunk=chunk, context=chunk, resident_tokens=0, state_slots=slots) - self.kv_bytes(chunk)
        copied = num_tokens * self.shape.copied_bytes_per_token
        needed = fixed + self.kv_bytes(num_tokens) + copied + self.block_size * self.shape.copied_bytes_per_token
        # A larger budget has more slots for states, up to their share of what the weights leave.
        taken = self.runtime_bytes + self.weight_bytes
        without_states = needed - taken - slots * self.shape.state_bytes
        return max(needed, taken + ceil(without_states / (1 - STATE_SHARE))) if slots else needed

    def layer_bytes(self, chunk: int) -> int:
        """The widest moment of a layer: residual and normed input beside attention's or the MLP's intermediates."""
        shape = self.shape
        heads = shape.num_heads * shape.head_size
        kv_heads = shape.num_kv_heads * shape.head_size
        attention = (heads + 2 * kv_heads) + heads + (heads + kv_heads)
        mlp = 3 * shape.intermediate_size + shape.hidden_size
        widest_bytes = max(max(attention, mlp) * shape.dtype_bytes, shape.recurrent_bytes_per_token)
        widest_bytes = max(widest_bytes, shape.expert_bytes_per_token)
        layer_input_bytes = shape.layer_input_values * shape.dtype_bytes
        # Each is made of two others.
        widest_bytes = max(widest_bytes, 2 * layer_input_bytes) + layer_input_bytes
        norm_in_float32 = 2 * shape.hidden_size * 4
        return chunk * (2 * shape.hidden_size * shape.dtype_bytes + widest_bytes + norm_in_float32)

    def _attention_bytes(self, chunk: int, context: int) -> int:
        """Two partial results per query tile in float32; scores only where the kernel does not keep them in tiles."""
        shape = self.shape
        rows = min(chunk, self.tiling.query_rows)
        partial = 3 * rows * shape.num_heads * (shape.head_size * 4 + 8)
        partial += shape.copied_bytes_per_token * context
        if shape.attends_through_scores:
            keys = min(context, self.tiling.key_rows)
            return partial + rows * shape.num_heads * keys * (2 * 4 + shape.dtype_bytes)
        return partial

    def _packing_bytes(self, chunk: int) -> int:
        """While a product of many rows runs: sums or a tile, for weights in few bits, and what the library packs."""
        if chunk == 1:
            return 0
        tile, matrix = self.shape.dequantized_tile_bytes, self.shape.largest_matrix * self.shape.dtype_bytes
        packed = min(tile, matrix) if tile else matrix
        sums = chunk * self.shape.group_sum_bytes_per_token
        return sums + tile + (packed if self.most_packed_bytes is None else min(packed, self.most_packed_bytes))


def over_budget(peak_bytes: int, budget_bytes: int | None) -> str | None:
    """Says by how much a measured peak is above the budget; None where it is not, or where none was given."""
    if budget_bytes is None or peak_bytes <= budget_bytes:
        return None
    excess = peak_bytes - budget_bytes
    told = f"{excess / MB:,.1f} MB" if excess >= MB / 10 else f"{excess / 1e3:,.1f} kB"
    return f"the peak of {peak_bytes / MB:,.1f} MB is {told} above --memory, {budget_bytes / MB:,.1f} MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillMemoryEstimate:
    """Working memory of a prefill, beyond weights and KV."""

    full_prefill_bytes: int
    chunked_prefill_bytes: int
    memory_savings_ratio: float
    num_chunks: int

    def summary(self) -> str:
        return (
            f"Full prefill: {self.full_prefill_bytes / MB:.1f} MB, Chunked: {self.chunked_prefill_bytes / MB:.1f} MB "
            f"({self.memory_savings_ratio:.1%} savings, {self.num_chunks} chunks)"
        )


def peak_memory_estimate(
    shape: ModelShape, seq_len: int, chunk_size: int, tiling: AttentionTiling | None = None
) -> PrefillMemoryEstimate:
    """Working memory of a prompt read whole and in chunks of that size."""
    tiling = tiling or AttentionTiling(query_rows=seq_len, key_rows=seq_len)
    model = MemoryModel(shape=shape, tiling=tiling, runtime_bytes=0, block_size=1)

    def working_bytes(chunk: int) -> int:
        return model.activation_bytes(chunk, seq_len) + model.logits_bytes(1) if chunk else 0

    full = working_bytes(seq_len)
    chunked = working_bytes(min(chunk_size or seq_len, seq_len))
    return PrefillMemoryEstimate(
        full_prefill_bytes=full,
        chunked_prefill_bytes=chunked,
        memory_savings_ratio=1 - chunked / full if full else 0.0,
        num_chunks=num_chunks(seq_len, ChunkedPrefillConfig(chunk_size=chunk_size)),
    )
