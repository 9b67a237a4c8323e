"""Brings an image-text model into memory for our decoder: the tower by transformers, all other weights by us."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.loading import LoadedModel, LoadStart, native_lane, return_freed_memory
from penstock.engine.media_prompts import MediaPromptReader
from penstock.engine.multimodal_loading import SPAN_BOUNDARY, media_processor, media_template
from penstock.engine.planning import (
    context_limit,
    media_shares,
    native_media_memory_model,
    require_room,
)
from penstock.errors import InvalidModelFile, UnsupportedModel
from penstock.lanes.lane import LaneFacts
from penstock.lanes.media import MediaModel, media_model
from penstock.lanes.media_features import FeatureCache
from penstock.lanes.native_media import NativeMultimodalLane
from penstock.models.files import ModelFiles
from penstock.models.media_spec import NATIVE_MEDIA, media_decoder_spec
from penstock.models.pretrained import image_text_class, load_tower, quiet_library
from penstock.models.spec import DecoderSpec
from penstock.models.weights import WeightSource, open_weights

EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"


def load_native_multimodal(
    files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device
) -> LoadedModel:
    if files.folder is None:
        raise UnsupportedModel("Image-text models are read from safetensors, not from GGUF. Pass the folder.")
    weights = open_weights(files)
    spec = _stored_spec(media_decoder_spec(files), weights, files)
    processor, why_no_images = media_processor(files)
    tower_class = image_text_class(files)
    start = LoadStart.of(files, config, device)
    dtype, budget, runtime_bytes = start.dtype, start.budget_bytes, start.runtime_bytes
    memory = native_media_memory_model(files, config, dtype, runtime_bytes, budget, device.type)
    max_context, warnings = context_limit(config, spec.max_context)
    num_tokens = min(require_room(memory, config, budget, device.type), max_context * config.max_running)
    num_blocks = start.num_blocks(num_tokens)
    encoder_bytes, kept_bytes = media_shares(memory, budget)
    media = _tower(files, *tower_class, dtype, device, kept_bytes)
    return_freed_memory()
    if media.sight == "span":
        facts = dataclasses.replace(facts, chunk_boundary=SPAN_BOUNDARY)
    text = native_lane(spec, weights, memory, facts, config, num_blocks=num_blocks, dtype=dtype, device=device)
    lane = NativeMultimodalLane(
        media,
        text,
        processor=processor,
        why_no_images=why_no_images,
        encoder_bytes=encoder_bytes,
    )
    template = media_template(processor, start.parts)
    bos_token = start.parts.special_tokens.get("bos_token")
    return start.loaded(
        spec=spec,
        lane=lane,
        memory=memory,
        num_tokens=num_tokens,
        max_context=max_context,
        adjustments=tuple(warnings),
        attention=text.attention,
        chat_template=template,
        media=MediaPromptReader(lane=lane, tokenizer=start.tokenizer, template=template, bos_token=bos_token),
    )


def _tower(
    files: ModelFiles, model_class: Any, model_config: Any, dtype: str, device: torch.device, kept_bytes: int
) -> MediaModel:
    with quiet_library():
        model = load_tower(files, model_class, model_config, getattr(torch, dtype)).to(device)
        media = media_model(model, sight=NATIVE_MEDIA[str(files.config["model_type"])])
    if media is None:
        raise UnsupportedModel(f"{model_class.__name__} has no get_image_features; its images cannot be read.")
    return dataclasses.replace(media, features=FeatureCache(kept_bytes))


def _stored_spec(spec: DecoderSpec, weights: WeightSource, files: ModelFiles) -> DecoderSpec:
    """With the names under which this checkpoint keeps the decoder; releases of the library differ in them."""
    found = [name for name in weights.names if name.endswith(EMBEDDINGS)]
    if len(found) != 1:
        raise InvalidModelFile(
            f"{files.folder} has {len(found)} tensors named ...{EMBEDDINGS}; a text decoder has one. Download it again."
        )
    renames = [("model.", found[0].removesuffix(EMBEDDINGS))]
    heads = [name for name in weights.names if name.endswith(HEAD)]
    if heads:
        renames.append((HEAD, heads[0]))
    is_tied = spec.has_tied_embeddings or not heads
    return dataclasses.replace(spec, renames=tuple(renames), has_tied_embeddings=is_tied)
