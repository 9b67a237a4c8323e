"""What callers give becomes a request here, or is refused before any work."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import EngineConfig, parse_chunk_size
from penstock.engine.feed import TokenFeed
from penstock.engine.loading import LoadedModel
from penstock.engine.prompts import Prompt, PromptReader
from penstock.engine.step_memory import StepMemory
from penstock.errors import InvalidPrompt, InvalidSetting, PromptTooLong
from penstock.lanes.lane import Asked, LanePrompt, PromptLimits
from penstock.plan.prompt_plan import PromptPlan, plan_prompt
from penstock.request import Request, SamplingParams, Span
from penstock.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    request: Request
    feed: TokenFeed | None  # None: the prompt is not streamed
    prompt: LanePrompt
    notes: tuple[str, ...]  # what had to be done to the prompt before it could be read


class Intake:
    def __init__(self, model: LoadedModel, config: EngineConfig, scheduler: Scheduler, memory: StepMemory) -> None:
        self._model = model
        self._config = config
        self._scheduler = scheduler
        self._memory = memory
        self._lane = model.lane.facts
        self.prompts = PromptReader(
            tokenizer=model.tokenizer,
            vocab_size=model.spec.vocab_size,
            template=model.chat_template,
            bos_token=model.bos_token,
            reads_images=self._lane.reads_images,
            is_text_part=bool(self._lane.why_text_only),
            needs_length=model.spec.depends_on_prompt_length or config.strict or self._lane.reads_whole,
            refuse_too_long=self.refuse_too_long,
            capacity=scheduler.capacity,
        )

    def take(
        self,
        request_id: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        images: Sequence[Any],
        answer_start: str | Sequence[int],
        chunk_size: int | str | None,
        priority: int,
        deadline_s: float | None,
        scope: str,
        forks: Sequence[int],
    ) -> Admitted:
        config, _ = self._config_of(chunk_size)
        self._refuse_impossible(params)
        notes = prompt.adjustments if isinstance(prompt, TokenFeed) else ()
        if isinstance(prompt, TokenFeed) and self._lane.reads_more_than_tokens:
            prompt = prompt.take_all(self.refuse_too_long)
        feed = prompt if isinstance(prompt, TokenFeed) else None
        read = self._lane_prompt(prompt, images, answer_start, scope)
        num_tokens = read.num_tokens if feed is None else feed.num_total or 0
        if params.prompt_logprobs is not None and read.why_no_logprobs:
            raise InvalidSetting(read.why_no_logprobs)
        if self._config.strict and num_tokens:
            self.plan(num_tokens, read.atomic, chunk_size=chunk_size)  # refuses before any work
        self._refuse_past_spans(read.atomic)
        if self._lane.reads_whole:
            self._refuse_past_whole(num_tokens)
        now = time.perf_counter()
        request = Request(
            id=request_id,
            prompt=() if read.is_encoding else read.positions,  # else they follow when its images are encoded
            sampling=params,
            arrived_at=now,
            prompt_is_complete=feed is None and not read.is_encoding,
            rotary=self._model.spec.rotary_variant(num_tokens),
            scope=scope,
            priority=priority,
            deadline_at=None if deadline_s is None else now + deadline_s,
            source=read.source,
            atomic_spans=read.atomic,
            chunk_size=None if chunk_size is None else config.most_prompt_tokens,
            num_announced=num_tokens if read.source is None else 0,
            forks=tuple(forks),
        )
        return Admitted(request=request, feed=feed, prompt=read, notes=notes)

    def _lane_prompt(
        self, prompt: Prompt, images: Sequence[Any], answer_start: str | Sequence[int], scope: str
    ) -> LanePrompt:
        """The prompt as the lane reads it; images are encoded in the steps before."""
        free_bytes = self._memory.budget_bytes - self._model.memory.fixed_bytes(self._scheduler.resident_tokens)
        limits = PromptLimits(refuse_too_long=self.refuse_too_long, free_bytes=free_bytes)
        ask = self.prompts.ask(prompt, images, answer_start)
        if not (ask.tokens or ask.images or isinstance(prompt, TokenFeed)):
            raise InvalidPrompt("The prompt is empty: it has 0 tokens. Give at least 1.")
        return self._model.lane.prompt(dataclasses.replace(ask, scope=scope), limits)

    def read(self, prompt: Prompt, images: Sequence[Any], answer_start: str | Sequence[int]) -> Asked:
        """Reads a prompt as far as no step is concerned, in any thread: texts are encoded, images opened and scaled."""
        return self._model.lane.read(self.prompts.ask(prompt, images, answer_start))

    def num_tokens(self, prompt: Prompt) -> int:
        return self._lane_prompt(prompt, (), "", "").num_tokens

    def plan(self, prompt_tokens: int, atomic: tuple[Span, ...], *, chunk_size: int | str | None) -> PromptPlan:
        config, adjustments = self._config_of(chunk_size)
        capacity = min(self._scheduler.capacity, self._model.lane.max_prompt or self._scheduler.capacity)
        plan = plan_prompt(
            self._model.memory,
            prompt_tokens,
            config,
            self._memory.budget_bytes,
            capacity,
            is_source=self._lane.reads_source,
            is_whole=self._lane.reads_whole,
            atomic=atomic,
        )
        return dataclasses.replace(plan, adjustments=(*adjustments, *plan.adjustments))

    def refuse_too_long(self, num_tokens: int, *, is_all: bool = True) -> None:
        self._model.lane.refuse_too_long(num_tokens, is_all=is_all)
        self._scheduler.refuse_too_long(num_tokens, is_all=is_all)

    def _config_of(self, chunk_size: int | str | None) -> tuple[EngineConfig, tuple[str, ...]]:
        """Finds (the settings that a request with that chunk size runs under, what had to be changed)."""
        if chunk_size is None:
            return self._fitting(self._config), ()
        asked = self._fitting(dataclasses.replace(self._config, chunk_size=parse_chunk_size(chunk_size)))
        if not self._lane.reads_whole or asked.chunk_size == 0:
            return asked, ()
        message = f"chunk size {chunk_size} is the whole prompt: {self._lane.reason}"
        self._config.refuse_if_strict(message, "Leave the chunk size out.")
        return self._config, (message,)

    def _fitting(self, config: EngineConfig) -> EngineConfig:
        """Makes chunks as small as they have to be since a step did not fit into the memory."""
        most, asked = self._scheduler.budget.most, config.most_prompt_tokens
        if not most or 0 < asked <= most:
            return config
        size = {"chunk_size": most} if config.chunk_size is not None else {"max_chunk_size": most}
        min_chunk_size = min(config.min_chunk_size, most)
        return dataclasses.replace(
            config, **size, min_chunk_size=min_chunk_size, overlap=min(config.overlap, most // 2)
        )

    def _refuse_impossible(self, params: SamplingParams) -> None:
        if params.pooling is not None and not self._lane.gives_hidden:
            raise InvalidSetting(f"The lane {self._lane.id} gives no hidden states, so that no embedding can be made.")
        limit = self._model.spec.vocab_size - 1
        if wrong := next((token for token, _ in params.logit_bias if not 0 <= token <= limit), None):
            raise InvalidSetting(f"logit_bias names token {wrong}; token ids are whole numbers from 0 to {limit}.")

    def _refuse_past_spans(self, spans: Sequence[Span]) -> None:
        """An image that sees itself is read in one piece, which has to fit."""
        for span in spans:
            num_tokens = span.end - span.start
            budget = self._memory.budget_bytes
            allowed = self._model.memory.largest_chunk(start=span.start, budget_bytes=budget, upper=num_tokens)
            if allowed < num_tokens:
                raise PromptTooLong(
                    f"Tokens {span.start} to {span.end} are an image that is read in one piece of {num_tokens}; the "
                    f"memory budget allows {allowed}. Scale it down or raise --memory."
                )

    def _refuse_past_whole(self, num_tokens: int) -> None:
        """A prompt that must be read whole has to fit whole."""
        self._scheduler.refuse_too_long(num_tokens)
        budget = self._memory.budget_bytes
        allowed = self._model.memory.largest_chunk(start=0, budget_bytes=budget, upper=num_tokens)
        if allowed < num_tokens:
            enough = self._memory.budget_for(num_tokens)
            raise PromptTooLong(
                f"The prompt has {num_tokens} tokens and this model must read it whole ({self._lane.reason}); the "
                f"memory budget allows {allowed}. Shorten it or raise --memory to {enough}."
            )
