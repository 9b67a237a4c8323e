"""Brings an image-text model of transformers into memory: weights with the tower, processor, self-check."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.checking import Checks
from penstock.engine.generic_loading import way_adjustments
from penstock.engine.loading import LoadedModel, LoadStart
from penstock.engine.media_prompts import MediaPromptReader
from penstock.engine.planning import (
    choose_dtype,
    context_limit,
    generic_memory_model,
    media_shares,
    num_own_states,
    require_room,
)
from penstock.errors import UnsupportedModel
from penstock.lanes.lane import LaneFacts
from penstock.lanes.media import media_model
from penstock.lanes.media_check import check_picture, check_real_media
from penstock.lanes.media_features import FeatureCache
from penstock.lanes.media_processor import MediaProcessor
from penstock.lanes.multimodal import MultimodalLane
from penstock.lanes.verdicts import Verdict, judged
from penstock.models.files import ModelFiles
from penstock.models.generic_spec import generic_spec
from penstock.models.pretrained import image_text_class, load_causal, load_processor, quiet_library
from penstock.prompt.load import TokenizerParts
from penstock.prompt.render import ChatTemplate

SPAN_BOUNDARY = "any token outside images, which see themselves"


def load_multimodal(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    if files.folder is None:
        raise UnsupportedModel("Image-text models are read from safetensors, not from GGUF. Pass the folder.")
    with quiet_library():
        return _load_multimodal(files, facts, config, device)


def _load_multimodal(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    model_class, model_config = image_text_class(files)
    spec = generic_spec(model_config.to_dict())
    checks = Checks.of(files, facts, choose_dtype(config.dtype, files.config, device.type), device)
    judged(facts, checks.verdict, is_strict=config.strict)  # refuses before any weight is loaded
    processor, why_no_images = media_processor(files)
    start = LoadStart.of(files, config, device)
    dtype, budget, parts = start.dtype, start.budget_bytes, start.parts
    max_context, warnings = context_limit(config, spec.max_context)
    memory = generic_memory_model(
        files, spec, None, config, dtype, start.runtime_bytes, budget, device.type, reads_images=True
    )
    require_room(memory, config, budget, device.type)
    model = load_causal(files, model_class, model_config, getattr(torch, dtype)).to(device)
    media = media_model(model)
    if media is None:
        raise UnsupportedModel(
            f"{model_class.__name__} has no get_image_features; its images cannot be read in chunks."
        )
    encoder_bytes, kept_bytes = media_shares(memory, budget)
    lane = MultimodalLane(
        dataclasses.replace(media, features=FeatureCache(kept_bytes)),
        processor=processor,
        why_no_images=why_no_images,
        encoder_bytes=encoder_bytes,
        shape=memory.shape,
        facts=facts,
    )
    _require_cache(lane)
    checks = _checked(lane, checks, start.free_bytes)
    lane.facts = checks.noted(_facts(lane, checks.verdict, config), model)
    lane.shape = dataclasses.replace(
        memory.shape,
        num_parameters=sum({one.data_ptr(): one.numel() for one in model.parameters()}.values()),
        state_bytes=lane.cache_bytes()[0],
        attends_through_scores=model.config.get_text_config()._attn_implementation == "eager",
    )
    num_states = num_own_states(lane.shape, config, start.free_bytes - lane.shape.weight_bytes)
    memory = dataclasses.replace(memory, shape=lane.shape, num_running_states=num_states)
    num_tokens = require_room(memory, config, budget, device.type)
    template, bos_token = media_template(processor, parts), parts.special_tokens.get("bos_token")
    return start.loaded(
        spec=spec,
        lane=lane,
        memory=memory,
        num_tokens=min(num_tokens, max_context * (num_states or config.max_running)),
        max_context=max_context,
        adjustments=(*warnings, *way_adjustments(lane.facts, config)),
        chat_template=template,
        media=MediaPromptReader(lane=lane, tokenizer=start.tokenizer, template=template, bos_token=bos_token),
    )


def media_processor(files: ModelFiles) -> tuple[MediaProcessor | None, str]:
    """(None, why) where there is none: text is still read."""
    try:
        return MediaProcessor(load_processor(files)), ""
    except UnsupportedModel as error:
        return None, str(error)


def _require_cache(lane: MultimodalLane) -> None:
    if lane.signature.cache_name is None:
        raise UnsupportedModel(f"{type(lane.model).__name__} takes no cache, so its prompts cannot be continued.")


def _checked(lane: MultimodalLane, checks: Checks, free_bytes: int) -> Checks:
    """What the loaded model adds to its verdict: a picture, and its own dtype."""
    if checks.verdict.exact and checks.verdict.picture is None:
        found = check_picture(lane)
        checks = checks if found is None else checks.with_finding("picture", found)
    return checks.with_real_weights(lane.model, free_bytes, lambda: check_real_media(lane))


def _facts(lane: MultimodalLane, verdict: Verdict, config: EngineConfig) -> LaneFacts:
    facts = judged(lane.facts, verdict, is_strict=config.strict)
    if lane.media.sight == "prompt":
        return dataclasses.replace(facts, reads_whole=True, reason=f"{facts.reason}; the whole prompt sees itself")
    return dataclasses.replace(facts, chunk_boundary=SPAN_BOUNDARY) if lane.media.sight == "span" else facts


def media_template(processor: MediaProcessor | None, parts: TokenizerParts) -> ChatTemplate | None:
    """The processor's own knows where images go; the tokenizer's may know text only."""
    source: Any = getattr(processor.processor, "chat_template", None) if processor is not None else None
    if isinstance(source, dict):
        source = source.get("default")
    source = source if isinstance(source, str) else parts.chat_template
    return None if source is None else ChatTemplate(source, special_tokens=parts.special_tokens)
