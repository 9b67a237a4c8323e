"""The prompts of an attached model: which calls are read in chunks, where these end, and what is told about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from penstock.attached.images import AttachedImages, media_prompt
from penstock.attached.memory import forward_memory, held_bytes
from penstock.errors import InvalidSetting, PenstockError, UnsupportedModel
from penstock.foreign.forward import (
    TOKEN_NAMES,
    Cached,
    CachedForward,
    ForwardPrompt,
    TextCall,
    cache_in,
    num_cached_tokens,
    num_tokens,
    read_in_chunks,
)
from penstock.foreign.images import MediaModel, media_model
from penstock.plan.pace import Pace
from penstock.proof.forward import CHUNK_SIZES, check_forward
from penstock.proof.selfcheck import check_attached
from penstock.proof.verdict import Finding
from penstock.request import ChunkRecord, PrefillProgress

OnProgress = Callable[[PrefillProgress], None]
PADDING_TRIED = 5  # tokens of padding in the check of padded prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the last prompt was read. `chunks` is empty where it was read whole, and `reason` says why."""

    num_tokens: int
    num_cached: int = 0  # tokens that a cache held already; not counted where the prompt was read whole
    chunks: tuple[ChunkRecord, ...] = ()
    applied: bool = False
    reason: str
    adjustments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBounds:
    """What bounds a chunk, and who is told of it."""

    chunk_size: int
    budget_bytes: int | None  # None: the chunk size alone
    on_progress: OnProgress | None


@dataclass(slots=True, kw_only=True)
class Chunks:
    """The chunks of one prompt as they are read: when, and what is told about each."""

    request_id: int
    num_tokens: int
    num_cached: int
    device: torch.device
    on_progress: OnProgress | None
    predicted_bytes: int = 0
    adjustments: list[str] = field(default_factory=list)
    records: list[ChunkRecord] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)
    started: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def reading(self, reason: str, *, applied: bool) -> Reading:
        return Reading(
            num_tokens=self.num_tokens,
            num_cached=self.num_cached,
            chunks=tuple(self.records),
            applied=applied,
            reason=reason,
            adjustments=tuple(self.adjustments),
        )

    def add(self, start: int, end: int, *, num_done: int | None = None) -> None:
        """`num_done`: tokens of the prompt that are done, where chunks go over it several times."""
        now = time.perf_counter()
        self.records.append(ChunkRecord(start=start, end=end, ms=(now - self.last) * 1e3))
        self.pace.note(start, end, now - self.last)
        self.last = now
        if self.on_progress is None:
            return
        elapsed_s = now - self.started
        if num_done is None:
            left_s = self.pace.seconds_left(end, self.num_tokens, elapsed_s)
        else:
            start, end = 0, num_done
            left_s = elapsed_s * (self.num_tokens - end) / end if end else 0.0
        num_total = self.num_cached + self.num_tokens
        self.on_progress(
            PrefillProgress(
                request_id=self.request_id,
                num_computed=self.num_cached + end,
                num_cached=self.num_cached,
                num_total=num_total,
                num_total_estimate=num_total,
                chunk_start=self.num_cached + start,
                chunk_end=self.num_cached + end,
                elapsed_s=elapsed_s,
                tokens_per_s=end / elapsed_s if elapsed_s > 0 else 0.0,
                eta_s=left_s,
                memory_bytes=held_bytes(self.device),
                predicted_peak_bytes=self.predicted_bytes,
            )
        )


class TextReader:
    """Reads the prompts of text, and of text with images, that `generate` hands to the model's forward."""

    def __init__(self, model: Any, bounds: ChunkBounds) -> None:
        _require_exact(model, check_attached(model))
        self.model = model
        self.bounds = bounds
        self.memory = forward_memory(model)
        self.media: MediaModel | None = media_model(model)  # None: it takes text alone
        self.reading: Reading | None = None
        self._forward = CachedForward(model, forward=model.forward)
        self.request_id = 0
        self._num_prompt_tokens = 0  # of the generate call that runs now; 0: not read yet
        self._wants_last_row_only = True
        self._keeps_padding: bool | None = None  # None: no padded prompt has come
        self._images: AttachedImages | None = None  # of the generate call that runs now

    def begin(self, request_id: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Prepares for a call of `generate`, and says what it is to be given."""
        if kwargs.get("cache_implementation") == "paged":
            raise InvalidSetting(
                "cache_implementation='paged' reads prompts in pieces of its own. Leave it out, or detach the model."
            )
        self.request_id = request_id
        self._num_prompt_tokens = 0
        self._wants_last_row_only = not _checks_candidates(self.model, kwargs)
        if self.media is not None and self._wants_last_row_only:
            self._images, kwargs = AttachedImages.taken_from(self.media, args, kwargs)
        return kwargs

    def end(self) -> None:
        self._images = None

    def takes(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a call is a prompt to be read in chunks; candidates of an assistant, after the prompt, are not."""
        if num_tokens(inputs) <= 1 or num_tokens(inputs) < self._num_prompt_tokens:
            return False
        self._num_prompt_tokens = num_tokens(inputs)
        is_short = num_tokens(inputs) <= self.bounds.chunk_size and self.bounds.budget_bytes is None
        if is_short and self._images is None:
            self.reading = Reading(num_tokens=num_tokens(inputs), reason="the prompt fits one chunk")
            return False
        return True

    def read(self, inputs: Mapping[str, Any]) -> Any:
        _refuse_outputs_of_all_tokens(inputs)
        prompt = PromptReading(self, self._with_padding(self._prompt(inputs), inputs), inputs)
        output = read_in_chunks(
            self._forward,
            prompt.prompt,
            Cached(cache=_cache_given(inputs)),
            chunk_limit=prompt.chunk_limit,
            num_logit_rows=self._num_logit_rows(inputs),
            on_chunk=prompt.on_chunk,
        )
        self.reading = prompt.reading()
        return output

    def _prompt(self, inputs: Mapping[str, Any]) -> ForwardPrompt:
        if self.media is None:
            return TextCall.of(inputs)
        budget = self.bounds.budget_bytes
        free = None if budget is None else max(1, budget - held_bytes(self.model.device))
        return media_prompt(self.media, inputs, self._images, free_bytes=free)

    def _with_padding(self, prompt: ForwardPrompt, inputs: Mapping[str, Any]) -> ForwardPrompt:
        """Checked when the first padded prompt comes, because most prompts are not padded. Models that mask padding
        in their first call alone, or in calls of several tokens, get all of it in the first chunk."""
        mask = inputs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or bool(mask.all()):
            return prompt
        if self._keeps_padding is None:
            check = partial(check_forward, self.model, chunk_sizes=self._padded_sizes(), num_padding=PADDING_TRIED)
            found = check()
            self._keeps_padding = not found.exact and isinstance(prompt, TextCall) and check(keeps_padding=True).exact
            if not self._keeps_padding:
                _require_exact(self.model, found, when=" when prompts are padded")
        num_padding = int((mask.cumsum(-1) == 0).sum(-1).max()) - (mask.shape[1] - prompt.num_tokens)
        if not self._keeps_padding or num_padding < 1 or not isinstance(prompt, TextCall):
            return prompt
        return prompt.with_first_whole(num_padding)

    def _padded_sizes(self) -> tuple[int, ...]:
        """Padding comes first, so only chunks of the largest size hold it; under a budget that may be any size."""
        largest = self.bounds.chunk_size
        smallest = 1 if self.bounds.budget_bytes is not None else min(largest, *CHUNK_SIZES[:2])
        return tuple(size for size in {*CHUNK_SIZES, smallest} if smallest <= size <= largest)

    def _num_logit_rows(self, inputs: Mapping[str, Any]) -> int | None:
        rows = inputs.get("logits_to_keep")
        if isinstance(rows, torch.Tensor):
            raise InvalidSetting("logits_to_keep is a tensor; with an attached model it must be a number.")
        return rows or (1 if self._wants_last_row_only and "logits_to_keep" not in inputs else None)


class PromptReading:
    """One prompt on its way through the model: where its chunks end, and what is told about them."""

    def __init__(self, reader: TextReader, prompt: ForwardPrompt, inputs: Mapping[str, Any]) -> None:
        self.prompt = prompt
        self.bounds = reader.bounds
        self.memory = reader.memory
        self.batch = next(inputs[name] for name in TOKEN_NAMES if inputs.get(name) is not None).shape[0]
        self.base_bytes = 0  # held when the first chunk begins
        self.chunks = Chunks(
            request_id=reader.request_id,
            num_tokens=prompt.num_tokens,
            num_cached=num_cached_tokens(inputs),
            device=reader.model.device,
            on_progress=reader.bounds.on_progress,
        )

    def reading(self) -> Reading:
        number = len(self.chunks.records)
        return self.chunks.reading(f"read in {number} chunk(s)", applied=number > 1)

    def chunk_limit(self, start: int) -> int:
        """Freed memory stays with the process and is used again, so what is held is measured once and then summed."""
        bounds, memory, chunks = self.bounds, self.memory, self.chunks
        if start == 0:
            self.base_bytes = held_bytes(chunks.device)
        held = self.base_bytes + self.batch * start * memory.shape.kv_bytes_per_token
        position, end = chunks.num_cached + start, chunks.num_cached + chunks.num_tokens
        upper = limit = min(bounds.chunk_size, chunks.num_tokens - start)
        if bounds.budget_bytes is not None:
            room = {"batch": self.batch, "start": position}
            memory.require_room(**room, end=end, held_bytes=held, budget_bytes=bounds.budget_bytes)
            limit = max(1, memory.largest_chunk(**room, free_bytes=bounds.budget_bytes - held, upper=upper))
        if limit < upper:
            self.chunks.adjustments.append(
                f"the chunk at token {start} has {limit} tokens instead of {upper}, to stay within memory"
            )
        added = memory.added_bytes(batch=self.batch, chunk=limit, context=position + limit)
        chunks.predicted_bytes = held + added
        return limit

    def on_chunk(self, start: int, end: int, reason: str) -> None:
        if reason == "whole-span" and end - start > self.bounds.chunk_size:
            self.chunks.adjustments.append(f"tokens {start} to {end} belong together and were read in one chunk")
        self.chunks.add(start, end)


def _cache_given(inputs: Mapping[str, Any]) -> Any:
    """The object that generate gives; None: the model makes one in its first chunk."""
    if (given := cache_in(inputs)) is None and not inputs.get("use_cache", True):
        raise InvalidSetting(
            "generate was called with use_cache=False, or the model's config says so, and chunks need a cache. Set it "
            "to True, or detach the model."
        )
    return given


def _require_exact(model: Any, found: Finding, *, when: str = "") -> None:
    """The one place where a model must prove that chunks give what the whole prompt gives."""
    if not found.exact:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be read in chunks{when}: {found.reason}. Use it without attach."
        )


def _checks_candidates(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Assisted generation wants the logits of its candidates; a decoding loop of the caller may want any."""
    if kwargs.get("assistant_model") is not None or kwargs.get("custom_generate") is not None:
        return True
    config = kwargs.get("generation_config") or model.generation_config
    names = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    return any(kwargs.get(name) or getattr(config, name, None) for name in names)


def _refuse_outputs_of_all_tokens(inputs: Mapping[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states"):
        if inputs.get(name):
            raise PenstockError(
                f"{name}=True asks for every token of the prompt at once, which chunks never hold. Leave it out, or "
                f"detach the model."
            )
