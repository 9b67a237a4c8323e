"""The plan of one prompt: its chunks, its peak, whether it fits, and every number that had to be changed."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.errors import InvalidSetting
from penstock.plan.memory import MemoryModel

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    prompt_tokens: int
    chunk_size: int
    num_chunks: int
    runtime_bytes: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    activation_bytes: int
    logits_bytes: int
    peak_bytes: int
    budget_bytes: int
    fits: bool
    adjustments: tuple[str, ...]


def plan_prompt(
    memory: MemoryModel,
    prompt_tokens: int,
    config: EngineConfig,
    budget_bytes: int,
    max_context: int,
    *,
    is_source: bool = False,
) -> PromptPlan:
    """Walks the prompt as the scheduler will, chunk by chunk, re-solving the chunk as the context grows.

    A source that an encoder reads is all there from its first chunk on; its chunks are those of one pass.
    """
    upper = chunk_upper_bound(config, prompt_tokens)
    sizes: list[int] = []
    peak, start = 0, 0
    # One more token is the answer's, which has positions of its own beside a source.
    has_positions = prompt_tokens <= max_context if is_source else prompt_tokens < max_context
    fits = has_positions
    while start < prompt_tokens:
        wanted = min(upper, prompt_tokens - start)
        context = prompt_tokens if is_source else start
        allowed = memory.largest_chunk(start=context, budget_bytes=budget_bytes, upper=wanted)
        fits = fits and allowed > 0
        chunk = allowed or wanted
        sizes.append(chunk)
        start += max(1, chunk - (config.overlap if start + chunk < prompt_tokens else 0))
        context = prompt_tokens if is_source else min(start + config.overlap, prompt_tokens)
        peak = max(peak, memory.peak_bytes(chunk=chunk, context=context))
    chunk_size = max(sizes, default=0)
    adjustments = _adjustments(config, sizes, prompt_tokens, budget_bytes)
    if not has_positions:
        lack = "are past" if is_source else "leave no room for an answer in"
        adjustments.append(f"{prompt_tokens} tokens {lack} the context of {max_context}")
    return PromptPlan(
        prompt_tokens=prompt_tokens,
        chunk_size=chunk_size,
        num_chunks=len(sizes),
        runtime_bytes=memory.runtime_bytes,
        weight_bytes=memory.shape.weight_bytes,
        kv_bytes=memory.kv_bytes(prompt_tokens),
        state_bytes=0,
        # What the peak leaves beside the rest: under a tight budget the last chunks are smaller than the first.
        activation_bytes=max(0, peak - memory.fixed_bytes(prompt_tokens)),
        logits_bytes=memory.logits_bytes(1),
        peak_bytes=peak,
        budget_bytes=budget_bytes,
        fits=fits,
        adjustments=tuple(adjustments),
    )


def chunk_upper_bound(config: EngineConfig, prompt_tokens: int) -> int:
    if config.chunk_size == 0:
        return max(1, prompt_tokens)
    return config.chunk_size or config.max_chunk_size


def _adjustments(config: EngineConfig, sizes: list[int], prompt_tokens: int, budget_bytes: int) -> list[str]:
    found: list[str] = []
    asked = config.chunk_size
    shrunk = bool(sizes) and asked is not None and max(sizes) < min(asked or prompt_tokens, prompt_tokens)
    if not shrunk and asked and len(sizes) > 1:
        shrunk = min(sizes[:-1]) < asked
    if shrunk:
        name = "the whole prompt" if asked == 0 else f"chunk size {asked}"
        lowered = f"{min(sizes[:-1] or sizes)} to {max(sizes)}"
        message = f"{name} lowered to {lowered} by the memory budget of {budget_bytes / GIB:.2f} GiB"
        if config.strict:
            raise InvalidSetting(f"--strict: {message}. Raise --memory or lower --chunk-size.")
        found.append(message)
    return found
