"""Brings a model into memory within the budget: weights, tokenizer, pages, lane."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.attention import c_library
from penstock.attention.backend import AttentionBackend
from penstock.attention.cpu import KEY_ROWS, QUERY_ROWS, CpuAttention
from penstock.cache.storage import KvStorage, StateStorage
from penstock.config import FIRST_CALL_BYTES_ESTIMATE, EngineConfig
from penstock.engine.media_prompts import MediaPromptReader
from penstock.engine.planning import (
    CPU_TILING,
    DeviceMemory,
    choose_dtype,
    choose_quantize,
    context_limit,
    memory_model,
    require_device,
    require_plain_weights,
    require_room,
)
from penstock.errors import InvalidSetting
from penstock.lanes.graphs import DecodeGraphs, most_recorded
from penstock.lanes.lane import (
    GENERIC_MULTIMODAL,
    GENERIC_TEXT,
    NATIVE_MULTIMODAL,
    SEQ2SEQ_SOURCE,
    Lane,
    LaneFacts,
    pick_lane,
)
from penstock.lanes.native import NativeTextLane
from penstock.lanes.pieces import MOST_TOKENS, StepPieces, recorded_size
from penstock.lanes.seq2seq import Seq2SeqLane
from penstock.lanes.seq2seq_spec import Seq2SeqSpec
from penstock.models.cpu_steps import compiled_steps
from penstock.models.decoder import Decoder
from penstock.models.files import ModelFiles, resolve
from penstock.models.generic_spec import GenericSpec
from penstock.models.gguf import read_gguf
from penstock.models.packing import Packing, packing_of
from penstock.models.spec import DecoderSpec, decoder_spec
from penstock.models.weights import WeightSource, open_weights
from penstock.plan.machine import default_memory_budget, num_physical_cores, resident_bytes
from penstock.plan.memory import MemoryModel
from penstock.prompt.load import TokenizerParts, tokenizer_from_folder, tokenizer_from_gguf
from penstock.prompt.render import ChatTemplate
from penstock.prompt.tokens import Tokenizer

if TYPE_CHECKING:
    from penstock.attention.cuda import CudaAttention

assert (CPU_TILING.query_rows, CPU_TILING.key_rows) == (QUERY_ROWS, KEY_ROWS), "the plan and the kernel disagree"

# glibc's mallopt parameters, by their numbers in malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    name: str
    identity: str
    spec: DecoderSpec | GenericSpec | Seq2SeqSpec
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
    attention: str  # what computes it
    source: Seq2SeqLane | None = None  # the lane again, where it reads a source
    media: MediaPromptReader | None = None  # None: the model reads text only


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStart:
    """What every loader begins with: the tokenizer, and the memory that is there before the weights."""

    files: ModelFiles
    config: EngineConfig
    device: torch.device
    dtype: str
    parts: TokenizerParts
    tokenizer: Tokenizer
    runtime_bytes: int
    budget_bytes: int

    @classmethod
    def of(cls, files: ModelFiles, config: EngineConfig, device: torch.device) -> LoadStart:
        """Libraries that the model needs are imported before, so that they count as part of the runtime."""
        parts = load_tokenizer(files)
        tokenizer = Tokenizer(parts.backend)
        gpu = gpu_memory(device)
        return_freed_memory()
        return cls(
            files=files,
            config=config,
            device=device,
            dtype=choose_dtype(config.dtype, files.config, device.type),
            parts=parts,
            tokenizer=tokenizer,
            runtime_bytes=gpu.runtime_bytes if gpu else resident_bytes() + FIRST_CALL_BYTES_ESTIMATE,
            budget_bytes=config.memory or (gpu.default_budget if gpu else default_memory_budget()),
        )

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.runtime_bytes

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def loaded(
        self,
        *,
        spec: DecoderSpec | GenericSpec | Seq2SeqSpec,
        lane: Lane,
        memory: MemoryModel,
        num_tokens: int,
        max_context: int,
        adjustments: Iterable[str],
        attention: AttentionBackend | None = None,
        **others: Any,
    ) -> LoadedModel:
        """`others` take the place of what the tokenizer's files say, or are fields of some models alone."""
        failures = () if attention is None or attention.failure is None else (attention.failure,)
        usual: dict[str, Any] = {
            "identity": f"{self.files.identity}:{self.dtype}",
            "chat_template": chat_template(self.parts),
            "eos_ids": self.parts.eos_ids,
        }
        return LoadedModel(
            name=self.files.name,
            spec=spec,
            lane=lane,
            tokenizer=self.tokenizer,
            memory=memory,
            budget_bytes=self.budget_bytes,
            num_blocks=self.num_blocks(num_tokens),
            max_context=max_context,
            dtype=self.dtype,
            device=self.device,
            adjustments=(*adjustments, *failures),
            attention="transformers" if attention is None else attention.name,
            **usual | others,
        )


def load_model(name: str, config: EngineConfig) -> LoadedModel:
    files = resolve(name)
    facts = pick_lane(files.config, config.lane)
    require_plain_weights(config, facts)
    device = torch.device(require_device(config.device, has_cuda=torch.cuda.is_available()))
    config = config.on_device(device.type)
    prepare_process(config)
    if facts.id == SEQ2SEQ_SOURCE:
        from penstock.engine.seq2seq_loading import load_seq2seq

        return load_seq2seq(files, facts, config, device)
    if facts.id == NATIVE_MULTIMODAL:
        from penstock.engine.native_media_loading import load_native_multimodal

        return load_native_multimodal(files, facts, config, device)
    if facts.id == GENERIC_MULTIMODAL:
        from penstock.engine.multimodal_loading import load_multimodal

        return load_multimodal(files, facts, config, device)
    if facts.id == GENERIC_TEXT:
        from penstock.engine.generic_loading import load_generic

        return load_generic(files, facts, config, device)
    return load_native(files, facts, config, device)


def prepare_process(config: EngineConfig) -> None:
    c_library.use(config.cpu_kernels)
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32, in convolutions too
    keep_freed_memory()
    return_freed_memory()  # of an engine before this one
    torch.set_num_threads(config.threads or num_physical_cores())


def load_native(
    files: ModelFiles,
    facts: LaneFacts,
    config: EngineConfig,
    device: torch.device,
    weights: WeightSource | None = None,
) -> LoadedModel:
    """`weights` take the place of those in the files."""
    spec = decoder_spec(files.config)
    start = LoadStart.of(files, config, device)
    quantize = choose_quantize(config, files, device.type, start.dtype)
    budget = start.budget_bytes
    memory = memory_model(files, config, start.dtype, start.runtime_bytes, budget, device.type)
    max_context, warnings = context_limit(config, spec.max_context)
    num_tokens = min(require_room(memory, config, budget, device.type), max_context * config.max_running)
    lane = native_lane(
        spec,
        weights or open_weights(files),
        memory,
        facts,
        config,
        num_blocks=start.num_blocks(num_tokens),
        dtype=start.dtype,
        device=device,
        packing=packing_of(files, quantize),
    )
    return start.loaded(
        identity=f"{files.identity}:{start.dtype}:{quantize}",
        spec=spec,
        lane=lane,
        memory=memory,
        num_tokens=num_tokens,
        max_context=max_context,
        adjustments=(*warnings, *_slow_packing(quantize, start.dtype)),
        attention=lane.attention,
    )


def _slow_packing(quantize: str, dtype: str) -> list[str]:
    """What to say where no C kernels multiply weights in few bits."""
    if quantize == "none" or (dtype == "bfloat16" and c_library.c_kernels() is not None):
        return []
    reason = c_library.kernels().reason if dtype == "bfloat16" else f"they are for bfloat16, not {dtype}"
    return [f"weights in few bits are unpacked in Python for every step, slowly; no C kernels: {reason}"]


def native_lane(
    spec: DecoderSpec,
    weights: WeightSource,
    memory: MemoryModel,
    facts: LaneFacts,
    config: EngineConfig,
    *,
    num_blocks: int,
    dtype: str,
    device: torch.device,
    packing: Packing | None = None,
) -> NativeTextLane:
    """Our decoder with its weights, over as many pages as were counted."""
    torch_dtype = getattr(torch, dtype)
    decoder = Decoder(spec, dtype=torch_dtype, device=device, packing=packing)
    decoder.load(weights)
    storage = KvStorage(
        num_layers=spec.num_attention_layers,
        num_slots=num_blocks * config.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=torch_dtype,
        device=device,
    )
    attention = attention_backend(storage, config.block_size, spec.num_heads)
    max_context, _ = context_limit(config, spec.max_context)
    graphs, pieces = recorded_steps(decoder, attention, config, max_context)
    states = state_storage(spec, memory, torch_dtype, device)
    steps = compiled_steps(decoder, attention)
    ways = {"graphs": graphs, "pieces": pieces, "steps": steps}
    return NativeTextLane(decoder, attention, shape=memory.shape, facts=facts, **ways, states=states)


def state_storage(
    spec: DecoderSpec, memory: MemoryModel, dtype: torch.dtype, device: torch.device
) -> StateStorage | None:
    """None where no layer is recurrent."""
    if spec.recurrent is None:
        return None
    return StateStorage(
        layers=spec.recurrent_layers,
        num_slots=memory.num_running_states + memory.num_checkpoints,
        matrix_shape=spec.recurrent.matrix_shape,
        tail_shape=spec.recurrent.tail_shape,
        dtype=dtype,
        device=device,
    )


def attention_backend(storage: KvStorage, block_size: int, num_heads: int) -> AttentionBackend:
    if storage.device.type == "cpu":
        return CpuAttention(storage, block_size)
    try:
        from penstock.attention.cuda import CudaAttention
    except ImportError as error:
        raise InvalidSetting(f"A GPU needs Triton, which is missing ({error}); pip install triton.") from error
    attention = CudaAttention(storage, block_size, num_heads=num_heads)
    attention.pick_reader()
    return attention


def recorded_steps(
    decoder: Decoder, attention: AttentionBackend, config: EngineConfig, max_context: int
) -> tuple[DecodeGraphs | None, StepPieces | None]:
    """None on a CPU, which has nothing to record, and where the host takes part in a layer: experts, states."""
    on_card = attention_on_card(attention)
    if on_card is None or decoder.spec.experts is not None or decoder.spec.recurrent is not None:
        return None, None
    rows = most_recorded(config.max_running)
    largest = config.most_prompt_tokens + config.max_running if config.most_prompt_tokens else MOST_TOKENS
    graphs = DecodeGraphs(decoder, on_card.for_decodes(max_rows=rows, max_context=max_context))
    return graphs, StepPieces(decoder, on_card.for_pieces(max_rows=recorded_size(largest)))


def attention_on_card(attention: AttentionBackend) -> CudaAttention | None:
    """None on a CPU, which may have no Triton."""
    if isinstance(attention, CpuAttention):
        return None
    from penstock.attention.cuda import CudaAttention

    assert isinstance(attention, CudaAttention)
    return attention


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


def chat_template(parts: TokenizerParts) -> ChatTemplate | None:
    if parts.chat_template is None:
        return None
    return ChatTemplate(parts.chat_template, special_tokens=parts.special_tokens)
