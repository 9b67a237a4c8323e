"""The lane `transformers-generic-text`: any causal model that transformers runs, and what one costs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.lanes.lane import Claim, LaneFacts, LaneKind
from penstock.lanes.place import Place
from penstock.models.generic_spec import GenericSpec, estimated_parameters, generic_spec, num_stored_parameters
from penstock.models.shapes import generic_shape
from penstock.plan.memory import AttentionTiling, MemoryModel
from penstock.proof.verdict import Verdict, Way

CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForCausalLMWithValueHead")


def claim(config: Mapping[str, Any]) -> Claim:
    if (obstacle := generic_obstacle(config)) is not None:
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


def generic_obstacle(config: Mapping[str, Any]) -> str | None:
    """What keeps any model from being run by transformers here."""
    if not config.get("model_type"):
        return "config.json names no model_type"
    if config.get("auto_map"):
        return "the model comes with code of its own (auto_map), and such code is never run"
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        return f"its weights are quantized by {method}, which is not read; take the unquantized ones or a GGUF file"
    return None


def price(place: Place, verdict: Verdict | None) -> MemoryModel:
    """Prices a text model that transformers runs. Before its check, layers without keys tell how it will be run."""
    spec = generic_spec(place.files.config)
    is_plain = spec.num_kv_layers == spec.num_layers and spec.is_even
    way = verdict.way if verdict is not None else Way.PACKED if is_plain else Way.OWN_CACHE
    is_captured = way is Way.PACKED and place.device == "cuda"
    num_logit_rows = place.most_captured if is_captured else 1
    memory = generic_memory(place, spec, has_pages=way in (Way.PACKED, Way.PAGED), num_logit_rows=num_logit_rows)
    return place.with_recordings(memory) if is_captured else memory


def generic_memory(place: Place, spec: GenericSpec, *, has_pages: bool, **others: Any) -> MemoryModel:
    shape = generic_shape(
        spec,
        num_parameters=num_stored_parameters(place.files) or estimated_parameters(spec),
        item_bytes=place.item_bytes,
        keeps_own_cache=not has_pages,
    )
    if not has_pages:
        others["tiling"] = AttentionTiling(query_rows=spec.max_context, key_rows=spec.max_context)
    num_states, _ = place.state_slots(shape, has_checkpoints=False)
    return place.memory(shape, num_running_states=num_states, **others)


GENERIC_TEXT = LaneKind(
    facts=LaneFacts(id="transformers-generic-text"),
    claim=claim,
    price=price,
    loader="penstock.lanes.generic_text:GenericTextLoader",
    is_checked=True,
)
