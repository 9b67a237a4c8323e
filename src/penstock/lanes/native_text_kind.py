"""The lane `optimized-native-text`: which models have a native decoder, and what one costs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.config import TILE_TOKENS
from penstock.errors import UnsupportedModel
from penstock.lanes.lane import Claim, LaneFacts, LaneKind
from penstock.lanes.place import Place
from penstock.models.layer_packs import read_speed
from penstock.models.shapes import layer_bytes, mixture_of, native_shape
from penstock.models.spec import decoder_spec, is_supported
from penstock.plan.machine import num_physical_cores
from penstock.plan.memory import MemoryModel, ModelShape
from penstock.plan.placement import StreamingPlan
from penstock.proof.verdict import Verdict


def claim(config: Mapping[str, Any]) -> Claim:
    model_type = config.get("model_type")
    if not is_supported(config):
        return Claim(eligible=False, reason=f"{model_type} has no native decoder")
    try:
        spec = decoder_spec(config)
    except UnsupportedModel as error:
        return Claim(eligible=False, reason=str(error).rstrip("."))
    reason = f"{model_type} has a native decoder"
    return Claim(
        eligible=True, reason=reason, gains_from_width=spec.experts is not None, runs_in_c=spec.recurrent is None
    )


def price(place: Place, verdict: Verdict | None = None) -> MemoryModel:
    memory = memory_of(shape_of(place.files.config, place), place)
    if place.device != "cpu":  # a card reads no layers from disk, and is not given wide steps in tiles
        return memory
    spec = decoder_spec(place.files.config)
    model = spec, place.dtype, place.quantization
    return place.streaming(replace(memory, tile_tokens=TILE_TOKENS), layer_bytes(*model), mixture_of(*model))


def shape_of(config: Mapping[str, Any], place: Place) -> ModelShape:
    """The shape of a native decoder with that config, as its place keeps and multiplies its weights."""
    quantization = place.quantization
    multiplies_codes = quantization is not None and place.multiplies_codes
    return native_shape(config, place.dtype, quantization, multiplies_codes=multiplies_codes, device=place.device)


def streaming_plan(place: Place, memory: MemoryModel) -> StreamingPlan | None:
    """What a pass over layers on disk takes, as the disk is measured now; None where all of them stay."""
    if not memory.placement.streamed:
        return None
    files = place.files
    path = next(iter(files.weight_files or (sorted(files.folder.glob("*.safetensors")) if files.folder else ())), None)
    return StreamingPlan.of(
        memory.placement,
        flops_per_token=2 * decoder_spec(files.config).num_passed,
        num_cores=place.config.threads or num_physical_cores(),
        bytes_per_s=None if path is None else read_speed(path),
    )


def memory_of(shape: ModelShape, place: Place) -> MemoryModel:
    """The memory model of a native decoder, with as many recurrent states as its place holds."""
    num_running, num_checkpoints = place.state_slots(shape, has_checkpoints=place.config.prefix_cache)
    memory = place.memory(
        shape, num_running_states=num_running, num_checkpoints=num_checkpoints, num_logit_rows=num_logit_rows(place)
    )
    return place.with_recordings(memory, most_chunks=place.most_captured_tokens)


def num_logit_rows(place: Place) -> int:
    """A card keeps those of every sequence that runs; on a CPU they are gone before the activations are there."""
    return place.config.max_running if place.device == "cuda" else 1


NATIVE_TEXT = LaneKind(
    facts=LaneFacts(id="optimized-native-text", gives_hidden=True, keeps_codes=True),
    claim=claim,
    price=price,
    loader="penstock.lanes.native_text:NativeTextLoader",
    needs_transformers=False,
)
