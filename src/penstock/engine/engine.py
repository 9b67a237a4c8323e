"""The engine: requests go in, steps run, events come out."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.config import DEFAULT_MODEL, EngineConfig, load_config
from penstock.engine.feed import TokenFeed
from penstock.engine.loading import LoadedModel, load_model
from penstock.engine.prompts import Message, PromptReader
from penstock.engine.runner import Runner
from penstock.engine.sampler import Sampler, token_logprob
from penstock.engine.stopping import StopText
from penstock.errors import InvalidPrompt, InvalidSetting
from penstock.lanes.lane import LaneFacts
from penstock.plan.machine import peak_resident_bytes, resident_bytes
from penstock.plan.prompt_plan import PromptPlan, plan_prompt
from penstock.prompt.source import TextPart
from penstock.prompt.tokens import Detokenizer
from penstock.request import (
    ChunkRecord,
    Finished,
    FinishReason,
    Output,
    PrefillProgress,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    Token,
    TokenLogprob,
)
from penstock.schedule.scheduler import Limits, Scheduler

Event = PrefillProgress | Token | Finished
# A text, token ids, chat messages, or a feed that is still being read.
Prompt = str | Sequence[int] | Sequence[Message] | TokenFeed


@dataclass(slots=True, kw_only=True)
class _Active:
    """What the engine keeps beside a running sequence: how its text is made, and its times."""

    request: Request
    feed: TokenFeed | None
    sampler: Sampler
    detokenizer: Detokenizer
    stop: StopText
    max_tokens: int
    events: deque[Event] = field(default_factory=deque)
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    chunks: list[ChunkRecord] = field(default_factory=list)
    num_cached: int = 0
    num_computed: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    predicted_bytes: int = 0


class Engine:
    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.model = model
        self.config = config
        self.adjustments = list(model.adjustments)
        pool = BlockPool(model.num_blocks)
        self.scheduler = Scheduler(
            limits=Limits(
                block_size=config.block_size,
                max_context=model.max_context,
                max_running=config.max_running,
                chunk_size=config.max_chunk_size if config.chunk_size is None else config.chunk_size,
                overlap=config.overlap,
            ),
            pool=pool,
            prefix=PrefixCache(pool) if config.prefix_cache else None,
            model_identity=model.identity,
            chunk_limit=self._chunk_limit,
            peak_estimate=self._peak_estimate,
        )
        self.prompts = PromptReader(
            tokenizer=model.tokenizer,
            template=model.chat_template,
            needs_length=model.spec.depends_on_prompt_length,
            refuse_too_long=self.scheduler.refuse_too_long,
            capacity=self.scheduler.capacity,
        )
        self._runner = Runner(model.lane, model.device)
        self._active: dict[int, _Active] = {}
        self._next_id = 0
        self._is_closed = False
        self.on_step: Callable[[StepPlan, StepResult], None] | None = None

    @classmethod
    def load(cls, model: str = DEFAULT_MODEL, **settings: Any) -> Engine:
        """`settings` are the fields of EngineConfig; sizes may be strings such as "2GiB"."""
        config = load_config(settings)
        return cls(load_model(model, config), config)

    def close(self) -> None:
        """Ends what runs and gives the memory back. The engine cannot be used afterwards."""
        for request_id in list(self._active):
            self.abort(request_id)
        self._is_closed = True
        self.scheduler.check()
        del self.model, self._runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def lane(self) -> LaneFacts:
        return self.model.lane.facts

    def plan(self, prompt_tokens: int) -> PromptPlan:
        """What a prompt of that length would cost in this engine."""
        model = self.model
        plan = plan_prompt(model.memory, prompt_tokens, self.config, model.budget_bytes, self.scheduler.capacity)
        return dataclasses.replace(plan, adjustments=(*self.adjustments, *plan.adjustments))

    def generate(self, prompt: Prompt, **sampling: Any) -> Output:
        for event in self.stream(prompt, **sampling):
            if isinstance(event, Finished):
                return event.output
        raise AssertionError("a stream ends with Finished")

    def generate_batch(self, prompts: Iterable[Prompt], **sampling: Any) -> list[Output]:
        """Runs the prompts together; each step carries chunks of many."""
        ids = [self.submit(prompt, **sampling) for prompt in prompts]
        outputs: dict[int, Output] = {}
        while len(outputs) < len(ids):
            for event in self.step():
                if isinstance(event, Finished):
                    outputs[event.request_id] = event.output
        for request_id in ids:
            self._active.pop(request_id, None)
        return [outputs[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[Event]:
        """Progress, tokens and the end of one request. Closing the iterator cancels it."""
        request_id = self.submit(prompt, **sampling)
        return self.events(request_id)

    def events(self, request_id: int) -> Iterator[Event]:
        """The events of a submitted request, running steps as they are needed."""
        active = self._active[request_id]
        try:
            while True:
                while active.events:
                    event = active.events.popleft()
                    yield event
                    if isinstance(event, Finished):
                        return
                self.step()
        finally:
            self.abort(request_id)
            self._active.pop(request_id, None)

    def submit(self, prompt: Prompt, **sampling: Any) -> int:
        """Queues a request; `step` or `events` brings it forward."""
        assert not self._is_closed, "the engine is closed"
        params = _sampling_params(sampling)
        feed = prompt if isinstance(prompt, TokenFeed) else None
        tokens = () if feed else tuple(self._encode(prompt))  # type: ignore[arg-type]
        if feed is None and not tokens:
            raise InvalidPrompt("The prompt is empty: it has 0 tokens. Give at least 1.")
        request = Request(
            id=self._next_id,
            prompt=tokens,
            sampling=params,
            arrived_at=time.perf_counter(),
            prompt_is_complete=feed is None,
            rotary=self.model.spec.rotary_variant((feed.num_total or 0) if feed else len(tokens)),
        )
        self.scheduler.submit(request)
        self._next_id += 1
        self._active[request.id] = _Active(
            request=request,
            feed=feed,
            sampler=Sampler(params),
            detokenizer=self.tokenizer.detokenizer(),
            stop=StopText(params.stop),
            max_tokens=params.max_tokens,
        )
        return request.id

    def abort(self, request_id: int) -> None:
        """Cancels within one chunk; computed blocks stay in the prefix cache, so an equal prompt resumes there."""
        if request_id in self.scheduler.sequences:
            self.scheduler.abort(request_id)
            self._collect_aborted()

    def step(self) -> list[Event]:
        """One step for all requests; returns the events that it caused."""
        self._feed_prompts()
        plan = self.scheduler.next_step()
        if plan is None:
            return []
        started_at = time.perf_counter()
        try:
            logits = self._runner.run(plan, self.scheduler.sequences)
            tokens, finished = self._choose_tokens(plan, logits)
            del logits
        except BaseException:
            self.scheduler.fail(plan.step)
            raise
        result = StepResult(
            step=plan.step,
            token_by_sequence=tokens,
            finished=finished,
            elapsed_s=time.perf_counter() - started_at,
            peak_bytes=peak_resident_bytes(),
        )
        events = self._record(plan, result, started_at)
        self.scheduler.apply(result)
        self._collect_aborted()
        for sequence_id, reason in finished.items():
            events.append(self._finish(sequence_id, reason))
        if self.on_step is not None:
            self.on_step(plan, result)
        if not self.scheduler.has_work:
            self.scheduler.check()
        return events

    def chat_feed(self, parts: Sequence[TextPart], *, system: str | None = None) -> TokenFeed:
        """One user message made of the parts, to be streamed: pass it to `stream` or `submit` as the prompt."""
        return self.prompts.chat_feed(parts, system=system)

    def _encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return self.prompts.text_tokens(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            return self.prompts.message_tokens(prompt)  # type: ignore[arg-type]
        size = self.model.spec.vocab_size
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < size:
                raise InvalidPrompt(f"The prompt holds {token!r}; token ids are whole numbers from 0 to {size - 1}.")
        return list(prompt)  # type: ignore[arg-type]

    def _feed_prompts(self) -> None:
        """Reads streamed prompts just far enough for the next chunk."""
        for sequence in list(self.scheduler.sequences.values()):
            if sequence.prompt_is_complete:
                continue
            feed = self._active[sequence.id].feed
            assert feed is not None
            wanted = max(self.scheduler.limits.chunk_size, self.config.block_size) + 1
            num_ahead = len(sequence.tokens) - sequence.num_computed
            if self.scheduler.limits.chunk_size == 0:
                wanted = self.scheduler.capacity
            if num_ahead < wanted:
                try:
                    tokens, is_last = feed.take(wanted - num_ahead)
                    self.scheduler.extend_prompt(sequence.id, tokens, is_last=is_last)
                except BaseException:
                    self.abort(sequence.id)
                    raise

    def _choose_tokens(
        self, plan: StepPlan, logits: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, int], dict[int, FinishReason]]:
        tokens: dict[int, int] = {}
        finished: dict[int, FinishReason] = {}
        for chunk in plan.chunks:
            sequence = self.scheduler.sequences[chunk.sequence_id]
            active = self._active[sequence.id]
            rows = logits[sequence.id]
            if active.request.sampling.prompt_logprobs is not None and not active.token_ids:
                self._note_prompt_logprobs(active, sequence.tokens, sequence.num_computed, rows)
            if not chunk.wants_logits or sequence.abort_requested:
                continue
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            token, logprob = active.sampler.sample(rows[-1], prompt, active.token_ids)
            tokens[sequence.id] = token
            if logprob is not None:
                active.logprobs.append(logprob)
            if reason := self._finish_reason(active, token, len(sequence.tokens) + 1):
                finished[sequence.id] = reason
        return tokens, finished

    def _finish_reason(self, active: _Active, token: int, num_tokens: int) -> FinishReason | None:
        """Also turns the token into text: a stop string ends the answer in the middle of one."""
        if token in self.model.eos_ids and not active.request.sampling.ignore_eos:
            self._show(active, token, active.stop.push(active.detokenizer.flush()) + active.stop.flush())
            return "stop"
        shown = active.stop.push(active.detokenizer.push(token))
        if active.stop.is_stopped:
            self._show(active, token, shown)
            return "stop"
        if len(active.token_ids) + 1 >= active.max_tokens or num_tokens >= self.scheduler.capacity:
            rest = active.stop.push(active.detokenizer.flush()) + active.stop.flush()
            self._show(active, token, shown + rest)
            return "length"
        self._show(active, token, shown)
        return None

    def _show(self, active: _Active, token: int, text: str) -> None:
        active.token_ids.append(token)
        active.text.append(text)
        logprob = active.logprobs[-1] if active.logprobs else None
        active.events.append(Token(request_id=active.request.id, token_id=token, text=text, logprob=logprob))

    def _note_prompt_logprobs(self, active: _Active, tokens: list[int], first: int, rows: torch.Tensor) -> None:
        """Row i holds what the model expects after position first + i."""
        num_alternatives = active.request.sampling.prompt_logprobs or 0
        for index, row in enumerate(rows):
            position = first + index + 1
            if position < len(tokens):
                active.prompt_logprobs.append(token_logprob(row, tokens[position], num_alternatives))

    def _record(self, plan: StepPlan, result: StepResult, started_at: float) -> list[Event]:
        """Times and progress of the step's chunks; read from the plan and the result alone."""
        now = started_at + result.elapsed_s
        events: list[Event] = []
        for chunk in plan.chunks:
            sequence = self.scheduler.sequences[chunk.sequence_id]
            active = self._active[sequence.id]
            active.predicted_bytes = max(active.predicted_bytes, plan.predicted_bytes)
            if active.started_at is None:
                active.started_at = started_at
                active.num_cached = sequence.num_cached
            if sequence.is_prefilling or not active.first_token_at:
                active.chunks.append(ChunkRecord(start=chunk.start, end=chunk.end, ms=result.elapsed_s * 1e3))
                active.num_computed = max(active.num_computed, chunk.end)
                progress = self._progress(active, plan, chunk.start, chunk.end, now)
                active.events.appendleft(progress) if chunk.wants_logits else active.events.append(progress)
            if chunk.wants_logits and active.first_token_at is None:
                active.first_token_at = now
            events += active.events
        return events

    def _progress(self, active: _Active, plan: StepPlan, start: int, end: int, now: float) -> PrefillProgress:
        sequence = self.scheduler.sequences[active.request.id]
        total = sequence.num_prompt_tokens if sequence.prompt_is_complete else None
        if total is None and active.feed is not None:
            total = active.feed.num_total
        estimate = total or (active.feed.num_total_estimate if active.feed else end)
        elapsed = now - (active.started_at or now)
        speed = (active.num_computed - active.num_cached) / elapsed if elapsed > 0 else 0.0
        return PrefillProgress(
            request_id=active.request.id,
            num_computed=active.num_computed,
            num_cached=active.num_cached,
            num_total=total,
            num_total_estimate=max(estimate, end),
            chunk_start=start,
            chunk_end=end,
            elapsed_s=elapsed,
            tokens_per_s=speed,
            eta_s=max(0, estimate - active.num_computed) / speed if speed > 0 else 0.0,
            memory_bytes=resident_bytes(),
            predicted_peak_bytes=max(active.predicted_bytes, plan.predicted_bytes),
        )

    def _collect_aborted(self) -> None:
        for sequence_id in self.scheduler.take_aborted():
            self._finish(sequence_id, "abort")

    def _finish(self, sequence_id: int, reason: FinishReason) -> Finished:
        active = self._active[sequence_id]
        now = time.perf_counter()
        started = active.started_at or now
        first = active.first_token_at
        num_prompt = len(active.request.prompt) if active.feed is None else active.feed.num_given
        output = Output(
            request_id=sequence_id,
            text="".join(active.text),
            token_ids=tuple(active.token_ids),
            finish_reason=reason,
            num_prompt_tokens=num_prompt,
            num_computed_tokens=active.num_computed,
            num_cached_tokens=active.num_cached,
            chunks=tuple(active.chunks),
            ttft_s=None if first is None else first - active.request.arrived_at,
            prefill_s=(first or now) - started,
            decode_s=0.0 if first is None else now - first,
            peak_bytes=peak_resident_bytes(),
            predicted_peak_bytes=active.predicted_bytes,
            logprobs=tuple(active.logprobs) if active.request.sampling.logprobs is not None else None,
            prompt_logprobs=tuple(active.prompt_logprobs)
            if active.request.sampling.prompt_logprobs is not None
            else None,
        )
        event = Finished(request_id=sequence_id, output=output)
        active.events.append(event)
        return event

    def _chunk_limit(self, start: int, resident_tokens: int, wanted: int) -> int:
        return self.model.memory.largest_chunk(
            start=start,
            budget_bytes=self.model.budget_bytes,
            upper=wanted,
            resident_tokens=resident_tokens,
            capacity_tokens=self.model.num_blocks * self.config.block_size,
        )

    def _peak_estimate(self, chunk: int, context: int, resident_tokens: int) -> int:
        return self.model.memory.peak_bytes(chunk=chunk, context=context, resident_tokens=resident_tokens)


def _sampling_params(values: dict[str, Any]) -> SamplingParams:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(set(values) - known):
        raise InvalidSetting(f"There is no sampling setting {unknown[0]!r}; known ones are {', '.join(sorted(known))}.")
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    elif "stop" in values:
        values["stop"] = tuple(values["stop"] or ())
    return SamplingParams(**values)
