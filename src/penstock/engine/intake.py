"""What callers give becomes a request here, or is refused before any work."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import EngineConfig, parse_chunk_size
from penstock.engine.feed import TokenFeed
from penstock.engine.loading import LoadedModel
from penstock.engine.media_prompts import refuse_media
from penstock.engine.prompts import Message, PromptReader
from penstock.engine.step_memory import StepMemory
from penstock.errors import InvalidPrompt, InvalidSetting, PromptTooLong
from penstock.lanes.media import MediaPrompt
from penstock.lanes.media_intake import PromptLimits
from penstock.plan.prompt_plan import PromptPlan, plan_prompt
from penstock.request import Request, SamplingParams, SourceReading, Span
from penstock.schedule.scheduler import Scheduler

# A text, token ids, chat messages, or a feed that is still being read.
Prompt = str | Sequence[int] | Sequence[Message] | TokenFeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    request: Request
    feed: TokenFeed | None  # None: the prompt is not streamed
    media: MediaPrompt | None  # None: the lane reads text only


class Intake:
    def __init__(self, model: LoadedModel, config: EngineConfig, scheduler: Scheduler, memory: StepMemory) -> None:
        self._model = model
        self._config = config
        self._scheduler = scheduler
        self._memory = memory
        self._lane = model.lane.facts
        self.prompts = PromptReader(
            tokenizer=model.tokenizer,
            template=model.chat_template,
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
    ) -> Arrival:
        config, _ = self._config_of(chunk_size)
        self._refuse_impossible(params)
        model = self._model
        if isinstance(prompt, TokenFeed) and (model.source is not None or model.media is not None):
            prompt = prompt.take_all(self.refuse_too_long)
        media = self._media_prompt(prompt, images)
        feed = prompt if isinstance(prompt, TokenFeed) else None
        tokens = self._tokens(prompt, media)
        num_tokens = len(tokens) if feed is None else feed.num_total or 0
        atomic_spans = () if media is None else media.atomic
        self._refuse_logprobs(params, media)
        if self._config.strict and num_tokens:
            self.plan(num_tokens, atomic_spans, chunk_size=chunk_size)  # refuses before any work
        self._refuse_past_spans(atomic_spans)
        tokens, source = self._with_source(tokens, num_tokens, answer_start)
        if self._lane.reads_whole:
            self._refuse_past_whole(num_tokens)
        is_ready = media is None or media.encoding is None  # else its tokens follow when its images are encoded
        now = time.perf_counter()
        request = Request(
            id=request_id,
            prompt=tokens if is_ready else (),
            sampling=params,
            arrived_at=now,
            prompt_is_complete=feed is None and is_ready,
            rotary=model.spec.rotary_variant(num_tokens),
            priority=priority,
            deadline_at=None if deadline_s is None else now + deadline_s,
            source=source,
            atomic_spans=atomic_spans,
            chunk_size=None if chunk_size is None else config.most_prompt_tokens,
            num_announced=num_tokens if source is None else 0,
        )
        return Arrival(request=request, feed=feed, media=media)

    def plan(self, prompt_tokens: int, atomic: tuple[Span, ...], *, chunk_size: int | str | None) -> PromptPlan:
        config, adjustments = self._config_of(chunk_size)
        source, capacity = self._model.source, self._scheduler.capacity
        plan = plan_prompt(
            self._model.memory,
            prompt_tokens,
            config,
            self._memory.budget_bytes,
            capacity if source is None else min(capacity, source.max_source),
            is_source=source is not None,
            is_whole=self._lane.reads_whole,
            atomic=atomic,
        )
        return dataclasses.replace(plan, adjustments=(*adjustments, *plan.adjustments))

    def known(self, tokens: list[int]) -> list[int]:
        """The tokens of a text, refused where the tokenizer has more than the model."""
        size = self._model.spec.vocab_size
        if tokens and max(tokens) >= size:
            raise InvalidPrompt(
                f"The tokenizer gives token {max(tokens)}; the model has {size}. Take both from the same model."
            )
        return tokens

    def refuse_too_long(self, num_tokens: int) -> None:
        if self._model.source is not None:
            self._model.source.refuse_too_long(num_tokens)
        self._scheduler.refuse_too_long(num_tokens)

    def _config_of(self, chunk_size: int | str | None) -> tuple[EngineConfig, tuple[str, ...]]:
        """(the settings that a request with that chunk size runs under, what had to be changed)."""
        if chunk_size is None:
            return self._fitting(self._config), ()
        asked = self._fitting(dataclasses.replace(self._config, chunk_size=parse_chunk_size(chunk_size)))
        if not self._lane.reads_whole or asked.chunk_size == 0:
            return asked, ()
        message = f"chunk size {chunk_size} is the whole prompt: {self._lane.reason}"
        if self._config.strict:
            raise InvalidSetting(f"--strict: {message}. Leave the chunk size out.")
        return self._config, (message,)

    def _fitting(self, config: EngineConfig) -> EngineConfig:
        """With chunks as small as they have to be since a step did not fit into the memory."""
        most, asked = self._scheduler.budget.most, config.most_prompt_tokens
        if not most or 0 < asked <= most:
            return config
        size = {"chunk_size": most} if config.chunk_size is not None else {"max_chunk_size": most}
        min_chunk_size = min(config.min_chunk_size, most)
        return dataclasses.replace(
            config, **size, min_chunk_size=min_chunk_size, overlap=min(config.overlap, most // 2)
        )

    def _tokens(self, prompt: Prompt, media: MediaPrompt | None) -> tuple[int, ...]:
        """None of a feed, which gives them while it is read."""
        if isinstance(prompt, TokenFeed):
            return ()
        tokens = tuple(self._encode(prompt) if media is None else media.input_ids[0].tolist())
        if not tokens:
            raise InvalidPrompt("The prompt is empty: it has 0 tokens. Give at least 1.")
        return tokens

    def _encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return self.known(self.prompts.text_tokens(prompt))
        if prompt and isinstance(prompt[0], Mapping):
            messages = [item for item in prompt if isinstance(item, Mapping)]
            if len(messages) == len(prompt):
                return self.known(self.prompts.message_tokens(messages))
        return self._known_ids(prompt)

    def _known_ids(self, prompt: Sequence[Any]) -> list[int]:
        size = self._model.spec.vocab_size
        # A long prompt is looked through without a line of Python for each token.
        if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < size:
            return list(prompt)
        for item in prompt:
            if not isinstance(item, int) or not 0 <= item < size:
                raise InvalidPrompt(f"The prompt holds {item!r}; token ids are whole numbers from 0 to {size - 1}.")
        return [int(item) for item in prompt]

    def _media_prompt(self, prompt: Any, images: Sequence[Any]) -> MediaPrompt | None:
        """The prompt as the lane reads it, where that reads images; they are encoded in the steps before it is read."""
        model, reader = self._model, self._model.media
        if reader is None:
            refuse_media(prompt, images, self._lane.id)
            return None
        free_bytes = self._memory.budget_bytes - model.memory.fixed_bytes(self._scheduler.resident_tokens)
        read = reader.read(prompt, images, PromptLimits(refuse_too_long=self.refuse_too_long, free_bytes=free_bytes))
        if isinstance(read, MediaPrompt):
            return read
        tokens = self._encode(read)
        return reader.lane.text_prompt(tokens) if tokens else None

    def _with_source(
        self, tokens: tuple[int, ...], num_tokens: int, answer_start: str | Sequence[int]
    ) -> tuple[tuple[int, ...], SourceReading | None]:
        """For an encoder-decoder model: (what its decoder begins with, after positions for the source; the source)."""
        source = self._model.source
        if source is None:
            if answer_start:
                raise InvalidSetting("answer_start is for encoder-decoder models. Give it as part of the prompt.")
            return tokens, None
        self.refuse_too_long(num_tokens)
        if isinstance(answer_start, str):
            start = self._model.tokenizer.encode(answer_start, add_special_tokens=False)
        else:
            start = self._encode(answer_start)
        return source.prompt(tokens, start)

    def _refuse_impossible(self, params: SamplingParams) -> None:
        if params.pooling is not None and not self._lane.gives_hidden:
            raise InvalidSetting(f"The lane {self._lane.id} gives no hidden states, so that no embedding can be made.")
        limit = self._model.spec.vocab_size - 1
        if wrong := next((token for token, _ in params.logit_bias if not 0 <= token <= limit), None):
            raise InvalidSetting(f"logit_bias names token {wrong}; token ids are whole numbers from 0 to {limit}.")

    def _refuse_logprobs(self, params: SamplingParams, media: MediaPrompt | None) -> None:
        if params.prompt_logprobs is None:
            return
        if media is not None and (media.features is not None or media.encoding is not None):
            raise InvalidSetting("The tokens of an image have no log-probabilities. Leave prompt_logprobs out.")
        if self._model.source is not None:
            raise InvalidSetting("An encoder gives its source no log-probabilities. Leave prompt_logprobs out.")

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
            raise PromptTooLong(
                f"The prompt has {num_tokens} tokens and this model must read it whole ({self._lane.reason}); the "
                f"memory budget allows {allowed}. Shorten it or raise --memory."
            )
