"""What parts of layers are made of: mixtures of experts, recurrent layers. No torch: the planner reads it too."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names the parts of a mixture in a checkpoint."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    layout: Literal["one by one", "inputs first", "outputs first"] = "one by one"  # else all in one tensor
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: the first is gate and up in one
    shared_gate: str = "mlp.shared_expert_gate"
    score_bias: str = "mlp.gate.e_score_correction_bias"
    score_bias_is_row: bool = False
    routed_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Keys and values of all heads are made of one vector, which pages keep behind a part of keys that is rotated."""

    query_rank: int | None  # None: queries are made of the hidden state itself
    rank: int
    plain_size: int  # of a head's queries and keys
    rotated_size: int
    value_size: int
    is_interleaved: bool  # rotated pairs lie side by side

    @property
    def query_size(self) -> int:
        return self.plain_size + self.rotated_size

    @property
    def kept_size(self) -> int:
        return self.rotated_size + self.rank

    def first_rows(self, num_heads: int) -> tuple[int, int, int]:
        """Counts what is made of a hidden state: for queries, the vector, the rotated part."""
        return self.query_rank or num_heads * self.query_size, self.rank, self.rotated_size

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        made = num_heads * (self.plain_size + self.value_size) * self.rank + self.rank
        queries = (num_heads * self.query_size + 1) * (self.query_rank or 0)
        return (sum(self.first_rows(num_heads)) + num_heads * self.value_size) * hidden_size + made + queries


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouting:
    """Experts are chosen by scores between 0 and 1, of its own for each unless they add up to one."""

    has_bias: bool  # added to a score where experts are chosen, not where they are weighed
    num_groups: int  # of experts
    num_active_groups: int  # of one token: those whose best experts have the highest scores
    scale: float  # of the weights
    eps: float  # added to their sum where they are normalised
    is_softmax: bool = False  # scores add up to one
    num_best: int = 2  # of a group, whose scores are its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    num_experts: int
    num_active: int  # of one token
    intermediate_size: int
    normalizes_chosen: bool  # whether the weights of a token's experts add up to one
    names: ExpertNames
    has_biases: bool = False
    clamp: float | None = None  # of gate and up, which alternate then
    clamp_alpha: float = 1.0
    shared_size: int = 0  # of an expert that every token has
    has_shared_gate: bool = True  # whether a gate of its own weighs it
    is_gated: bool = True
    sigmoid: SigmoidRouting | None = None  # None: softmax
    norms_routed: bool = False  # the router has a norm of its own, and each expert a factor of its weight

    def num_parameters(self, hidden_size: int) -> int:
        matrices = (2 + self.is_gated) * self.intermediate_size * hidden_size
        biases = (2 * self.intermediate_size + hidden_size + 1) * self.has_biases
        biases += self.sigmoid is not None and self.sigmoid.has_bias
        biases += self.norms_routed
        shared = ((2 + self.is_gated) * self.shared_size + self.has_shared_gate) * hidden_size * bool(self.shared_size)
        return self.num_experts * (matrices + biases + hidden_size) + shared + hidden_size * self.norms_routed


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec:
    """Tokens have a row in a second table too, with a part for each layer, which is gated and added last."""

    width: int  # of a part
    vocab_size: int
    padding: int  # the token whose row images take

    def num_looked_up(self, num_layers: int) -> int:
        return self.vocab_size * num_layers * self.width

    def num_parameters(self, hidden_size: int, num_layers: int) -> int:
        of_layer = (3 * hidden_size + self.vocab_size) * self.width + hidden_size
        return num_layers * of_layer + self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A gated delta rule behind a short convolution of queries, keys and values."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int
    is_grouped: bool  # whether the checkpoint's rows are grouped by key head

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Counts the channels of the convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return (self.num_value_heads, self.key_size, self.value_size)

    @property
    def tail_shape(self) -> tuple[int, int]:
        return (self.conv_width - 1, self.num_channels)

    def num_parameters(self, hidden_size: int) -> int:
        projections = (self.num_channels + 2 * self.value_width + 2 * self.num_value_heads) * hidden_size
        return projections + self.num_channels * self.conv_width + 2 * self.num_value_heads + self.value_size

    @property
    def widest_rows(self) -> int:
        """Counts the rows of the widest of the layer's projections."""
        return self.num_channels + self.value_width

    @property
    def values_per_token(self) -> tuple[int, int]:
        """Counts (in the model's dtype, in float32) the values that live at the widest moment of the layer."""
        projected = 2 * self.widest_rows + self.num_channels
        return projected, self.num_value_heads * 3 * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """A state space layer in the style of Mamba 2 behind a short convolution."""

    num_heads: int
    head_size: int
    num_groups: int  # of heads that share what they write along and read by
    state_size: int
    conv_width: int
    has_conv_bias: bool
    has_bias: bool
    time_step_limits: tuple[float, float]
    has_norm: bool = True  # else what is read is only gated
    norms_before_gate: bool = False
    input_scale: float = 1.0
    section_scales: tuple[float, ...] = ()  # of gate, channels, what is written along and read by, time steps
    output_scale: float = 1.0

    @property
    def inner_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def group_width(self) -> int:
        return self.num_groups * self.state_size

    @property
    def num_channels(self) -> int:
        """Counts the channels of the convolution."""
        return self.inner_width + 2 * self.group_width

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return (self.num_heads, self.state_size, self.head_size)

    @property
    def tail_shape(self) -> tuple[int, int]:
        return (self.conv_width - 1, self.num_channels)

    @property
    def widest_rows(self) -> int:
        """Counts the rows of the widest of the layer's projections."""
        return self.inner_width + self.num_channels + self.num_heads

    @property
    def values_per_token(self) -> tuple[int, int]:
        """Counts (in the model's dtype, in float32) the values that live at the widest moment of the layer."""
        projected = self.widest_rows + 2 * self.num_channels
        return projected, self.num_heads * (3 * self.state_size + 3 * self.head_size)

    def num_parameters(self, hidden_size: int) -> int:
        outward = hidden_size * (self.inner_width + self.has_bias)
        projections = self.widest_rows * (hidden_size + self.has_bias) + outward
        convolution = self.num_channels * (self.conv_width + self.has_conv_bias)
        return projections + convolution + 3 * self.num_heads + self.inner_width * self.has_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """A gated short convolution, whose only state is its tail."""

    num_channels: int
    conv_width: int
    has_bias: bool
    matrix_shape: tuple[int, ...] = (0,)

    @property
    def tail_shape(self) -> tuple[int, int]:
        return (self.conv_width - 1, self.num_channels)

    @property
    def widest_rows(self) -> int:
        """Counts the rows of the widest of the layer's projections."""
        return 3 * self.num_channels

    @property
    def values_per_token(self) -> tuple[int, int]:
        """Counts (in the model's dtype, in float32) the values that live at the widest moment of the layer."""
        return self.widest_rows + 3 * self.num_channels, 0

    def num_parameters(self, hidden_size: int) -> int:
        projections = (self.widest_rows + self.num_channels) * hidden_size
        biases = (self.widest_rows + self.num_channels + hidden_size) * self.has_bias
        return projections + self.num_channels * self.conv_width + biases


RecurrentSpec = DeltaSpec | MambaSpec | ConvSpec


def state_bytes(spec: RecurrentSpec, dtype_bytes: int) -> int:
    """Counts the bytes of one layer and one sequence: matrices in float32, the tail in the model's dtype."""
    return prod(spec.matrix_shape) * 4 + prod(spec.tail_shape) * dtype_bytes
