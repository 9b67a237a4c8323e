"""What a model will cost, from its config alone: no torch, no weights."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import config as defaults
from penstock.attention import c_library
from penstock.config import EngineConfig, load_config
from penstock.errors import InvalidModelFile, InvalidSetting, MemoryTooSmall
from penstock.lanes.lane import (
    CHECKED_LANES,
    DTYPE_BYTES,
    GENERIC_MULTIMODAL,
    GENERIC_TEXT,
    NATIVE_MULTIMODAL,
    NATIVE_TEXT,
    SEQ2SEQ_SOURCE,
    LaneFacts,
    generic_shape,
    native_shape,
    pick_lane,
)
from penstock.lanes.seq2seq_spec import seq2seq_shape, seq2seq_spec
from penstock.lanes.verdicts import Verdict, Way, judged, load_verdict, verdict_key
from penstock.models.files import ModelFiles, resolve
from penstock.models.generic_spec import GenericSpec, estimated_parameters, generic_spec, num_stored_parameters
from penstock.models.media_spec import media_text_config, num_deepstack_layers
from penstock.models.packing import packing_of, stored_formats
from penstock.plan.machine import default_memory_budget, has_fast_bfloat16
from penstock.plan.memory import AttentionTiling, MemoryModel, ModelShape
from penstock.plan.prompt_plan import PromptPlan, plan_prompt

GIB = 2**30
CPU_TILING = AttentionTiling(query_rows=512, key_rows=1024)
# On a GPU scores stay in registers; partial results exist only for chunks too small to fill the card.
CUDA_TILING = AttentionTiling(query_rows=256, key_rows=64)
LARGEST_CONTEXT_BYTES = GIB
# Attributes of a device, by their numbers in cuda.h.
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
# Of what the weights leave: shares for one call of an image encoder and for features that are kept, and their limits.
ENCODER_SHARE, MOST_ENCODER_BYTES = 1 / 8, GIB // 2
FEATURE_SHARE, MOST_FEATURE_BYTES = 1 / 16, GIB // 4
TILINGS = {"cpu": CPU_TILING, "cuda": CUDA_TILING}
# A CPU's matrix library packs panels: 67 MB in bfloat16 or 134 MB in float32 take no more than this.
MOST_PACKED_BYTES = {"cpu": 16 * 2**20, "cuda": None}


NO_SHARED_PREFIXES = "the prefix cache is off: the model keeps its own cache for each sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A prompt's plan with the names of what it was made for."""

    model: str
    lane: LaneFacts
    dtype: str
    quantize: str  # none, keep, int8 or int4
    max_context: int
    prompt: PromptPlan
    peak_by_chunk_size: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a GPU, asked before any weight is loaded."""

    total_bytes: int
    free_bytes: int
    name: str = ""
    capability: tuple[int, int] | None = None  # None: it was not asked

    @property
    def runtime_bytes(self) -> int:
        """The CUDA context and its libraries. What else is taken belongs to other processes."""
        return min(self.total_bytes - self.free_bytes, LARGEST_CONTEXT_BYTES)

    @property
    def default_budget(self) -> int:
        return int(self.runtime_bytes + self.free_bytes * (1 - defaults.FREE_MEMORY_MARGIN))


def cuda_memory() -> DeviceMemory | None:
    """Of the first GPU that torch would use, asked of the driver itself, without torch; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if importlib.metadata.version("torch").endswith("+cpu"):
            return None
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    calls = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
        lambda: driver.cuDeviceGetName(name, len(name), device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device),
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: driver.cuCtxSetCurrent(context),
        lambda: driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
    )
    is_known = all(call() == 0 for call in calls)
    if context:
        driver.cuDevicePrimaryCtxRelease_v2(device)
    if not is_known:
        return None
    return DeviceMemory(
        total_bytes=total.value,
        free_bytes=free.value,
        name=name.value.decode(errors="replace"),
        capability=(major.value, minor.value),
    )


def choose_dtype(asked: str, model_config: Mapping[str, Any], device: str = "cpu") -> str:
    """The checkpoint's own, but float32 where this processor has no fast bfloat16."""
    if asked != "auto":
        return asked
    stored = str(model_config.get("dtype") or model_config.get("torch_dtype") or "float32")
    return "bfloat16" if stored != "float32" and (device == "cuda" or has_fast_bfloat16()) else "float32"


def choose_quantize(config: EngineConfig, files: ModelFiles, device: str, dtype: str) -> str:
    """The format of a native model's matrices. What was asked for is refused where it cannot be had."""
    if config.quantize == "auto":
        is_kept = device == "cpu" and bool(stored_formats(files)) and multiplies_codes(config, dtype)
        return "keep" if is_kept else "none"
    if config.quantize != "none" and device != "cpu":
        raise InvalidSetting(
            f"--quantize {config.quantize} is for processors; on device {device!r} weights stay in the model's dtype. "
            "Leave it out or use --device cpu."
        )
    if config.quantize == "keep" and not stored_formats(files):
        raise InvalidSetting("--quantize keep needs a GGUF file with quantized weights; use int8 or int4 here.")
    return config.quantize


def multiplies_codes(config: EngineConfig, dtype: str) -> bool:
    """Whether rows are multiplied with weights in few bits as they lie; they are unpacked otherwise."""
    return dtype == "bfloat16" and config.cpu_kernels == "auto" and c_library.can_run()


def require_plain_weights(config: EngineConfig, lane: LaneFacts) -> None:
    if config.quantize not in ("auto", "none") and lane.id != NATIVE_TEXT:
        raise InvalidSetting(f"--quantize {config.quantize} is for lane {NATIVE_TEXT}, not {lane.id}; leave it out.")


def require_device(name: str, *, has_cuda: bool) -> str:
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if name == "cuda" and not has_cuda:
        raise InvalidSetting("Device 'cuda' is not there: torch or the driver finds no GPU; use --device cpu.")
    if name not in TILINGS:
        raise InvalidSetting(f"Device {name!r} has no attention backend yet; use --device cpu.")
    return name


def context_limit(config: EngineConfig, model_context: int) -> tuple[int, list[str]]:
    """The context that holds, and what to say when it goes past what the model was trained for."""
    if config.context is None:
        return model_context, []
    if config.context <= model_context:
        return config.context, []
    message = f"context {config.context} is past the {model_context} that the model was trained for"
    if config.strict:
        raise InvalidSetting(f"--strict: {message}. Lower --context.")
    return config.context, [f"{message}; answers may be poor"]


def memory_model(
    files: ModelFiles, config: EngineConfig, dtype: str, runtime_bytes: int, budget_bytes: int, device: str = "cpu"
) -> MemoryModel:
    is_seq2seq = bool(files.config.get("is_encoder_decoder"))
    if is_seq2seq:
        shape = seq2seq_shape(seq2seq_spec(files.config), DTYPE_BYTES[dtype])
    else:
        packing = packing_of(files, choose_quantize(config, files, device, dtype))
        is_multiplied = packing is not None and multiplies_codes(config, dtype)
        shape = native_shape(files.config, dtype, packing, multiplies_codes=is_multiplied)
    num_running, num_checkpoints = state_slots(shape, config, budget_bytes - runtime_bytes - shape.weight_bytes)
    return MemoryModel(
        shape=shape,
        tiling=TILINGS[device],
        most_packed_bytes=MOST_PACKED_BYTES[device],
        runtime_bytes=runtime_bytes,
        block_size=config.block_size,
        num_running_states=num_running,
        num_checkpoints=num_checkpoints,
        num_logit_rows=_num_logit_rows(config, device),
    )


def _num_logit_rows(config: EngineConfig, device: str) -> int:
    """A card keeps those of every sequence that runs; on a CPU they are gone before the activations are there."""
    return config.max_running if device == "cuda" else 1


def state_slots(shape: ModelShape, config: EngineConfig, free_bytes: int) -> tuple[int, int]:
    """(running sequences, checkpoints) whose recurrent state may be resident; at least one sequence runs."""
    if not shape.state_bytes:
        return 0, 0
    num_slots = max(1, int(free_bytes * defaults.STATE_SHARE) // shape.state_bytes)
    num_checkpoints = min(num_slots // 2, config.max_checkpoints) if config.prefix_cache else 0
    return min(config.max_running, num_slots - num_checkpoints), num_checkpoints


def generic_memory_model(
    files: ModelFiles,
    spec: GenericSpec,
    verdict: Verdict | None,
    config: EngineConfig,
    dtype: str,
    runtime_bytes: int,
    budget_bytes: int,
    device: str = "cpu",
    *,
    reads_images: bool = False,
) -> MemoryModel:
    """Of a model that transformers runs. Before it was checked, layers without keys tell how it will be run."""
    has_pages = spec.num_kv_layers == spec.num_layers if verdict is None else verdict.way in (Way.PACKED, Way.PAGED)
    has_pages = has_pages and not reads_images
    tiling = TILINGS[device]
    if not has_pages:
        tiling = AttentionTiling(query_rows=spec.max_context, key_rows=spec.max_context)
    shape = generic_shape(
        spec,
        num_parameters=num_stored_parameters(files) or estimated_parameters(spec),
        dtype=dtype,
        keeps_own_cache=not has_pages,
    )
    if reads_images:  # any token may be an image's, whose feature row is kept as long as it is
        shape = dataclasses.replace(shape, state_bytes_per_token=spec.hidden_size * DTYPE_BYTES[dtype])
    memory = MemoryModel(
        shape=shape,
        tiling=tiling,
        most_packed_bytes=MOST_PACKED_BYTES[device],
        runtime_bytes=runtime_bytes,
        block_size=config.block_size,
        num_running_states=num_own_states(shape, config, budget_bytes - runtime_bytes - shape.weight_bytes),
    )
    return dataclasses.replace(memory, media_bytes=sum(media_shares(memory, budget_bytes))) if reads_images else memory


def native_media_memory_model(
    files: ModelFiles, config: EngineConfig, dtype: str, runtime_bytes: int, budget_bytes: int, device: str = "cpu"
) -> MemoryModel:
    """Of our decoder beside a tower. Any token may be an image's, whose feature rows are kept as long as it is."""
    text = media_text_config(files)
    shape = native_shape(text, dtype)
    rows_per_token = 1 + num_deepstack_layers(files.config)
    shape = dataclasses.replace(
        shape,
        num_parameters=num_stored_parameters(files) or shape.num_parameters,
        state_bytes_per_token=rows_per_token * shape.hidden_size * DTYPE_BYTES[dtype],
    )
    memory = MemoryModel(
        shape=shape,
        tiling=TILINGS[device],
        most_packed_bytes=MOST_PACKED_BYTES[device],
        runtime_bytes=runtime_bytes,
        block_size=config.block_size,
        num_logit_rows=_num_logit_rows(config, device),
    )
    return dataclasses.replace(memory, media_bytes=sum(media_shares(memory, budget_bytes)))


def media_shares(memory: MemoryModel, budget_bytes: int) -> tuple[int, int]:
    """(bytes for one call of the image encoder, bytes for features that stay for other prompts)."""
    free = max(0, budget_bytes - memory.runtime_bytes - memory.shape.weight_bytes)
    encoder, features = int(free * ENCODER_SHARE), int(free * FEATURE_SHARE)
    return min(encoder, MOST_ENCODER_BYTES), min(features, MOST_FEATURE_BYTES)


def _image_text_spec(files: ModelFiles) -> GenericSpec:
    """Configs of image-text models may leave sizes to the library's defaults, which are then asked of it."""
    try:
        return generic_spec(files.config)
    except InvalidModelFile:
        from penstock.models.pretrained import image_text_class

        return generic_spec(image_text_class(files)[1].to_dict())


def num_own_states(shape: ModelShape, config: EngineConfig, free_bytes: int) -> int:
    """Sequences whose states may be resident where the model keeps them itself, without checkpoints."""
    return state_slots(shape, dataclasses.replace(config, prefix_cache=False), free_bytes)[0]


def kept_verdict(files: ModelFiles, lane: LaneFacts, dtype: str, device: str) -> Verdict | None:
    """Of an earlier check of this config with these libraries; None when there was none."""
    return load_verdict(verdict_key(files.config, dtype=dtype, lane=lane.id, backend=device))


def require_room(memory: MemoryModel, config: EngineConfig, budget_bytes: int, device: str = "cpu") -> int:
    """Tokens whose KV the budget holds; refuses a budget that not even the smallest chunk fits."""
    if device == "cuda":
        # Pages of a GPU are all taken at load, so room for a chunk is kept beside them: the largest, or half of it...
        chunk = config.most_prompt_tokens or min(config.context or memory.shape.max_context, memory.shape.max_context)
        while chunk > config.min_chunk_size:
            if (capacity := memory.kv_capacity(budget_bytes=budget_bytes, chunk=chunk)) >= chunk:
                return capacity
            chunk //= 2
    capacity = memory.kv_capacity(budget_bytes=budget_bytes, chunk=config.min_chunk_size)
    if capacity < config.min_chunk_size:
        least = memory.peak_bytes(chunk=config.min_chunk_size, context=config.min_chunk_size)
        raise MemoryTooSmall(
            f"The memory budget is {budget_bytes / GIB:.2f} GiB; this model needs at least {least / GIB:.2f} GiB "
            f"({memory.shape.weight_bytes / GIB:.2f} of it weights). Raise --memory or take a smaller model."
        )
    return capacity


def estimated_runtime_bytes(model_config: Mapping[str, Any], lane: LaneFacts) -> int:
    """Of Python, the libraries that the lane imports and the tokenizer, before anything was imported."""
    text_config = model_config.get("text_config") or {}
    vocabulary = model_config.get("vocab_size") or text_config.get("vocab_size") or 0
    libraries = defaults.RUNTIME_BYTES_ESTIMATE
    if lane.id != NATIVE_TEXT:
        libraries += defaults.TRANSFORMERS_BYTES_ESTIMATE
    return libraries + vocabulary * defaults.TOKENIZER_BYTES_PER_TOKEN_ESTIMATE


def plan_model(model: str, prompt_tokens: int, config: EngineConfig) -> ModelPlan:
    if prompt_tokens < 1:
        raise InvalidSetting(f"Prompt tokens are {prompt_tokens}; give at least 1.")
    gpu = None if config.device == "cpu" else cuda_memory()
    device = require_device(config.device, has_cuda=gpu is not None)
    config = config.on_device(device)
    files = resolve(model, weights=False)
    lane = pick_lane(files.config, config.lane)
    require_plain_weights(config, lane)
    dtype = choose_dtype(config.dtype, files.config, device)
    is_source = lane.id == SEQ2SEQ_SOURCE
    runtime_bytes = gpu.runtime_bytes if gpu is not None else estimated_runtime_bytes(files.config, lane)
    budget = config.memory or (gpu.default_budget if gpu is not None else default_memory_budget())
    verdict = None
    if lane.id in CHECKED_LANES:
        verdict = kept_verdict(files, lane, dtype, device)
        lane = judged(lane, verdict, is_strict=config.strict)
    if lane.id == NATIVE_MULTIMODAL:
        memory = native_media_memory_model(files, config, dtype, runtime_bytes, budget, device)
    elif lane.id not in (GENERIC_TEXT, GENERIC_MULTIMODAL):
        memory = memory_model(files, config, dtype, runtime_bytes, budget, device)
    else:
        reads_images = lane.id == GENERIC_MULTIMODAL
        spec = _image_text_spec(files) if reads_images else generic_spec(files.config)
        memory = generic_memory_model(
            files, spec, verdict, config, dtype, runtime_bytes, budget, device, reads_images=reads_images
        )
    max_context, warnings = context_limit(config, memory.shape.max_context)
    if lane.id == GENERIC_MULTIMODAL and config.prefix_cache:
        warnings = [*warnings, NO_SHARED_PREFIXES]
    require_room(memory, config, budget, device)
    prompt = plan_prompt(
        memory, prompt_tokens, config, budget, max_context, is_source=is_source, is_whole=lane.reads_whole
    )
    prompt = dataclasses.replace(prompt, adjustments=(*warnings, *prompt.adjustments))
    sizes = [size for size in (16, 64, 256, 1024, 4096) if size < prompt_tokens] + [prompt_tokens]
    peaks = {size: memory.peak_bytes(chunk=size, context=prompt_tokens) for size in sizes}
    quantize = choose_quantize(config, files, device, dtype) if lane.id == NATIVE_TEXT else "none"
    return ModelPlan(
        model=model,
        lane=lane,
        dtype=dtype,
        quantize=quantize,
        max_context=max_context,
        prompt=prompt,
        peak_by_chunk_size=peaks,
    )


def plan(model: str = defaults.DEFAULT_MODEL, *, prompt_tokens: int, **settings: Any) -> ModelPlan:
    """The public entry: `penstock.plan("smollm2", prompt_tokens=100_000, memory="4GiB")`."""
    return plan_model(model, prompt_tokens, load_config(settings))
