"""Brings a model into memory that transformers runs: self-check, weights, and pages or caches within the budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.checking import Checks
from penstock.engine.loading import LoadedModel, LoadStart, attention_backend, attention_on_card
from penstock.engine.planning import (
    NO_SHARED_PREFIXES,
    choose_dtype,
    context_limit,
    generic_memory_model,
    num_own_states,
    require_room,
)
from penstock.errors import InvalidSetting
from penstock.lanes.graphs import most_recorded
from penstock.lanes.hf import EnteringModel, GenericTextLane
from penstock.lanes.lane import LaneFacts
from penstock.lanes.text_check import check_real_text
from penstock.lanes.verdicts import Way, judged
from penstock.models.files import ModelFiles
from penstock.models.generic_spec import GenericSpec, generic_spec
from penstock.models.pretrained import causal_class, load_causal, quiet_library
from penstock.plan.memory import MemoryModel


def load_generic(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    with quiet_library():
        return _load_generic(files, facts, config, device)


def _load_generic(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    spec = generic_spec(files.config)
    model_class, model_config = causal_class(files)
    checks = Checks.of(files, facts, choose_dtype(config.dtype, files.config, device.type), device)
    judged(facts, checks.verdict, is_strict=config.strict)  # refuses before any weight is loaded
    start = LoadStart.of(files, config, device)
    dtype, budget = start.dtype, start.budget_bytes
    max_context, warnings = context_limit(config, spec.max_context)
    memory = generic_memory_model(files, spec, checks.verdict, config, dtype, start.runtime_bytes, budget, device.type)
    require_room(memory, config, budget, device.type)
    model = load_causal(files, model_class, model_config, getattr(torch, dtype)).to(device)
    checks = checks.with_real_weights(
        model, start.free_bytes, lambda: check_real_text(model, checks.verdict, attention_backend)
    )
    facts = checks.noted(judged(facts, checks.verdict, is_strict=config.strict), model)
    memory = generic_memory_model(files, spec, checks.verdict, config, dtype, start.runtime_bytes, budget, device.type)
    entering = EnteringModel(model, checks.verdict)
    spec = _measured(spec, entering)
    shape = _measured_shape(memory, spec, entering)
    num_states = num_own_states(shape, config, start.free_bytes - shape.weight_bytes)
    memory = dataclasses.replace(memory, shape=shape, num_running_states=num_states)
    num_recorded = _num_recorded(entering, config, device)
    memory = dataclasses.replace(memory, num_logit_rows=max(1, num_recorded))
    num_tokens = min(
        require_room(memory, config, budget, device.type), max_context * (num_states or config.max_running)
    )
    ways: Any = entering.caches()
    if entering.calls:
        storage = entering.pages(start.num_blocks(num_tokens) * config.block_size)
        ways = entering.packed(attention_backend(storage, config.block_size, entering.calls[0].num_heads))
        if (on_card := attention_on_card(ways.attention)) is not None:
            ways.record_decodes(on_card.for_decodes(max_rows=num_recorded, max_context=max_context))
    return start.loaded(
        spec=spec,
        lane=GenericTextLane(ways, shape=memory.shape, facts=facts),
        memory=memory,
        num_tokens=num_tokens,
        max_context=max_context,
        adjustments=(*warnings, *way_adjustments(facts, config)),
        attention=ways.attention if entering.calls else None,
    )


def _num_recorded(entering: EnteringModel, config: EngineConfig, device: torch.device) -> int:
    """Sequences of the largest step whose logits a recording keeps."""
    if not entering.calls or device.type != "cuda":
        return 0
    return most_recorded(config.max_running) if entering.verdict.way is Way.PACKED else 1


def _measured(spec: GenericSpec, entering: EnteringModel) -> GenericSpec:
    """The estimates from the config, replaced by what the model really calls and keeps."""
    if entering.calls:
        call = entering.calls[0]
        return dataclasses.replace(
            spec,
            num_kv_layers=len(entering.calls),
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_size=call.head_size,
            state_bytes=0,
        )
    return dataclasses.replace(spec, state_bytes=entering.cache_bytes()[0])


def _measured_shape(memory: MemoryModel, spec: GenericSpec, entering: EnteringModel) -> Any:
    parameters = {parameter.data_ptr(): parameter.numel() for parameter in entering.model.parameters()}
    return dataclasses.replace(
        memory.shape,
        num_layers=spec.num_kv_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        num_parameters=sum(parameters.values()),
        state_bytes=spec.state_bytes,
        attends_through_scores=not entering.calls and entering.model.config._attn_implementation == "eager",
    )


def way_adjustments(facts: LaneFacts, config: EngineConfig) -> list[str]:
    """What the way of running takes away from what was asked for."""
    found: list[str] = []
    if facts.reads_whole and config.chunk_size != 0:
        found.append(f"prompts are read whole: {facts.reason}")
    if not facts.shares_prefixes and config.prefix_cache:
        found.append(NO_SHARED_PREFIXES)
    if not facts.shares_prefixes and config.overlap:
        message = f"overlap {config.overlap} lowered to 0: the model's own cache cannot be rewound"
        if config.strict:
            raise InvalidSetting(f"--strict: {message}. Lower --overlap to 0.")
        found.append(message)
    return found
