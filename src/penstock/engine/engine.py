"""The engine: requests go in, steps run, events come out."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.cache.states import StatePool
from penstock.config import DEFAULT_MODEL, EngineConfig, PrefillPriority, load_config, parse_chunk_size
from penstock.engine.active import Active, Choice
from penstock.engine.calibration import calibrate
from penstock.engine.feed import TokenFeed
from penstock.engine.grammar import Grammars
from penstock.engine.loading import LoadedModel, load_model, return_freed_memory
from penstock.engine.media_prompts import refuse_media
from penstock.engine.prompts import Message, PromptReader
from penstock.engine.runner import Runner, StepLogits
from penstock.engine.sampler import Sampler
from penstock.engine.stopping import StopText
from penstock.errors import InvalidMedia, InvalidPrompt, InvalidSetting, PenstockError, PromptTooLong
from penstock.lanes.lane import LaneFacts
from penstock.lanes.media import MediaPrompt
from penstock.lanes.media_intake import PromptLimits
from penstock.plan.machine import peak_resident_bytes
from penstock.plan.prompt_plan import PromptPlan, plan_prompt
from penstock.prompt.source import TextPart
from penstock.request import (
    ChunkRecord,
    Failed,
    Finished,
    FinishReason,
    Output,
    PrefillProgress,
    Request,
    SamplingParams,
    Span,
    StepPlan,
    StepResult,
    Token,
)
from penstock.schedule.budget import TokenBudget
from penstock.schedule.scheduler import Limits, Scheduler

Event = PrefillProgress | Token | Failed | Finished
# A text, token ids, chat messages, or a feed that is still being read.
Prompt = str | Sequence[int] | Sequence[Message] | TokenFeed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A step that runs, or waits on the device for the one before it."""

    plan: StepPlan
    logits: StepLogits
    started_at: float


class Engine:
    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        if model.source is not None:
            # States of a source depend on all of it: no part is shared or computed twice.
            config = dataclasses.replace(config, overlap=0, prefix_cache=False)

        if model.lane.facts.reads_whole:
            config = dataclasses.replace(config, chunk_size=0, overlap=0)
        self.model = model
        self.config = config
        self.adjustments = list(model.adjustments)
        pool = BlockPool(model.num_blocks)
        memory = model.memory
        self.states = None
        if memory.shape.state_bytes:
            num_running, num_checkpoints = memory.num_running_states, memory.num_checkpoints
            self.states = StatePool(num_running=num_running, num_checkpoints=num_checkpoints)
        self.scheduler = Scheduler(
            limits=Limits(
                block_size=config.block_size,
                max_context=model.max_context,
                max_running=min(config.max_running, memory.num_running_states or config.max_running),
                overlap=0 if self.states or not model.lane.facts.shares_prefixes else config.overlap,
                priority=config.priority,
                max_waiting=config.max_waiting,
                max_waiting_tokens=config.max_waiting_tokens,
                reads_whole=model.lane.facts.reads_whole,
            ),
            budget=TokenBudget(
                ceiling=_ceiling(config),
                floor=config.floor,
                target_s=None if config.latency_target_ms is None else config.latency_target_ms / 1e3,
            ),
            pool=pool,
            prefix=PrefixCache(pool) if config.prefix_cache and model.lane.facts.shares_prefixes else None,
            model_identity=model.identity,
            chunk_limit=self._chunk_limit,
            peak_estimate=self._peak_estimate,
            states=self.states,
        )
        self.prompts = PromptReader(
            tokenizer=model.tokenizer,
            template=model.chat_template,
            needs_length=model.spec.depends_on_prompt_length or config.strict or model.lane.facts.reads_whole,
            refuse_too_long=self._refuse_too_long,
            capacity=self.scheduler.capacity,
        )
        self.grammars = Grammars(model.tokenizer, vocab_size=model.spec.vocab_size, eos_ids=model.eos_ids)
        self._runner = Runner(model.lane, model.device)
        # A GPU is given the next step while it computes one. A CPU has nothing to overlap.
        runs_ahead = model.device.type == "cuda" and model.source is None and model.media is None
        self.most_in_flight = 2 if runs_ahead else 1
        self._flights: deque[_Flight] = deque()
        self._active: dict[int, Active] = {}
        self._mailboxes: dict[int, deque[Event]] = {}  # of the requests that somebody follows
        self._new_events: list[Event] = []
        self._next_id = 0
        self._is_closed = False
        self.on_plan: Callable[[StepPlan], None] | None = None
        self.on_step: Callable[[StepPlan, StepResult], None] | None = None
        if config.latency_target_ms is not None:
            self.scheduler.budget.cost = calibrate(self)

    @classmethod
    def load(cls, model: str = DEFAULT_MODEL, **settings: Any) -> Engine:
        """`settings` are the fields of EngineConfig; sizes may be strings such as "2GiB"."""
        config = load_config(settings)
        return cls(load_model(model, config), config)

    def close(self) -> None:
        """Ends what runs and gives the memory back. The engine cannot be used afterwards."""
        if self._is_closed:
            return
        for request_id in list(self._active):
            self.abort(request_id)
        while self._flights:
            self._land()
        self._is_closed = True
        self.scheduler.check()
        del self.model, self._runner, self.prompts
        return_freed_memory()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """Has `encode(text, add_special_tokens=...)`, `decode(ids)`, `stream(pieces, ...)` and `streaming`."""
        return self.model.tokenizer

    @property
    def lane(self) -> LaneFacts:
        """The facts of the lane that runs the model."""
        return self.model.lane.facts

    def plan(
        self, prompt_tokens: int, atomic_spans: tuple[Span, ...] = (), *, chunk_size: int | str | None = None
    ) -> PromptPlan:
        """What a prompt of that length would cost in this engine. `atomic_spans`: of media that are read whole.

        `chunk_size`: of the request; None: the engine's.
        """
        model = self.model
        config, own_adjustments = self._config_of(chunk_size)
        source, capacity = model.source, self.scheduler.capacity
        plan = plan_prompt(
            model.memory,
            prompt_tokens,
            config,
            model.budget_bytes,
            capacity if source is None else min(capacity, source.max_source),
            is_source=source is not None,
            is_whole=self.lane.reads_whole,
            atomic=atomic_spans,
        )
        return dataclasses.replace(plan, adjustments=(*self.adjustments, *own_adjustments, *plan.adjustments))

    def _config_of(self, chunk_size: int | str | None) -> tuple[EngineConfig, tuple[str, ...]]:
        """(the settings that a request with that chunk size runs under, what had to be changed)."""
        if chunk_size is None:
            return self.config, ()
        asked = dataclasses.replace(self.config, chunk_size=parse_chunk_size(chunk_size))
        if not self.lane.reads_whole or asked.chunk_size == 0:
            return asked, ()
        message = f"chunk size {chunk_size} is the whole prompt: {self.lane.reason}"
        if self.config.strict:
            raise InvalidSetting(f"--strict: {message}. Leave the chunk size out.")
        return self.config, (message,)

    def generate(self, prompt: Prompt, **sampling: Any) -> Output:
        """Runs one request to its end."""
        for event in self.stream(prompt, **sampling):
            if isinstance(event, Finished):
                return event.output
        raise AssertionError("a stream ends with Finished")

    def generate_batch(self, prompts: Iterable[Prompt], **sampling: Any) -> list[Output]:
        """Runs the prompts together; each step carries chunks of many."""
        ids: list[int] = []
        outputs: dict[int, Output] = {}
        try:
            for prompt in prompts:
                ids.append(self.submit(prompt, **sampling))  # noqa: PERF401 - a refusal must find the earlier ones
            while len(outputs) < len(ids):
                for event in self.step():
                    if isinstance(event, Failed) and event.request_id in ids:
                        raise event.error
                    if isinstance(event, Finished) and event.request_id in ids:
                        outputs[event.request_id] = event.output
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [outputs[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[Event]:
        """Progress, tokens and the end of one request, which begins with the first `next`. Closing cancels it."""
        yield from self.events(self.submit(prompt, **sampling))

    def events(self, request_id: int) -> Iterator[Event]:
        """What happens to a submitted request from now on, running steps as they are needed. Closing cancels it."""
        mailbox = self._mailboxes[request_id] = deque()
        try:
            while True:
                while mailbox:
                    event = mailbox.popleft()
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
                    if isinstance(event, Finished):
                        return
                self.step()
        finally:
            del self._mailboxes[request_id]
            self.abort(request_id)

    def submit(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] = (),
        answer_start: str | Sequence[int] = (),
        chunk_size: int | str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> int:
        """Queues a request; `step` or `events` brings it forward. It ends unfinished when its deadline passes.

        An image is a path, the bytes of a file, or a PIL image. `answer_start`: text or tokens that the answer of an
        encoder-decoder model begins with; they are read, not written. `chunk_size` is this prompt's own, in place of
        the engine's; 0 reads it whole, "auto" leaves it to the memory model.
        """
        if self._is_closed:
            raise InvalidSetting("The engine is closed. Load it again.")
        config, _ = self._config_of(chunk_size)
        params = SamplingParams.of(sampling)
        self._refuse_impossible(params)
        if isinstance(prompt, TokenFeed) and (self.model.source is not None or self.model.media is not None):
            prompt = prompt.take_all(self._refuse_too_long)
        media = self._media_prompt(prompt, images)
        feed = prompt if isinstance(prompt, TokenFeed) else None
        if media is not None:
            tokens = tuple(media.input_ids[0].tolist())
        else:
            tokens = () if isinstance(prompt, TokenFeed) else tuple(self._encode(prompt))
        if feed is None and not tokens:
            raise InvalidPrompt("The prompt is empty: it has 0 tokens. Give at least 1.")
        num_tokens = len(tokens) if feed is None else feed.num_total or 0
        has_images = media is not None and (media.features is not None or media.encoding is not None)
        if has_images and params.prompt_logprobs is not None:
            raise InvalidSetting("The tokens of an image have no log-probabilities. Leave prompt_logprobs out.")
        atomic_spans = () if media is None else media.atomic
        if self.config.strict and num_tokens:
            self.plan(num_tokens, atomic_spans, chunk_size=chunk_size)  # refuses before any work
        self._refuse_past_spans(atomic_spans)
        source = None
        if self.model.source is not None:
            self._refuse_too_long(num_tokens)
            if params.prompt_logprobs is not None:
                raise InvalidSetting("An encoder gives its source no log-probabilities. Leave prompt_logprobs out.")
            tokens, source = self.model.source.prompt(tokens, self._start_tokens(answer_start))
        elif answer_start:
            raise InvalidSetting("answer_start is for encoder-decoder models. Give it as part of the prompt.")
        if self.lane.reads_whole:
            self._refuse_past_whole(num_tokens)
        is_ready = media is None or media.encoding is None  # else its tokens follow when its images are encoded
        request = Request(
            id=self._next_id,
            prompt=tokens if is_ready else (),
            sampling=params,
            arrived_at=time.perf_counter(),
            prompt_is_complete=feed is None and is_ready,
            rotary=self.model.spec.rotary_variant(num_tokens),
            priority=priority,
            deadline_at=None if deadline_s is None else time.perf_counter() + deadline_s,
            source=source,
            atomic_spans=atomic_spans,
            chunk_size=None if chunk_size is None else _ceiling(config),
        )
        grammar = None if params.grammar is None else self.grammars.matcher(params.grammar)
        self.scheduler.submit(request)
        self._next_id += 1
        self._active[request.id] = Active(
            request=request,
            feed=feed,
            sampler=Sampler(params, eos_ids=self.model.eos_ids, grammar=grammar),
            detokenizer=self.tokenizer.detokenizer(),
            stop=StopText(params.stop),
            media=media,
        )
        self._expect_media(request.id)
        return request.id

    def abort(self, request_id: int) -> None:
        """Cancels within one chunk; computed blocks stay in the prefix cache, so an equal prompt resumes there."""
        if request_id in self.scheduler.sequences:
            self.scheduler.abort(request_id)
            while self._flights and request_id in self.scheduler.sequences:
                self._land()
            self._collect_ended()

    def step(self) -> list[Event]:
        """One step for all requests; returns what happened since the last one."""
        self.scheduler.expire(time.perf_counter())
        self._collect_ended()
        while len(self._flights) < self.most_in_flight and self._launch():
            pass
        if self._flights:
            self._land()
        else:
            is_stuck = any(not sequence.is_paused for sequence in self.scheduler.sequences.values())
            is_encoding = any(active.is_encoding for active in self._active.values())
            assert is_encoding or not is_stuck, "requests wait and none can run"
        return self._take_events()

    def _launch(self) -> bool:
        """Plans a step and hands it to the device; False when nothing can run before another has landed."""
        self._encode_images()
        self._feed_prompts()
        plan = self.scheduler.next_step()
        if plan is None:
            return False
        started_at = time.perf_counter()
        try:
            if self.on_plan is not None:
                self.on_plan(plan)
            for request_id in plan.preempted:
                self.model.lane.release(request_id)
                self._expect_media(request_id)
            logits = self._runner.run(plan, self.scheduler.sequences)
        except BaseException:
            self.scheduler.fail(plan.step)
            raise
        self._flights.append(_Flight(plan=plan, logits=logits, started_at=started_at))
        return True

    def _land(self) -> None:
        """Waits for the first step in flight, and takes what it gave."""
        flight = self._flights.popleft()
        plan = flight.plan
        try:
            chosen = self._choose_tokens(plan, flight.logits)
        except BaseException:
            self._flights.clear()
            self.scheduler.fail(plan.step)
            raise
        # What is launched early waits for the step before it; the host may learn late that a step is done.
        landed_at = time.perf_counter()
        elapsed_s = flight.logits.device_seconds()
        started_at = flight.started_at if elapsed_s is None else landed_at - elapsed_s
        result = StepResult(
            step=plan.step,
            token_by_sequence={request_id: choice.token for request_id, choice in chosen.items()},
            finished={request_id: choice.finish for request_id, choice in chosen.items() if choice.finish},
            elapsed_s=landed_at - started_at,
            peak_bytes=peak_resident_bytes(),
        )
        self.scheduler.apply(result)
        self._record(plan, result, started_at)
        for request_id, choice in chosen.items():
            self._emit(choice.event)
            if choice.finish:
                self._finish(request_id, choice.finish)
        self._collect_ended()
        if self.on_step is not None:
            self.on_step(plan, result)
        if not self.scheduler.has_work:
            self.scheduler.check()

    def set_priority(self, priority: PrefillPriority) -> None:
        """How steps are shared from now on."""
        self.scheduler.set_priority(priority)

    def chat_feed(self, parts: Sequence[TextPart], *, system: str | None = None) -> TokenFeed:
        """One user message made of the parts, to be streamed: pass it to `stream` or `submit` as the prompt."""
        if self.model.media is not None and self.model.chat_template is not None:
            return self.model.media.chat_feed(parts, system=system)
        return self.prompts.chat_feed(parts, system=system)

    def _encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return self.prompts.text_tokens(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            messages = [item for item in prompt if isinstance(item, Mapping)]
            if len(messages) == len(prompt):
                return self.prompts.message_tokens(messages)
        size = self.model.spec.vocab_size
        tokens = [item for item in prompt if isinstance(item, int) and 0 <= item < size]
        if len(tokens) < len(prompt):
            wrong = next(item for item in prompt if item not in tokens)
            raise InvalidPrompt(f"The prompt holds {wrong!r}; token ids are whole numbers from 0 to {size - 1}.")
        return tokens

    def _refuse_impossible(self, params: SamplingParams) -> None:
        if params.pooling is not None and not self.lane.gives_hidden:
            raise InvalidSetting(f"The lane {self.lane.id} gives no hidden states, so that no embedding can be made.")
        limit = self.model.spec.vocab_size - 1
        if wrong := next((token for token, _ in params.logit_bias if not 0 <= token <= limit), None):
            raise InvalidSetting(f"logit_bias names token {wrong}; token ids are whole numbers from 0 to {limit}.")

    def _start_tokens(self, answer_start: str | Sequence[int]) -> list[int]:
        if isinstance(answer_start, str):
            return self.tokenizer.encode(answer_start, add_special_tokens=False)
        return self._encode(answer_start)

    def _media_prompt(self, prompt: Any, images: Sequence[Any]) -> MediaPrompt | None:
        """The prompt as the lane reads it, where that reads images; they are encoded in the steps before it is read."""
        reader = self.model.media
        if reader is None:
            refuse_media(prompt, images, self.lane.id)
            return None
        free_bytes = self.model.budget_bytes - self.model.memory.fixed_bytes(self.scheduler.resident_tokens)
        limits = PromptLimits(refuse_too_long=self._refuse_too_long, free_bytes=free_bytes)
        read = reader.read(prompt, images, limits)
        if isinstance(read, MediaPrompt):
            return read
        tokens = self._encode(read)
        return reader.lane.text_prompt(tokens) if tokens else None

    def _expect_media(self, request_id: int) -> None:
        media, reader = self._active[request_id].media, self.model.media
        if media is not None and reader is not None:
            reader.lane.expect(request_id, media)

    def _refuse_past_spans(self, spans: Sequence[Span]) -> None:
        """An image that sees itself is read in one piece, which has to fit."""
        for span in spans:
            num_tokens = span.end - span.start
            budget = self.model.budget_bytes
            allowed = self.model.memory.largest_chunk(start=span.start, budget_bytes=budget, upper=num_tokens)
            if allowed < num_tokens:
                raise PromptTooLong(
                    f"Tokens {span.start} to {span.end} are an image that is read in one piece of {num_tokens}; the "
                    f"memory budget allows {allowed}. Scale it down or raise --memory."
                )

    def _encode_images(self) -> None:
        """One call of an encoder per step, so that running streams wait for no more than that."""
        request_id, media = next(
            ((request_id, active.media) for request_id, active in self._active.items() if active.is_encoding),
            (0, None),
        )
        if media is None:
            return
        try:
            media.encode_next()
            if media.encoding is None:
                tokens = media.input_ids[0].tolist()
                return_freed_memory()  # the encoder's, so that it is not held beside a chunk's
                self.scheduler.extend_prompt(request_id, tokens, is_last=True, media_keys=media.media_keys)
        except Exception as error:  # of a tower that runs out of memory, say: only who asked is to know
            own = error if isinstance(error, PenstockError) else InvalidMedia(f"The images cannot be encoded: {error}")
            self._emit(Failed(request_id=request_id, error=own))
            self.abort(request_id)

    def _feed_prompts(self) -> None:
        """Reads streamed prompts just far enough for the next chunk."""
        for sequence in list(self.scheduler.sequences.values()):
            active = self._active.get(sequence.id)
            if active is None or sequence.prompt_is_complete or active.media is not None or sequence.is_leaving:
                continue
            feed = active.feed
            assert feed is not None
            own = sequence.request.chunk_size
            ceiling = self.scheduler.budget.ceiling if own is None else own
            wanted = max(ceiling, self.config.block_size) + 1
            num_ahead = len(sequence.tokens) - sequence.num_scheduled
            if ceiling == 0:
                wanted = self.scheduler.capacity
            if num_ahead < wanted:
                try:
                    tokens, is_last = feed.take(wanted - num_ahead)
                    if is_last and not feed.num_given:
                        raise InvalidPrompt("The prompt is empty: what was read has 0 tokens. Give at least 1.")
                    self.scheduler.extend_prompt(sequence.id, tokens, is_last=is_last)
                except PenstockError as error:
                    self._emit(Failed(request_id=sequence.id, error=error))
                    self.abort(sequence.id)

    def _choose_tokens(self, plan: StepPlan, logits: StepLogits) -> dict[int, Choice]:
        likeliest = logits.likeliest_tokens()
        chosen: dict[int, Choice] = {}
        for chunk in plan.chunks:
            sequence = self.scheduler.sequences[chunk.sequence_id]
            if sequence.is_leaving:
                continue
            active = self._active[sequence.id]
            rows = logits[sequence.id]
            if active.request.sampling.prompt_logprobs is not None and not active.token_ids:
                active.note_prompt_logprobs(sequence.tokens, sequence.num_computed, rows)
            if sequence.id in logits.pooled and not active.token_ids:
                active.note_pooled(logits.pooled[sequence.id], is_first=sequence.num_computed == 0)
            if chunk.wants_logits:
                token = likeliest[sequence.id]
                if not active.request.sampling.is_likeliest:
                    prompt = sequence.tokens[sequence.request.first_decoder_position : sequence.num_prompt_tokens]
                    token = active.sampler.sample(rows[-1], prompt, active.token_ids)
                is_full = self._is_full(active, len(sequence.tokens) + 1)
                logprob = active.sampler.logprob(rows[-1], token)
                is_end = token in self.model.eos_ids
                chosen[sequence.id] = active.choose(token, logprob, is_end=is_end, is_full=is_full)
        return chosen

    def _is_full(self, active: Active, num_tokens: int) -> bool:
        request = active.request
        if request.source is not None and (limit := request.source.max_answer_tokens) is not None:
            return num_tokens - request.source.num_positions >= limit
        return request.num_slots(num_tokens) >= self.scheduler.capacity

    def _refuse_too_long(self, num_tokens: int) -> None:
        if self.model.source is not None:
            self.model.source.refuse_too_long(num_tokens)
        self.scheduler.refuse_too_long(num_tokens)

    def _record(self, plan: StepPlan, result: StepResult, started_at: float) -> None:
        """Times and progress of the step's chunks, read from the plan and the result."""
        now = started_at + result.elapsed_s
        for chunk in plan.chunks:
            active = self._active.get(chunk.sequence_id)
            if active is None:  # its answer ended before this step
                continue
            active.predicted_bytes = max(active.predicted_bytes, plan.predicted_bytes)
            if active.started_at is None:
                active.started_at = started_at
                active.num_cached = chunk.num_cached
            if active.first_token_at is None:
                active.chunks.append(ChunkRecord(start=chunk.start, end=chunk.end, ms=result.elapsed_s * 1e3))
                active.num_computed = max(active.num_computed, chunk.end)
                self._emit(active.progress(chunk, now))
            if chunk.wants_logits and active.first_token_at is None:
                active.first_token_at = now

    def _emit(self, event: Event) -> None:
        self._new_events.append(event)
        if event.request_id in self._mailboxes:
            self._mailboxes[event.request_id].append(event)

    def _take_events(self) -> list[Event]:
        events, self._new_events = self._new_events, []
        return events

    def _collect_ended(self) -> None:
        for request_id, reason in self.scheduler.take_ended():
            self._finish(request_id, reason)

    def _finish(self, request_id: int, reason: FinishReason) -> None:
        self.model.lane.release(request_id)
        output = self._active.pop(request_id).output(reason, time.perf_counter())
        self._emit(Finished(request_id=request_id, output=output))

    def _chunk_limit(self, start: int, resident_tokens: int, wanted: int) -> int:
        allowed = self.model.memory.largest_chunk(
            start=start,
            budget_bytes=self.model.budget_bytes,
            upper=wanted,
            resident_tokens=resident_tokens,
            capacity_tokens=self.model.num_blocks * self.config.block_size,
            state_slots=self._resident_states,
        )
        if allowed < wanted and self.config.strict and self.config.chunk_size is not None:
            raise InvalidSetting(
                f"--strict: after {start} tokens the memory budget allows a chunk of {allowed}, not {wanted}. "
                "Raise --memory or lower --chunk-size."
            )
        return allowed

    def _peak_estimate(self, chunk: int, context: int, resident_tokens: int) -> int:
        return self.model.memory.peak_bytes(
            chunk=chunk, context=context, resident_tokens=resident_tokens, state_slots=self._resident_states
        )

    @property
    def _resident_states(self) -> int:
        return self.states.high_water if self.states is not None else 0

    def _refuse_past_whole(self, num_tokens: int) -> None:
        """A prompt that must be read whole has to fit whole."""
        self.scheduler.refuse_too_long(num_tokens)
        allowed = self.model.memory.largest_chunk(start=0, budget_bytes=self.model.budget_bytes, upper=num_tokens)
        if allowed < num_tokens:
            raise PromptTooLong(
                f"The prompt has {num_tokens} tokens and this model must read it whole ({self.lane.reason}); the "
                f"memory budget allows {allowed}. Shorten it or raise --memory."
            )


def _ceiling(config: EngineConfig) -> int:
    """The most prompt tokens of a step; 0: no limit."""
    return config.max_chunk_size if config.chunk_size is None else config.chunk_size
