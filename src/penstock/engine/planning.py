"""What a model will cost, from its config alone: no torch, no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import config as defaults
from penstock.config import EngineConfig, load_config
from penstock.errors import InvalidSetting
from penstock.lanes.lane import LaneFacts
from penstock.lanes.native_text_kind import streaming_plan
from penstock.lanes.place import Place
from penstock.lanes.table import LANES, settle
from penstock.models.files import reading_config, resolve
from penstock.plan.chunks import last_chunks
from penstock.plan.devices import cuda_memory, device_warnings
from penstock.plan.placement import StreamingPlan
from penstock.plan.prompt_plan import PromptPlan, plan_prompt
from penstock.proof.verdict import judged

if TYPE_CHECKING:
    from penstock.prompt.source import TextPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A prompt's plan with the names of what it was made for."""

    model: str
    adapter: str | None  # its name; None: the weights are the model's own
    lane: LaneFacts
    dtype: str
    quantize: str  # none, keep, int8 or int4
    max_context: int
    prompt: PromptPlan
    peak_by_chunk_size: Mapping[int, int]
    streaming: StreamingPlan | None  # None: all layers stay in memory
    disk_bytes: int | None  # of the prompt in the cache folder; None: there is none; 0: it keeps nothing of this model


def estimated_runtime_bytes(place: Place) -> int:
    """Estimates the bytes of Python, the lane's libraries and the tokenizer, before anything was imported."""
    config = place.files.config
    text_config = config.get("text_config") or {}
    vocabulary = config.get("vocab_size") or text_config.get("vocab_size") or 0
    libraries = defaults.RUNTIME_BYTES_ESTIMATE
    if LANES[place.lane.id].needs_transformers:
        libraries += defaults.TRANSFORMERS_BYTES_ESTIMATE
    return libraries + vocabulary * defaults.TOKENIZER_BYTES_PER_TOKEN_ESTIMATE


def plan_model(model: str, prompt: int | Sequence[TextPart], config: EngineConfig) -> ModelPlan:
    """`prompt`: its length in tokens, or the parts of a message, which are counted."""
    gpu = cuda_memory() if config.device in ("auto", "cuda") else None
    place = settle(resolve(model, weights=False), config, has_cuda=gpu is not None)
    if isinstance(prompt, int):
        prompt_tokens = prompt
    else:
        from penstock.engine.prompts import prompt_reader

        prompt_tokens = prompt_reader(place.files, place.lane).chat_feed(prompt).num_total or 0
    if prompt_tokens < 1:
        raise InvalidSetting(f"Prompt tokens are {prompt_tokens}; give at least 1.")
    kind = LANES[place.lane.id]
    with reading_config(model):
        place = place.with_memory(gpu, estimated_runtime_bytes(place))
    verdict = place.kept_verdict() if kind.is_checked else None
    if kind.is_checked:
        place = dataclasses.replace(place, lane=judged(place.lane, verdict, is_strict=config.strict))
    with reading_config(model):
        memory = kind.price(place, verdict)
        max_context, warnings = place.context_limit(memory.shape.max_context)
        place.room(memory)
        place = place.with_placement(memory)
        planned = plan_prompt(
            memory,
            prompt_tokens,
            place.config,
            place.budget_bytes,
            max_context,
            is_source=place.lane.reads_source,
            is_whole=place.lane.reads_whole,
        )
    streaming = streaming_plan(place, memory)
    told = [] if streaming is None else [streaming.summary()]
    warnings = [*device_warnings(place.device), *warnings, *place.lane_adjustments(), *told]
    planned = dataclasses.replace(planned, adjustments=(*warnings, *planned.adjustments))

    def peak_in_chunks(size: int) -> int:
        ends = last_chunks(prompt_tokens, size)
        is_source = place.lane.reads_source  # all of it is there from the first chunk on
        return max(memory.peak_bytes(chunk=one, context=prompt_tokens if is_source else end) for one, end in ends)

    sizes = [size for size in (16, 64, 256, 1024, 4096) if size < prompt_tokens] + [prompt_tokens]
    kept_bytes = planned.kv_bytes + planned.state_bytes if place.uses_disk else 0
    return ModelPlan(
        model=model,
        adapter=place.files.adapter_name,
        lane=place.lane,
        dtype=place.dtype,
        quantize=place.quantize,
        max_context=max_context,
        prompt=planned,
        peak_by_chunk_size={size: peak_in_chunks(size) for size in sizes},
        streaming=streaming,
        disk_bytes=None if config.cache_dir is None else kept_bytes,
    )


def plan(model: str = defaults.DEFAULT_MODEL, *, prompt_tokens: int, **settings: Any) -> ModelPlan:
    """The public entry: `penstock.plan("smollm2", prompt_tokens=100_000, memory="4GiB")`."""
    return plan_model(model, prompt_tokens, load_config(settings))
