"""Brings an encoder-decoder model of transformers into memory, for the lane that reads its source in tiles."""

from __future__ import annotations

from typing import Any

import torch

from penstock.config import FIRST_CALL_BYTES_ESTIMATE, EngineConfig
from penstock.engine.checking import Checks
from penstock.engine.generic_loading import way_adjustments
from penstock.engine.loading import LoadedModel, chat_template, gpu_memory, load_tokenizer, return_freed_memory
from penstock.engine.planning import TILINGS, choose_dtype, context_limit, require_room
from penstock.errors import UnsupportedModel
from penstock.lanes.lane import DTYPE_BYTES, LaneFacts
from penstock.lanes.seq2seq import Seq2SeqLane
from penstock.lanes.seq2seq_spec import seq2seq_shape, seq2seq_spec
from penstock.lanes.source_check import check_real_encoder
from penstock.lanes.verdicts import judged
from penstock.models.files import ModelFiles
from penstock.models.pretrained import load_causal, quiet_library, seq2seq_class
from penstock.plan.machine import default_memory_budget, resident_bytes
from penstock.plan.memory import MemoryModel
from penstock.prompt.tokens import Tokenizer


def load_seq2seq(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    if files.folder is None:
        raise UnsupportedModel("Encoder-decoder models are read from safetensors, not from GGUF. Pass the folder.")
    with quiet_library():
        return _load_seq2seq(files, facts, config, device)


def _load_seq2seq(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    model_class, model_config = seq2seq_class(files)
    spec = seq2seq_spec(files.config)
    dtype = choose_dtype(config.dtype, files.config, device.type)
    checks = Checks.of(files, facts, dtype, device)
    judged(facts, checks.verdict, is_strict=config.strict)  # refuses before any weight is loaded
    parts = load_tokenizer(files)
    gpu = gpu_memory(device)
    return_freed_memory()
    memory = MemoryModel(
        shape=seq2seq_shape(spec, DTYPE_BYTES[dtype]),
        tiling=TILINGS[device.type],
        runtime_bytes=gpu.runtime_bytes if gpu else resident_bytes() + FIRST_CALL_BYTES_ESTIMATE,
        block_size=config.block_size,
    )
    budget = config.memory or (gpu.default_budget if gpu else default_memory_budget())
    max_source, warnings = context_limit(config, spec.max_source)
    num_tokens = min(require_room(memory, config, budget, device.type), 2 * max_source * config.max_running)
    model = load_causal(files, model_class, model_config, getattr(torch, dtype)).to(device)
    checks = checks.with_real_weights(model, budget - memory.runtime_bytes, lambda: check_real_encoder(model))
    facts = checks.noted(judged(facts, checks.verdict, is_strict=config.strict), model)
    lane = Seq2SeqLane(model, facts=facts, shape=memory.shape, max_source=max_source)
    warnings += way_adjustments(facts, config)
    if config.overlap:
        warnings.append(f"overlap {config.overlap} has no meaning for a source; it is 0")
    return LoadedModel(
        name=files.name,
        identity=f"{files.identity}:{dtype}",
        spec=spec,
        lane=lane,
        tokenizer=Tokenizer(parts.backend),
        chat_template=chat_template(parts),
        eos_ids=parts.eos_ids | _end_tokens(model.generation_config),
        memory=memory,
        budget_bytes=budget,
        num_blocks=-(-num_tokens // config.block_size),
        max_context=2 * max_source,
        dtype=dtype,
        device=device,
        adjustments=(*warnings, *lane.rules.not_done),
        source=lane,
    )


def _end_tokens(generation_config: Any) -> frozenset[int]:
    found = getattr(generation_config, "eos_token_id", None)
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
