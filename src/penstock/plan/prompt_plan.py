"""The plan of one prompt: its chunks, its peak, whether it fits, and every number that had to be changed."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import EngineConfig, told_budget
from penstock.plan.chunks import Stops, chunk_end
from penstock.plan.memory import MemoryModel
from penstock.request import Span

ANSWER_TOKENS = 256  # that whoever raises a limit for a prompt should leave room for


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
    recording_bytes: int  # of a GPU's captured steps
    media_bytes: int
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
    is_whole: bool = False,
    atomic: tuple[Span, ...] = (),
) -> PromptPlan:
    """Walks the prompt as the scheduler will, chunk by chunk, re-solving the chunk as the context grows.

    A source that an encoder reads is all there from its first chunk on; its chunks are those of one pass.
    `is_whole`: the lane does not read this model in chunks, so what does not fit whole does not fit.
    `atomic`: spans that are read whole, such as images that see themselves.
    """
    upper = prompt_tokens if is_whole else chunk_upper_bound(config, prompt_tokens)
    has_state = memory.shape.state_bytes > 0
    stops = Stops(end=prompt_tokens, boundary=memory.block_size if memory.num_checkpoints else 1, atomic=atomic)
    overlap = 0 if has_state else config.overlap
    sizes: list[int] = []
    lowered: list[int] = []  # by the memory budget
    peak, start = 0, 0
    lack = past_context(prompt_tokens, max_context, is_source=is_source)
    fits = not lack
    while start < prompt_tokens:
        wanted = min(upper, prompt_tokens - start)
        context = prompt_tokens if is_source else start
        allowed = memory.largest_chunk(start=context, budget_bytes=budget_bytes, upper=wanted)
        fits = fits and (allowed == wanted if is_whole else allowed > 0)
        chunk = chunk_end(start, wanted if is_whole else allowed or wanted, stops).position - start
        if chunk > wanted:
            fits = fits and memory.largest_chunk(start=context, budget_bytes=budget_bytes, upper=chunk) == chunk
        sizes.append(chunk)
        if 0 < allowed < wanted:
            lowered.append(chunk)
        start += max(1, chunk - (overlap if start + chunk < prompt_tokens else 0))
        context = prompt_tokens if is_source else min(start + overlap, prompt_tokens)
        peak = max(peak, memory.peak_bytes(chunk=chunk, context=context))
    chunk_size = max(sizes, default=0)
    adjustments = _adjustments(config, stops, lowered, sizes, budget_bytes)
    if lack:
        adjustments.append(lack)
    return PromptPlan(
        prompt_tokens=prompt_tokens,
        chunk_size=chunk_size,
        num_chunks=len(sizes),
        runtime_bytes=memory.runtime_bytes,
        weight_bytes=memory.weight_bytes,
        kv_bytes=memory.kv_bytes(prompt_tokens),
        state_bytes=memory.state_bytes(prompt_tokens),
        # What the peak leaves beside the rest: under a tight budget the last chunks are smaller than the first.
        activation_bytes=max(0, peak - memory.fixed_bytes(prompt_tokens)),
        logits_bytes=memory.logits_bytes(memory.num_logit_rows),
        recording_bytes=memory.recording_bytes,
        media_bytes=memory.media_bytes,
        peak_bytes=peak,
        budget_bytes=budget_bytes,
        fits=fits,
        adjustments=tuple(adjustments),
    )


def past_context(prompt_tokens: int, max_context: int, *, is_source: bool) -> str:
    """Says what the context lacks; nothing where it is enough."""
    # One more token is the answer's, which has positions of its own beside a source.
    if prompt_tokens <= max_context if is_source else prompt_tokens < max_context:
        return ""
    lack = "are past" if is_source else "leave no room for an answer in"
    return f"{prompt_tokens} tokens {lack} the context of {max_context}"


def chunk_upper_bound(config: EngineConfig, prompt_tokens: int) -> int:
    if config.chunk_size == 0:
        return max(1, prompt_tokens)
    return config.chunk_size or config.most_auto_tokens


def _adjustments(
    config: EngineConfig, stops: Stops, lowered: list[int], sizes: list[int], budget_bytes: int
) -> list[str]:
    found: list[str] = []
    asked, boundary = config.chunk_size, stops.boundary
    name = "the whole prompt" if asked == 0 else f"chunk size {asked}"
    if lowered and asked is not None:
        found.append(
            f"{name} lowered to {min(lowered)} to {max(sizes)} by the memory budget, {told_budget(budget_bytes)}"
        )
        config.refuse_if_strict(found[-1], "Raise --memory or lower --chunk-size.")
    if asked and asked < stops.end and asked % boundary:
        kept = f"{asked // boundary * boundary}" if asked > boundary else f"{asked} or less"
        found.append(f"{name} is {kept}: chunks end with blocks of {boundary}, where recurrent state can be saved")
        config.refuse_if_strict(found[-1], f"Make --chunk-size a multiple of {boundary}.")
    if asked and (widest := max((span.end - span.start for span in stops.atomic), default=0)) > asked:
        found.append(f"{name} raised to {widest} where tokens of an image see each other and are read together")
        config.refuse_if_strict(found[-1], f"Make --chunk-size at least {widest}.")
    if config.overlap and boundary > 1:
        found.append(f"overlap {config.overlap} is 0: recurrent state cannot go back over tokens")
        config.refuse_if_strict(found[-1], "Leave --overlap out.")
    return found
