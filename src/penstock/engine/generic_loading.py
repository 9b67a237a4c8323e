"""Brings a model into memory that transformers runs: self-check, weights, and pages or caches within the budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from penstock.config import FIRST_CALL_BYTES_ESTIMATE, EngineConfig
from penstock.engine.loading import (
    LoadedModel,
    attention_backend,
    chat_template,
    gpu_memory,
    load_tokenizer,
    return_freed_memory,
)
from penstock.engine.planning import (
    NO_SHARED_PREFIXES,
    choose_dtype,
    context_limit,
    generic_memory_model,
    kept_verdict,
    num_own_states,
    require_room,
)
from penstock.errors import InvalidSetting
from penstock.lanes.hf import EnteringModel, GenericTextLane
from penstock.lanes.lane import LaneFacts
from penstock.lanes.selfcheck import check_class, check_real_weights
from penstock.lanes.verdicts import Verdict, judged, save_verdict, verdict_key
from penstock.models.files import ModelFiles
from penstock.models.generic_spec import GenericSpec, generic_spec
from penstock.models.pretrained import causal_class, load_causal, quiet_library
from penstock.plan.machine import default_memory_budget, forget_peak, resident_bytes
from penstock.plan.memory import MemoryModel
from penstock.prompt.tokens import Tokenizer

COPIES_OF_WEIGHTS = 3.5  # beside each other while bfloat16 is held against float32, with room for activations


def load_generic(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    with quiet_library():
        return _load_generic(files, facts, config, device)


def _load_generic(files: ModelFiles, facts: LaneFacts, config: EngineConfig, device: torch.device) -> LoadedModel:
    spec = generic_spec(files.config)
    dtype = choose_dtype(config.dtype, files.config, device.type)
    model_class, model_config = causal_class(files)
    verdict = checked(files, facts, dtype, device, model_class=model_class, model_config=model_config)
    picked, facts = facts, judged(facts, verdict, is_strict=config.strict)
    parts = load_tokenizer(files)
    tokenizer = Tokenizer(parts.backend)
    gpu = gpu_memory(device)
    return_freed_memory()
    runtime_bytes = gpu.runtime_bytes if gpu else resident_bytes() + FIRST_CALL_BYTES_ESTIMATE
    budget = config.memory or (gpu.default_budget if gpu else default_memory_budget())
    max_context, warnings = context_limit(config, spec.max_context)
    memory = generic_memory_model(files, spec, verdict, config, dtype, runtime_bytes, budget, device.type)
    require_room(memory, config, budget, device.type)
    model = load_causal(files, model_class, model_config, getattr(torch, dtype)).to(device)
    verdict = _with_real_weights(files, facts, verdict, model, dtype, budget - runtime_bytes)
    facts = judged(picked, verdict, is_strict=config.strict)
    if dtype != "float32" and verdict.exact and verdict.real_weights is None:
        needed = COPIES_OF_WEIGHTS * memory.shape.weight_bytes / 2**30
        skipped = f"the {dtype} weights were not compared with float32, which takes {needed:.1f} GiB of --memory"
        facts = dataclasses.replace(facts, reason=f"{facts.reason}; {skipped}")
    entering = EnteringModel(model, verdict)
    spec = _measured(spec, entering)
    shape = _measured_shape(memory, spec, entering)
    num_states = num_own_states(shape, config, budget - runtime_bytes - shape.weight_bytes)
    memory = dataclasses.replace(memory, shape=shape, num_running_states=num_states)
    num_tokens = require_room(memory, config, budget, device.type)
    num_blocks = -(-min(num_tokens, max_context * (num_states or config.max_running)) // config.block_size)
    if entering.calls:
        storage = entering.pages(num_blocks * config.block_size)
        ways: Any = entering.packed(attention_backend(storage, config.block_size, entering.calls[0].num_heads))
    else:
        ways = entering.caches()
    return LoadedModel(
        name=files.name,
        identity=f"{files.identity}:{dtype}",
        spec=spec,
        lane=GenericTextLane(ways, shape=memory.shape, facts=facts),
        tokenizer=tokenizer,
        chat_template=chat_template(parts),
        eos_ids=parts.eos_ids,
        memory=memory,
        budget_bytes=budget,
        num_blocks=num_blocks,
        max_context=max_context,
        dtype=dtype,
        device=device,
        adjustments=(*warnings, *way_adjustments(facts, config)),
    )


def checked(
    files: ModelFiles,
    facts: LaneFacts,
    dtype: str,
    device: torch.device,
    *,
    model_class: Any,
    model_config: Any,
    rerun: bool = False,
) -> Verdict:
    """The verdict that is kept from an earlier load, or a new one."""
    verdict = None if rerun else kept_verdict(files, facts, dtype, device.type)
    if verdict is None:
        verdict = check_class(model_class, model_config, device=device, make_attention=attention_backend)
        save_verdict(verdict_key(files.config, dtype=dtype, lane=facts.id, backend=device.type), verdict)
    return verdict


def check_files(files: ModelFiles, facts: LaneFacts, dtype: str, device: str) -> Verdict:
    """A new verdict from the config alone; the weights are not loaded."""
    with quiet_library():
        model_class, model_config = causal_class(files)
        return checked(
            files,
            facts,
            dtype,
            torch.device(device),
            model_class=model_class,
            model_config=model_config,
            rerun=True,
        )


def _with_real_weights(
    files: ModelFiles, facts: LaneFacts, verdict: Verdict, model: Any, dtype: str, free_bytes: int
) -> Verdict:
    """The verdict with the second part of the check, where it is due and memory allows."""
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    is_due = dtype != "float32" and verdict.exact and verdict.real_weights is None
    if not is_due or COPIES_OF_WEIGHTS * weight_bytes > free_bytes:
        return verdict
    found = check_real_weights(model, verdict, attention_backend)
    return_freed_memory()
    forget_peak()
    changes: dict[str, Any] = {"real_weights": found}
    if not found.exact:
        changes |= {"exact": False, "max_difference": found.max_difference, "reason": found.reason}
    verdict = verdict.model_copy(update=changes)
    save_verdict(verdict_key(files.config, dtype=dtype, lane=facts.id, backend=model.device.type), verdict)
    return verdict


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
