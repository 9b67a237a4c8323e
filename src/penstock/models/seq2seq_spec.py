"""What an encoder-decoder model is made of, read from its config: sizes for the memory model. No torch.

Its families spell the same sizes in three ways, and the first spelling that is there holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidModelFile
from penstock.plan.memory import ModelShape

UNLIMITED = 1 << 24  # tokens, where the model sets no limit
PASSES_PER_LAYER = 2  # over the source: its keys and values, then everything else
CROSS_PASSES = 1  # over the source: keys and values of every decoder layer
# A position's place in the request and in the scheduler's list.
POSITION_BYTES = 16
COMPUTES_POSITIONS = ("rope_parameters", "rope_theta", "num_global_tokens")
# A softcap of scores, or attention to keys near a row.
LOOKS_AT_SCORES = ("attn_logit_softcapping", "attention_window", "local_radius", "num_global_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSpec:
    """The encoder or the decoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    is_gated: bool
    has_global_projections: bool = False  # of tokens that see all others, besides those of the rest

    @property
    def num_attention_parameters(self) -> int:
        heads = 2 * (self.num_heads + self.num_kv_heads) + 3 * self.num_heads * self.has_global_projections
        return heads * self.hidden_size * self.head_size

    @property
    def num_mlp_parameters(self) -> int:
        return (3 if self.is_gated else 2) * self.hidden_size * self.intermediate_size

    @property
    def kv_elements_per_token(self) -> int:
        """Counts the keys and values of a token in one layer."""
        return 2 * self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqSpec:
    vocab_size: int
    encoder: StackSpec
    decoder: StackSpec
    max_positions: int | None  # of the source, and again of the answer; None: any
    num_token_tables: int  # embeddings of source and answer and the head, less what they share
    num_table_positions: int  # of source and answer; 0: positions are computed
    attends_through_scores: bool
    depends_on_prompt_length: bool = False

    @property
    def num_passes(self) -> int:
        """How often the lane goes over the source."""
        return PASSES_PER_LAYER * self.encoder.num_layers + CROSS_PASSES

    @property
    def max_source(self) -> int:
        return self.max_positions or UNLIMITED

    @property
    def num_parameters(self) -> int:
        """Matrices and tables; norms and biases are less than a hundredth of them."""
        encoder = self.encoder.num_attention_parameters + self.encoder.num_mlp_parameters
        decoder = 2 * self.decoder.num_attention_parameters + self.decoder.num_mlp_parameters
        num_rows = self.vocab_size * self.num_token_tables + self.num_table_positions
        embeddings = num_rows * self.encoder.hidden_size
        return self.encoder.num_layers * encoder + self.decoder.num_layers * decoder + embeddings

    def rotary_variant(self, num_tokens: int) -> str:
        return "default"


def seq2seq_spec(config: Mapping[str, Any]) -> Seq2SeqSpec:
    encoder_part, decoder_part = _part(config, "encoder"), _part(config, "decoder")
    encoder = _stack(encoder_part, "encoder", ("encoder_layers", "num_layers", "num_hidden_layers"))
    shared = encoder_part.get("max_position_embeddings")
    positions = [encoder_part.get(f"max_{name}_position_embeddings", shared) or 0 for name in ("encoder", "decoder")]
    decoder_layers = ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
    return Seq2SeqSpec(
        vocab_size=_size(decoder_part if "vocab_size" not in config else config, ("vocab_size",)),
        encoder=encoder,
        decoder=_stack(decoder_part, "decoder", decoder_layers),
        max_positions=positions[0] or None,
        num_token_tables=1 + (encoder_part is not config) + (config.get("tie_word_embeddings") is False),
        num_table_positions=0 if any(name in encoder_part for name in COMPUTES_POSITIONS) else sum(positions),
        attends_through_scores=any(encoder_part.get(name) for name in LOOKS_AT_SCORES),
    )


def seq2seq_shape(spec: Seq2SeqSpec, dtype_bytes: int, num_parameters: int | None = None) -> ModelShape:
    """A token of the source holds its state and its keys and values in every decoder layer; while it is read, its
    state and its keys and values in one encoder layer."""
    encoder, decoder = spec.encoder, spec.decoder
    cross_bytes = decoder.num_layers * decoder.kv_elements_per_token * dtype_bytes
    answering_bytes = encoder.hidden_size * dtype_bytes + cross_bytes
    reading_bytes = (encoder.hidden_size + encoder.kv_elements_per_token) * dtype_bytes
    held_bytes = max(answering_bytes, reading_bytes) + spec.num_passes * POSITION_BYTES
    return ModelShape.of(
        encoder,
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_size,
        vocab_size=spec.vocab_size,
        num_parameters=spec.num_parameters if num_parameters is None else num_parameters,
        largest_matrix=encoder.hidden_size * max(encoder.intermediate_size, encoder.num_heads * encoder.head_size),
        dtype_bytes=dtype_bytes,
        max_context=spec.max_source,
        attends_through_scores=spec.attends_through_scores,
        state_bytes_per_token=held_bytes - cross_bytes,
    )


def _stack(part: Mapping[str, Any], name: str, layer_names: tuple[str, ...]) -> StackSpec:
    hidden_size = _size(part, ("d_model", "hidden_size"))
    num_heads = _size(part, (f"{name}_attention_heads", "num_heads", "num_attention_heads"))
    activation = str(part.get("feed_forward_proj") or "")
    return StackSpec(
        hidden_size=hidden_size,
        num_layers=_size(part, layer_names),
        num_heads=num_heads,
        num_kv_heads=_size(part, ("num_key_value_heads",), num_heads),
        head_size=_size(part, ("d_kv", "head_dim"), hidden_size // num_heads),
        intermediate_size=_size(part, (f"{name}_ffn_dim", "d_ff", "intermediate_size")),
        is_gated=activation.startswith("gated") or "hidden_activation" in part,
        has_global_projections=name == "encoder" and "attention_window" in part,
    )


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else config


def _size(part: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        value = part.get(name)
        if type(value) is int and value > 0:
            return value
    if default is None:
        raise InvalidModelFile(
            f"The config has no {' or '.join(names)}; take the config.json that belongs to the model."
        )
    return default
