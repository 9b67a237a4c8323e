"""The lanes: what each can run, the table that picks one, and the facts that traces and JSON carry. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import UnknownLane, UnsupportedModel
from penstock.models.generic_spec import GenericSpec
from penstock.models.layer_specs import state_bytes
from penstock.models.media_spec import NATIVE_MEDIA, text_part
from penstock.models.packing import GROUP_SUM_BYTES, Packing, packed_sizes
from penstock.models.spec import FAMILIES, DecoderSpec, decoder_spec, is_supported
from penstock.plan.memory import ModelShape

if TYPE_CHECKING:
    import torch

    from penstock.attention.backend import ForwardInputs

NATIVE_TEXT = "optimized-native-text"
NATIVE_MULTIMODAL = "optimized-native-multimodal"
GENERIC_TEXT = "transformers-generic-text"
GENERIC_MULTIMODAL = "transformers-generic-multimodal"
SEQ2SEQ_SOURCE = "transformers-generic-seq2seq-source"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """`boundary` and `mask_mode` are empty while no chunking is active."""

    id: str  # the lane
    eligible: bool  # the lane can read this model in chunks
    applied: bool  # this prompt was, or would be, read in more than one chunk
    reason: str  # why this lane, or why no chunking was active
    boundary: str = ""  # where chunks may end; empty if there was one chunk
    mask_mode: str = ""  # how attention is masked; empty if there was one chunk
    # What the lane does with this model; not part of the documents.
    reads_whole: bool = False  # chunks are not exact here: prompts are read in one piece
    shares_prefixes: bool = True
    gives_hidden: bool = False  # hidden states can be had, for embeddings
    chunk_boundary: str = "any token"
    chunk_mask_mode: str = "offset-causal"

    def after_reading(self, num_chunks: int) -> LaneFacts:
        """The facts of a prompt that was read in that many chunks."""
        if not self.eligible:
            return self
        if num_chunks > 1:
            return replace(self, applied=True, boundary=self.chunk_boundary, mask_mode=self.chunk_mask_mode)
        if self.reads_whole:
            return replace(self, applied=False)
        reason = "the prompt was read in one chunk" if num_chunks else "the prompt was not read"
        return replace(self, applied=False, reason=reason)


class Lane(Protocol):
    facts: LaneFacts
    shape: ModelShape

    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        """Float32 logits of `inputs.logit_rows`."""
        ...

    def release(self, sequence_id: int) -> None:
        """Frees what the lane itself keeps of a sequence that ended or must begin again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Whether a lane can run a model, and why or why not."""

    eligible: bool
    reason: str


def _native_text(config: Mapping[str, Any]) -> Claim:
    model_type = config.get("model_type")
    if not is_supported(config):
        return Claim(eligible=False, reason=f"{model_type} has no native decoder")
    try:
        decoder_spec(config)
    except UnsupportedModel as error:
        return Claim(eligible=False, reason=str(error).rstrip("."))
    return Claim(eligible=True, reason=f"{model_type} has a native decoder")


def _native_multimodal(config: Mapping[str, Any]) -> Claim:
    """The decoder's own config may be left to the library in part; then its type alone is known."""
    model_type, images = config.get("model_type"), _generic_multimodal(config)
    if not images.eligible:
        return images
    if model_type not in NATIVE_MEDIA:
        return Claim(eligible=False, reason=f"the decoder of {model_type} is not native")
    text = text_part(config)
    named = (text or config.get("text_config") or {}).get("model_type")
    if named is not None and named not in FAMILIES:
        return Claim(eligible=False, reason=f"{model_type} has a decoder of type {named}, which is not native")
    if text is not None:
        claim = _native_text(text)
        if not claim.eligible:
            return claim
    return Claim(eligible=True, reason=f"{model_type} reads text and images; its decoder is native")


def _generic_text(config: Mapping[str, Any]) -> Claim:
    obstacle = _generic_obstacle(config)
    if obstacle is not None:
        return Claim(eligible=False, reason=obstacle)
    architectures = config.get("architectures") or []
    names = ", ".join(architectures) or "unnamed"
    if architectures and not any(name.endswith(CAUSAL_ENDINGS) for name in architectures):
        return Claim(eligible=False, reason=f"{names} is no causal language model")
    for part in ("vision_config", "audio_config"):
        if part in config:
            return Claim(eligible=False, reason=f"{names} has a {part}: it reads more than text")
    if config.get("is_encoder_decoder"):
        return Claim(eligible=False, reason=f"{names} has an encoder beside its decoder")
    return Claim(eligible=True, reason=f"{config['model_type']} is run by transformers")


def _generic_multimodal(config: Mapping[str, Any]) -> Claim:
    model_type = config.get("model_type")
    if "vision_config" not in config:
        return Claim(eligible=False, reason=f"{model_type} has no vision_config: it reads no images")
    obstacle = _generic_obstacle(config)
    if obstacle is not None:
        return Claim(eligible=False, reason=obstacle)
    architectures = config.get("architectures") or []
    if architectures and not any(name.endswith(IMAGE_TEXT_ENDINGS) for name in architectures):
        return Claim(eligible=False, reason=f"{', '.join(architectures)} is no image-text model")
    if config.get("is_encoder_decoder"):
        return Claim(eligible=False, reason=f"{model_type} has images and an encoder beside its decoder")
    return Claim(eligible=True, reason=f"{model_type} reads text and images, run by transformers")


def _seq2seq_source(config: Mapping[str, Any]) -> Claim:
    model_type = config.get("model_type")
    if not config.get("is_encoder_decoder"):
        return Claim(eligible=False, reason=f"{model_type} is no encoder-decoder model")
    obstacle = _generic_obstacle(config)
    return Claim(eligible=obstacle is None, reason=obstacle or f"{model_type} is an encoder-decoder model")


def _generic_obstacle(config: Mapping[str, Any]) -> str | None:
    """What keeps any model from being run by transformers here."""
    if not config.get("model_type"):
        return "config.json names no model_type"
    if config.get("auto_map"):
        return "the model comes with code of its own (auto_map), and such code is never run"
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        return f"its weights are quantized by {method}, which is not read; take the unquantized ones or a GGUF file"
    return None


CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForCausalLMWithValueHead")
IMAGE_TEXT_ENDINGS = ("ForConditionalGeneration", "ForImageTextToText")
# In the order of preference. A model goes to the first lane that claims it.
LANES: Mapping[str, Callable[[Mapping[str, Any]], Claim]] = {
    NATIVE_TEXT: _native_text,
    NATIVE_MULTIMODAL: _native_multimodal,
    GENERIC_TEXT: _generic_text,
    GENERIC_MULTIMODAL: _generic_multimodal,
    SEQ2SEQ_SOURCE: _seq2seq_source,
}
LANE_IDS = tuple(LANES)
CHECKED_LANES = (GENERIC_TEXT, GENERIC_MULTIMODAL, SEQ2SEQ_SOURCE)  # run by transformers, and proven model by model


def pick_lane(config: Mapping[str, Any], requested: str | None) -> LaneFacts:
    """The lane for a model, from its own config, and why."""
    if requested is not None and requested not in LANES:
        raise UnknownLane(f"Lane {requested!r} does not exist; lanes are {', '.join(LANES)}.")
    if requested is not None:
        claim = LANES[requested](config)
        if not claim.eligible:
            raise UnknownLane(f"Lane {requested!r} cannot run this model: {claim.reason}. Leave --lane out.")
        return _facts(requested, f"{claim.reason}; asked for by --lane")
    reasons: list[str] = []
    for lane_id, claims in LANES.items():
        claim = claims(config)
        if claim.eligible:
            is_own_kind = lane_id in (NATIVE_MULTIMODAL, GENERIC_MULTIMODAL, SEQ2SEQ_SOURCE)
            return _facts(lane_id, claim.reason if is_own_kind else "; ".join([*reasons[:1], claim.reason]))
        reasons.append(claim.reason)
    architectures = ", ".join(config.get("architectures") or []) or "unnamed"
    if obstacle := _generic_obstacle(config):  # it stands in the way of every lane but the native one
        reasons = [reasons[0], obstacle]
    raise UnsupportedModel(
        f"The architecture {config.get('model_type')!r} ({architectures}) is not supported by any lane: "
        f"{'; '.join(dict.fromkeys(reversed(reasons)))}. Native decoders are {', '.join(sorted(FAMILIES))}."
    )


def _facts(lane_id: str, reason: str) -> LaneFacts:
    facts = LaneFacts(id=lane_id, eligible=True, applied=False, reason=reason)
    if lane_id == SEQ2SEQ_SOURCE:
        return replace(facts, chunk_boundary="any row of any layer", chunk_mask_mode="bidirectional")
    if lane_id == GENERIC_MULTIMODAL:
        return replace(facts, shares_prefixes=False, chunk_mask_mode="the model's own")
    return replace(facts, gives_hidden=lane_id == NATIVE_TEXT)


def native_shape(
    config: Mapping[str, Any], dtype: str, packing: Packing | None = None, *, multiplies_codes: bool = False
) -> ModelShape:
    """`multiplies_codes`: packed matrices are not unpacked for a product."""
    spec = decoder_spec(config)
    packed = packed_sizes(spec, packing) if packing is not None else None
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        intermediate_size=spec.widest_mlp,
        vocab_size=spec.vocab_size,
        num_parameters=spec.num_parameters,
        largest_matrix=0 if packed and packed.are_all and multiplies_codes else _largest_matrix(spec),
        dtype_bytes=DTYPE_BYTES[dtype],
        max_context=spec.max_context,
        attends_through_scores=spec.attention_softcap is not None,
        num_packed=packed.num_values if packed else 0,
        packed_bytes=packed.num_bytes if packed else 0,
        unpacked_tile_bytes=packed.tile_values * DTYPE_BYTES[dtype] if packed and not multiplies_codes else 0,
        group_sum_bytes_per_token=packed.most_groups * GROUP_SUM_BYTES if packed and multiplies_codes else 0,
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


def generic_shape(
    spec: GenericSpec, *, num_parameters: int, dtype: str, keeps_own_cache: bool, attends_through_scores: bool = False
) -> ModelShape:
    """`keeps_own_cache`: keys grow by copying, and heads are repeated, layer by layer."""
    item_bytes = DTYPE_BYTES[dtype]
    copied = 2 * item_bytes * spec.head_size * (spec.num_heads + spec.num_kv_heads)
    return ModelShape(
        num_layers=spec.num_kv_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        num_parameters=num_parameters,
        largest_matrix=spec.largest_matrix,
        dtype_bytes=item_bytes,
        max_context=spec.max_context,
        attends_through_scores=attends_through_scores,
        state_bytes=spec.state_bytes,
        copied_bytes_per_token=copied if keeps_own_cache and spec.num_kv_layers else 0,
    )
