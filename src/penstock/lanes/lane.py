"""The lanes: what each can run, the table that picks one, and the facts that traces and JSON carry. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import UnknownLane, UnsupportedModel
from penstock.models.layer_specs import state_bytes
from penstock.models.spec import DecoderSpec, decoder_spec, is_supported
from penstock.plan.memory import ModelShape

if TYPE_CHECKING:
    import torch

    from penstock.attention.backend import ForwardInputs

NATIVE_TEXT = "optimized-native-text"
SEQ2SEQ_SOURCE = "transformers-generic-seq2seq-source"
LANE_IDS = (NATIVE_TEXT, SEQ2SEQ_SOURCE)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """`boundary` and `mask_mode` are empty while no chunking is active."""

    id: str
    eligible: bool
    applied: bool
    reason: str
    boundary: str = ""
    mask_mode: str = ""
    chunked_boundary: str = "any token"  # what `boundary` and `mask_mode` are once the prompt was read in chunks
    chunked_mask_mode: str = "offset-causal"

    def after_reading(self, num_chunks: int) -> LaneFacts:
        """The facts of a prompt that was read in that many chunks."""
        if not self.eligible:
            return self
        if num_chunks > 1:
            return replace(self, applied=True, boundary=self.chunked_boundary, mask_mode=self.chunked_mask_mode)
        reason = "the prompt was read in one chunk" if num_chunks else "the prompt was not read"
        return replace(self, applied=False, reason=reason)

    def reading_whole(self, reason: str) -> LaneFacts:
        return replace(self, eligible=False, applied=False, reason=reason)


class Lane(Protocol):
    facts: LaneFacts
    shape: ModelShape

    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        """Float32 logits of `inputs.logit_rows`."""
        ...

    def release(self, sequence_id: int) -> None:
        """Frees what the lane itself keeps of a sequence that ended or must begin again."""
        ...


def pick_lane(config: Mapping[str, Any], requested: str | None) -> LaneFacts:
    """The lane for a model, from its own config, and why."""
    if requested is not None and requested not in LANE_IDS:
        raise UnknownLane(f"Lane {requested!r} does not exist; lanes are {', '.join(LANE_IDS)}.")
    model_type = config.get("model_type")
    if config.get("is_encoder_decoder") and requested in (None, SEQ2SEQ_SOURCE):
        return LaneFacts(
            id=SEQ2SEQ_SOURCE,
            eligible=True,
            applied=False,
            reason=f"{model_type} is an encoder-decoder model",
            chunked_boundary="any row of any layer",
            chunked_mask_mode="bidirectional",
        )
    if requested == SEQ2SEQ_SOURCE:
        raise UnknownLane(f"Lane {requested!r} is for encoder-decoder models; {model_type!r} is none.")
    if not is_supported(config):
        architectures = ", ".join(config.get("architectures") or []) or "unnamed"
        raise UnsupportedModel(
            f"The architecture {model_type!r} ({architectures}) is not supported by any lane; {decoder_families()}."
        )
    return LaneFacts(id=NATIVE_TEXT, eligible=True, applied=False, reason=f"{model_type} has a native decoder")


def decoder_families() -> str:
    from penstock.models.spec import FAMILIES

    return f"supported are {', '.join(sorted(FAMILIES))}"


def native_shape(config: Mapping[str, Any], dtype: str) -> ModelShape:
    spec = decoder_spec(config)
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        intermediate_size=spec.widest_mlp,
        vocab_size=spec.vocab_size,
        num_parameters=spec.num_parameters,
        largest_matrix=_largest_matrix(spec),
        dtype_bytes=DTYPE_BYTES[dtype],
        max_context=spec.max_context,
        attends_through_scores=spec.attention_softcap is not None,
        **_recurrent_shape(spec, DTYPE_BYTES[dtype]),
    )


def _recurrent_shape(spec: DecoderSpec, dtype_bytes: int) -> dict[str, int]:
    if spec.recurrent is None:
        return {}
    num_layers = len(spec.recurrent_layers)
    in_dtype, in_float32 = spec.recurrent.values_per_token
    return {
        "num_recurrent_layers": num_layers,
        "state_bytes": num_layers * state_bytes(spec.recurrent, dtype_bytes),
        "recurrent_bytes_per_token": in_dtype * dtype_bytes + in_float32 * 4,
    }


def _largest_matrix(spec: DecoderSpec) -> int:
    recurrent_rows = spec.recurrent.widest_rows if spec.recurrent else 0
    return spec.hidden_size * max(2 * spec.widest_mlp, spec.qkv_rows, recurrent_rows)
