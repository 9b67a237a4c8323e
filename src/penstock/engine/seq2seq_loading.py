"""Brings an encoder-decoder model of transformers into memory, for the lane that reads its source in tiles."""

from __future__ import annotations

from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.checking import Checks
from penstock.engine.generic_loading import way_adjustments
from penstock.engine.loading import LoadedModel, LoadStart
from penstock.engine.planning import MOST_PACKED_BYTES, TILINGS, choose_dtype, context_limit, require_room
from penstock.errors import UnsupportedModel
from penstock.lanes.lane import DTYPE_BYTES, LaneFacts
from penstock.lanes.seq2seq import Seq2SeqLane
from penstock.lanes.seq2seq_spec import seq2seq_shape, seq2seq_spec
from penstock.lanes.source_check import check_real_encoder
from penstock.lanes.verdicts import judged
from penstock.models.files import ModelFiles
from penstock.models.pretrained import load_causal, quiet_library, seq2seq_class
from penstock.plan.memory import MemoryModel


def load_seq2seq(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    if files.folder is None:
        raise UnsupportedModel("Encoder-decoder models are read from safetensors, not from GGUF. Pass the folder.")
    with quiet_library():
        return _load_seq2seq(files, facts, config, device)


def _load_seq2seq(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    model_class, model_config = seq2seq_class(files)
    spec = seq2seq_spec(files.config)
    checks = Checks.of(files, facts, choose_dtype(config.dtype, files.config, device.type), device)
    judged(facts, checks.verdict, is_strict=config.strict)  # refuses before any weight is loaded
    start = LoadStart.of(files, config, device)
    memory = MemoryModel(
        shape=seq2seq_shape(spec, DTYPE_BYTES[start.dtype]),
        tiling=TILINGS[device.type],
        most_packed_bytes=MOST_PACKED_BYTES[device.type],
        runtime_bytes=start.runtime_bytes,
        block_size=config.block_size,
    )
    max_source, warnings = context_limit(config, spec.max_source)
    room = require_room(memory, config, start.budget_bytes, device.type)
    model = load_causal(files, model_class, model_config, getattr(torch, start.dtype)).to(device)
    checks = checks.with_real_weights(model, start.free_bytes, lambda: check_real_encoder(model))
    facts = checks.noted(judged(facts, checks.verdict, is_strict=config.strict), model)
    chunked = checks.verdict.answer_chunks
    why_no_start = "" if chunked is None or chunked.exact else chunked.reason
    lane = Seq2SeqLane(model, facts=facts, shape=memory.shape, max_source=max_source, why_no_start=why_no_start)
    warnings += way_adjustments(facts, config)
    if config.overlap:
        warnings.append(f"overlap {config.overlap} has no meaning for a source; it is 0")
    return start.loaded(
        spec=spec,
        lane=lane,
        memory=memory,
        num_tokens=min(room, 2 * max_source * config.max_running),
        max_context=2 * max_source,
        adjustments=(*warnings, *lane.rules.not_done),
        eos_ids=start.parts.eos_ids | _end_tokens(model.generation_config),
        source=lane,
    )


def _end_tokens(generation_config: Any) -> frozenset[int]:
    found = getattr(generation_config, "eos_token_id", None)
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
