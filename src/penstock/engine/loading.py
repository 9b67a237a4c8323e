"""Brings a model into memory within the budget: weights, tokenizer, pages, lane."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import torch

from penstock.attention.cpu import KEY_ROWS, QUERY_ROWS, CpuAttention
from penstock.cache.storage import KvStorage
from penstock.config import EngineConfig
from penstock.engine.planning import CPU_TILING, choose_dtype, context_limit, memory_model, require_device, require_room
from penstock.lanes.lane import Lane, pick_lane
from penstock.lanes.native import NativeTextLane
from penstock.models.decoder import Decoder
from penstock.models.files import ModelFiles, resolve
from penstock.models.gguf import read_gguf
from penstock.models.spec import DecoderSpec, decoder_spec
from penstock.models.weights import open_weights
from penstock.plan.machine import default_memory_budget, num_physical_cores, resident_bytes
from penstock.plan.memory import MemoryModel
from penstock.prompt.load import TokenizerParts, tokenizer_from_folder, tokenizer_from_gguf
from penstock.prompt.render import ChatTemplate
from penstock.prompt.tokens import Tokenizer

assert (CPU_TILING.query_rows, CPU_TILING.key_rows) == (QUERY_ROWS, KEY_ROWS), "the plan and the kernel disagree"

# glibc's mallopt parameters, by their numbers in malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    name: str
    identity: str
    spec: DecoderSpec
    lane: Lane
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_ids: frozenset[int]
    memory: MemoryModel
    budget_bytes: int
    num_blocks: int
    max_context: int
    dtype: str
    device: torch.device
    adjustments: tuple[str, ...]


def load_model(name: str, config: EngineConfig) -> LoadedModel:
    files = resolve(name)
    facts = pick_lane(files.config, config.lane)
    device = torch.device(require_device(config.device))
    keep_freed_memory()
    return_freed_memory()  # of an engine before this one
    torch.set_num_threads(config.threads or num_physical_cores())
    spec = decoder_spec(files.config)
    dtype = choose_dtype(config.dtype, files.config)
    parts = load_tokenizer(files)
    tokenizer = Tokenizer(parts.backend)
    memory = memory_model(files, config, dtype, resident_bytes())
    budget = config.memory or default_memory_budget()
    max_context, warnings = context_limit(config, spec.max_context)
    num_tokens = min(require_room(memory, config, budget), max_context * config.max_running)
    num_blocks = -(-num_tokens // config.block_size)
    torch_dtype = getattr(torch, dtype)
    decoder = Decoder(spec, dtype=torch_dtype, device=device)
    decoder.load(open_weights(files))
    storage = KvStorage(
        num_layers=spec.num_layers,
        num_slots=num_blocks * config.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=torch_dtype,
        device=device,
    )
    attention = CpuAttention(storage, config.block_size)
    return LoadedModel(
        name=name,
        identity=f"{files.identity}:{dtype}",
        spec=spec,
        lane=NativeTextLane(decoder, attention, shape=memory.shape, facts=facts),
        tokenizer=tokenizer,
        chat_template=_chat_template(parts),
        eos_ids=parts.eos_ids,
        memory=memory,
        budget_bytes=budget,
        num_blocks=num_blocks,
        max_context=max_context,
        dtype=dtype,
        device=device,
        adjustments=tuple(warnings),
    )


def load_tokenizer(files: ModelFiles) -> TokenizerParts:
    if files.gguf is not None:
        return tokenizer_from_gguf(read_gguf(files.gguf).metadata)
    assert files.folder is not None
    return tokenizer_from_folder(files.folder, files.config, files.generation_config)


def keep_freed_memory() -> None:
    """Lets glibc reuse freed activations: returning them to the system after each operation costs far more time
    than the operation itself, and the bytes are needed again in the next layer anyway."""
    if mallopt := _libc_function("mallopt"):
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, 2**30)


def return_freed_memory() -> None:
    if malloc_trim := _libc_function("malloc_trim"):
        malloc_trim(0)


def _libc_function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def _chat_template(parts: TokenizerParts) -> ChatTemplate | None:
    if parts.chat_template is None:
        return None
    return ChatTemplate(parts.chat_template, special_tokens=parts.special_tokens)
