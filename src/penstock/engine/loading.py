"""Brings a model into memory within the budget: its lane's loader, tokenizer, chat template."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.attention.cpu import CpuAttention
from penstock.cache.storage import KvStorage, StateStorage
from penstock.config import FIRST_CALL_BYTES_ESTIMATE, EngineConfig
from penstock.engine.prompts import chat_template, load_tokenizer
from penstock.kernels import build
from penstock.lanes.checks import Checks
from penstock.lanes.lane import Lane
from penstock.lanes.loading import LoadedLane, Loading
from penstock.lanes.table import LANES, settle
from penstock.models.content import WeightContent
from penstock.models.files import ModelFiles, reading_config, resolve
from penstock.models.weights import WeightSource
from penstock.plan.devices import DeviceMemory, device_warnings
from penstock.plan.machine import (
    keep_freed_memory,
    num_physical_cores,
    resident_bytes,
    return_freed_memory,
)
from penstock.plan.memory import MemoryModel
from penstock.prompt.load import TokenizerParts
from penstock.prompt.render import ChatTemplate
from penstock.prompt.tokens import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    name: str
    adapter: str | None  # its name; None: the weights are the model's own
    identity: str
    config: EngineConfig  # what holds of the settings on this lane and device
    spec: Any
    lane: Lane
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    bos_token: str | None  # a rendered chat that begins with it is not given another
    eos_ids: frozenset[int]
    memory: MemoryModel
    budget_bytes: int
    num_blocks: int
    max_context: int
    dtype: str
    quantize: str
    device: torch.device
    adjustments: tuple[str, ...]
    attention: str  # what computes it
    files: ModelFiles
    storage: KvStorage | None  # None: there are no pages that the host attends to
    state_storage: StateStorage | None  # None: the model has no recurrent state
    content: str | None = None  # what the weights hold, as a hash; None: it was not asked for, or cannot be said


def load_model(name: str, config: EngineConfig) -> LoadedModel:
    return load_files(resolve(name), config)


def load_files(files: ModelFiles, config: EngineConfig, weights: WeightSource | None = None) -> LoadedModel:
    """Loads a model from its files; `weights` take the place of those there."""
    place = settle(files, config, has_cuda=torch.cuda.is_available())
    files = place.files
    prepare_process(place.config)
    kind = LANES[place.lane.id]
    # What the lane imports and builds here is part of the runtime that is measured below.
    loader = kind.loader_class()(files)
    checks = Checks.of(place) if kind.is_checked else None
    if checks is not None:
        checks.facts()  # refuses before any weight is loaded
    parts = load_tokenizer(files)
    tokenizer = Tokenizer(parts.backend)
    gpu = gpu_memory(torch.device(place.device))
    return_freed_memory()
    place = place.with_memory(gpu, resident_bytes() + FIRST_CALL_BYTES_ESTIMATE)
    checks = None if checks is None else replace(checks, place=place)
    with reading_config(files.name):
        memory = kind.price(place, None if checks is None else checks.verdict)
        max_context, warnings = place.context_limit(memory.shape.max_context)
        place.room(memory)
    place = place.with_placement(memory)
    loading = Loading(
        place=place,
        memory=memory,
        max_context=max_context,
        checks_so_far=checks,
        weights=weights,
        tokenizer=parts.backend,
    )
    content = WeightContent.of(files) if weights is None and place.uses_disk else None
    model = _put_together(loader.load(loading), loading, parts, tokenizer, warnings)
    return replace(model, content=content.digest if content is not None and content.still_holds else None)


def _put_together(
    loaded: LoadedLane, loading: Loading, parts: TokenizerParts, tokenizer: Tokenizer, warnings: list[str]
) -> LoadedModel:
    place = replace(loading.place, lane=loaded.lane.facts)
    attention = loaded.attention
    failures = () if attention is None or attention.failure is None else (attention.failure,)
    adjustments = (*device_warnings(place.device), *warnings, *place.lane_adjustments(), *loaded.adjustments, *failures)
    return LoadedModel(
        name=place.files.name,
        adapter=place.files.adapter_name,
        identity=f"{place.files.identity}:{place.dtype}" + (f":{place.quantize}" if place.lane.keeps_codes else ""),
        config=place.settings_that_hold(),
        spec=loaded.spec,
        lane=loaded.lane,
        tokenizer=tokenizer,
        chat_template=chat_template(parts, loaded.chat_template),
        bos_token=parts.special_tokens.get("bos_token"),
        eos_ids=parts.eos_ids | loaded.eos_ids,
        memory=loaded.memory,
        budget_bytes=place.budget_bytes,
        num_blocks=-(-loaded.num_tokens // place.config.block_size),
        max_context=loaded.max_context or loading.max_context,
        dtype=place.dtype,
        quantize=place.quantize,
        device=loading.device,
        adjustments=adjustments,
        attention="transformers" if attention is None else attention.name,
        files=place.files,
        storage=attention.storage if isinstance(attention, CpuAttention) else None,
        state_storage=loaded.states,
    )


def prepare_process(config: EngineConfig) -> None:
    build.use(config.cpu_kernels)
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32, in convolutions too
    keep_freed_memory()
    return_freed_memory()  # of an engine before this one
    torch.set_num_threads(config.threads or num_physical_cores())


def gpu_memory(device: torch.device) -> DeviceMemory | None:
    """What is taken once the context and the matrix library stand, and what the card has; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()  # an engine before this one may hold the card
    torch.cuda.empty_cache()
    ones = torch.ones(16, 16, device=device)
    torch.mm(ones, ones)  # loads the library and takes its workspace
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total_bytes=total, free_bytes=free)
