"""The engine: requests go in, steps run, events come out."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.cache.states import StatePool
from penstock.config import CPU_STEP_SIZES, DEFAULT_MODEL, GPU_STEP_SIZES, PrefillPriority, load_config
from penstock.engine.active import Active, ChosenToken
from penstock.engine.calibration import calibrate
from penstock.engine.disk_cache import NAMELESS, DiskCache, open_disk
from penstock.engine.feed import TokenFeed
from penstock.engine.feeding import Feeding
from penstock.engine.grammar import Grammars
from penstock.engine.handle import Handle
from penstock.engine.held_memory import HeldMemory, is_out_of_memory
from penstock.engine.intake import Intake
from penstock.engine.loading import LoadedModel, load_model
from penstock.engine.prompts import Prompt
from penstock.engine.recording import taken, trace_head
from penstock.engine.runner import Runner, StepLogits
from penstock.engine.sampler import Sampler
from penstock.engine.step_memory import StepMemory
from penstock.engine.stopping import StopText
from penstock.errors import InvalidSetting, MemoryTooSmall
from penstock.lanes.lane import Asked, LaneFacts
from penstock.models.spec import DecoderSpec
from penstock.plan.machine import return_freed_memory, return_pages
from penstock.plan.pace import Pace
from penstock.plan.prompt_plan import PromptPlan
from penstock.prompt.source import TextPart
from penstock.request import (
    Chunk,
    ChunkRecord,
    Event,
    Failed,
    Finished,
    FinishReason,
    Output,
    PrefillProgress,
    SamplingParams,
    Span,
    StepPlan,
    StepResult,
)
from penstock.schedule.budget import TokenBudget
from penstock.schedule.moves import DiskUse
from penstock.schedule.scheduler import ChunkRefused, Limits, Scheduler
from penstock.schedule.sweeps import Sweeps
from penstock.trace.document import Trace, require_writable
from penstock.trace.recorder import Recorder, Recording

MOVE_WAIT_S = 0.05  # of a step that waits for moves alone, so that whoever comes meanwhile is seen
LONGEST_FLUSH_S = 10.0  # for what is not on the disk yet when an engine is closed


class _StepLeft(Exception):
    """Nobody waits any more for the prompts of a step, which is given up between two layers."""


class Engine:
    def __init__(self, model: LoadedModel, *, trace: Path | None = None) -> None:
        """`trace`: a file that is written when the engine is closed."""
        config, lane, num_stops = model.config, model.lane.facts, model.lane.num_stops
        self.model = model
        self.config = config
        self.adjustments = list(model.adjustments)
        pool = BlockPool(model.num_blocks)
        memory = model.memory
        self.states = None
        if memory.shape.state_bytes:
            num_running, num_checkpoints = memory.num_running_states, memory.num_checkpoints
            self.states = StatePool(num_running=num_running, num_checkpoints=num_checkpoints)
        self.memory = StepMemory(model, config, self.states)
        self.scheduler = Scheduler(
            limits=Limits(
                block_size=config.block_size,
                max_context=model.max_context,
                max_running=min(config.max_running, memory.num_running_states or config.max_running),
                overlap=0 if self.states or not lane.shares_prefixes else config.overlap,
                priority=config.priority,
                max_waiting=config.max_waiting,
                max_waiting_tokens=config.max_waiting_tokens,
                reads_whole=lane.reads_whole,
                sweeps=Sweeps(num_layers=num_stops) if num_stops and config.chunk_size is None else None,
                restarts_after_failure=lane.reads_source or not lane.shares_prefixes,
            ),
            budget=TokenBudget(
                ceiling=config.most_prompt_tokens,
                floor=config.floor,
                target_s=None if config.latency_target_ms is None else config.latency_target_ms / 1e3,
                sizes=GPU_STEP_SIZES if model.device.type == "cuda" else CPU_STEP_SIZES,
            ),
            pool=pool,
            prefix=PrefixCache(pool) if config.prefix_cache and lane.shares_prefixes else None,
            model_identity=model.identity,
            chunk_limit=self.memory.chunk_limit,
            peak_estimate=self.memory.peak_estimate,
            states=self.states,
            memory_for=None if lane.reads_source else self.memory.budget_for,
        )
        self._intake = Intake(model, config, self.scheduler, self.memory)
        self.prompts = self._intake.prompts
        self.grammars = Grammars(model.tokenizer, vocab_size=model.spec.vocab_size, eos_ids=model.eos_ids)
        self._runner = Runner(model.lane, model.device)
        self.held = HeldMemory(model.lane, model.device, memory.runtime_bytes)
        # A GPU is given the next step while it computes one. A CPU has nothing to overlap.
        runs_ahead = model.device.type == "cuda" and not lane.reads_more_than_tokens
        self.most_in_flight = 2 if runs_ahead else 1
        # Steps that run, or wait on the device for the one before them, and when each was started.
        self._flights: deque[tuple[StepPlan, StepLogits | None, float]] = deque()
        self._growth = model.spec.attention_growth if isinstance(model.spec, DecoderSpec) else ()
        self._active: dict[int, Active] = {}
        self._feeding = Feeding(model.lane, self.scheduler, self._intake, self._active, self.fail)
        self._mailboxes: dict[int, deque[Event]] = {}  # of the requests that somebody follows
        self._new_events: list[Event] = []
        self._next_id = 0
        self._is_closed = False
        self.on_plan: Callable[[StepPlan], None] | None = None
        self.on_step: Callable[[StepPlan, StepResult], None] | None = None
        # Told of prompts that are read in steps wider than a tile, after each layer.
        self.on_layer: Callable[[PrefillProgress], None] | None = None
        self._leaving: set[int] = set()  # cancelled from another thread, or within a step
        self.recorder: Recorder | None = None  # None: nothing is kept of a step
        self._trace_path = trace
        self.disk: DiskCache | None = None
        if config.latency_target_ms is not None:
            self.scheduler.budget.cost = calibrate(self)
            self._next_id = 0  # numbers are for what somebody asked
        self.disk = self._disk_cache()
        if trace is not None:
            self.record()

    def _disk_cache(self) -> DiskCache | None:
        """Opens the cache folder; None where none was asked for, or nothing of this model can be kept."""
        if self.config.cache_dir is None:
            return None
        if self.model.content is None or self.model.storage is None or self.scheduler.prefix is None:
            if not any("the cache folder" in told for told in self.adjustments):
                self.adjustments.append(f"nothing is kept in the cache folder: {NAMELESS}")
            return None
        disk = open_disk(self.model, self.adjustments.append)
        # Names of files and their times are part of the identity, and mean nothing in another folder.
        self.scheduler.holdings.model_identity = disk.disk.namespace.hex()
        self.scheduler.use_disk(disk.tiers, disk.cost, disk.num_observed)
        return disk

    @classmethod
    def load(cls, model: str = DEFAULT_MODEL, *, trace: str | Path | None = None, **settings: Any) -> Engine:
        """`settings` are the fields of EngineConfig; sizes may be strings such as "2GiB".

        `trace`: a file that is written when the engine is closed, with every step and every request.
        """
        config = load_config(settings)
        path = None if trace is None else require_writable(Path(trace))
        return cls(load_model(model, config), trace=path)

    def record(self) -> Recorder:
        """Keeps steps and requests for `trace` from now on."""
        if self.recorder is None:
            self.recorder = Recorder(trace_head(self))
        return self.recorder

    def trace(self, *, last_s: float | None = None) -> Trace:
        """What was recorded, of the last seconds or all of it, as a document."""
        return self.recording(last_s=last_s).document()

    def recording(self, *, last_s: float | None = None) -> Recording:
        """Takes what was recorded before it is made into a document, which another thread may do."""
        if self.recorder is None:
            raise InvalidSetting("Nothing was recorded. Load the engine with trace=FILE, or call record() first.")
        return taken(self, self.recorder, last_s=last_s)

    def close(self) -> None:
        """Ends what runs and gives the memory back. The engine cannot be used afterwards."""
        if self._is_closed:
            return
        for request_id in list(self._active):
            self.abort(request_id)
        while self._flights:
            self._land()
        self._close_disk()
        self._is_closed = True
        self.scheduler.check()
        try:
            if self._trace_path is not None:
                self.trace().write(self._trace_path)
        finally:
            del self.model, self._runner, self._intake, self._feeding, self.prompts
            return_freed_memory()

    def _close_disk(self) -> None:
        """Stores what was still to be stored, as far as the disk takes it in a few seconds."""
        disk, moves = self.disk, self.scheduler.moves
        if disk is None or moves is None:
            return
        until = time.perf_counter() + LONGEST_FLUSH_S
        while (moves.are_ordered or moves.are_under_way) and time.perf_counter() < until and self._launch():
            self._land(wait_s=MOVE_WAIT_S)
        disk.close(moves.num_observed, moves.cost)
        moves.land(disk.mover.landed())
        moves.give_up()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def give_back(self) -> None:
        """Returns what is free to the system, while nothing runs: freed memory, and pages that hold nothing."""
        storage, size = self.model.storage, self.config.block_size
        if storage is not None and not self._flights:
            for start, end in self.scheduler.pool.take_untouched():
                for values in (*storage.keys, *storage.values):
                    rows = values[start * size : end * size]
                    return_pages(rows.data_ptr(), rows.nbytes)
        return_freed_memory()

    def forget_prefixes(self) -> int:
        """Drops every prefix that no running request uses; returns how many blocks that freed."""
        num_cached = self.scheduler.pool.num_cached
        for kept in (self.scheduler.prefix, self.states):
            if kept is not None:
                kept.clear()
        if not self.scheduler.sequences:
            self.give_back()
        return num_cached - self.scheduler.pool.num_cached

    def pin(self, tokens: Sequence[int], *, for_s: float, most_bytes: int | None = None, scope: str = "") -> int:
        """Spares what is known of a prefix from eviction for a while; says how many tokens that are.

        `most_bytes`: of all that is pinned; the oldest pins make room. None: half of the pages. Where others would
        have to lose their place, pinned blocks go first.
        """
        if self._is_closed:
            return 0
        pool, block_size = self.scheduler.pool, self.config.block_size
        block_bytes = self.model.memory.shape.kv_bytes_per_token * block_size
        most = pool.num_blocks // 2 if most_bytes is None else min(most_bytes // block_bytes, pool.num_blocks)
        rotary = self.model.spec.rotary_variant(len(tokens))
        until = time.perf_counter() + for_s
        return self.scheduler.holdings.pin(tokens, rotary=rotary, scope=scope, until=until, most=most)

    @property
    def disk_use(self) -> DiskUse | None:
        """What went to the cache folder and came back so far; None: there is none."""
        moves = self.scheduler.moves
        return None if moves is None else dataclasses.replace(moves.use)

    def num_known(self, tokens: Sequence[int], *, scope: str = "") -> tuple[int, int]:
        """Counts the tokens of a prompt (that memory holds, that lie on disk behind them), for that scope."""
        if self.disk is not None:
            self.disk.look()
        return self.scheduler.holdings.num_known(
            tokens, rotary=self.model.spec.rotary_variant(len(tokens)), scope=scope
        )

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
        plan = self._intake.plan(prompt_tokens, atomic_spans, chunk_size=chunk_size)
        return dataclasses.replace(plan, adjustments=(*self.adjustments, *plan.adjustments))

    def generate(self, prompt: Prompt, **sampling: Any) -> Output:
        """Runs one request to its end."""
        return self.generate_batch([prompt], **sampling)[0]

    def read(self, prompt: Prompt, *, images: Sequence[Any] = (), answer_start: str | Sequence[int] = ()) -> Asked:
        """Does ahead of `submit`, and beside steps, what takes long with a prompt: opens its images and scales them.

        One prompt at a time, in one thread: processors are not made for several.
        """
        return self._intake.read(prompt, images, answer_start)

    def num_tokens(self, prompt: Prompt) -> int:
        """Counts what a prompt would be, images and all; nothing is run, and what is refused is refused here too."""
        return self._intake.num_tokens(prompt)

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
        if request_id not in self._active:
            raise InvalidSetting(f"Request {request_id} has ended. Ask for its events before other steps are run.")
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
        scope: str = "",
        forks: Sequence[int] = (),
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Handle:
        """Queues a request; `step` or `events` brings it forward. It ends unfinished when its deadline passes.

        An image is a path, the bytes of a file, or a PIL image. `answer_start`: text or tokens that the answer of an
        encoder-decoder model begins with; they are read, not written. `chunk_size` is this prompt's own, in place of
        the engine's; 0 reads it whole, "auto" leaves it to the memory model. `scope`: prefixes and images are found
        again by requests of the same scope alone. `forks`: numbers of its tokens after which other prompts will go on
        in their own way; a checkpoint of recurrent state is kept there. `params`: all of the sampling at once, in place
        of single settings.
        """
        if self._is_closed:
            raise InvalidSetting("The engine is closed. Load it again.")
        if params is not None and sampling:
            raise InvalidSetting(f"{next(iter(sampling))} is given beside params. Give one or the other.")
        params = params or SamplingParams.of(sampling)
        arrival = self._intake.take(
            self._next_id,
            prompt,
            params,
            images=images,
            answer_start=answer_start,
            chunk_size=chunk_size,
            priority=priority,
            deadline_s=deadline_s,
            scope=scope,
            forks=forks,
        )
        request, feed = arrival.request, arrival.feed
        if self.disk is not None:
            self.disk.look()
        grammar = None if params.grammar is None else self.grammars.matcher(params.grammar)
        self.scheduler.submit(request)
        self._next_id += 1
        self._active[request.id] = Active(
            request=request,
            feed=feed,
            sampler=Sampler(params, eos_ids=self.model.eos_ids, grammar=grammar),
            detokenizer=self.tokenizer.detokenizer(shown=params.shown_tokens),
            stop=StopText(params.stop),
            held=self.held,
            final_peak=self.memory.final_peak,
            pace=Pace(growth=self._growth),
            prompt=arrival.prompt,
        )
        self._feeding.begin(request.id)
        handle = Handle.of(self, arrival, chunk_size=chunk_size)
        if self.recorder is not None:
            self.recorder.take_arrival(request, handle.notes)
        return handle

    def abort(self, request_id: int) -> None:
        """Cancels within one chunk; computed blocks stay in the prefix cache, so an equal prompt resumes there."""
        if request_id in self.scheduler.sequences:
            self.scheduler.abort(request_id)
            while self._flights and request_id in self.scheduler.sequences:
                self._land()
            self._collect_ended()

    def cancel(self, request_id: int) -> None:
        """Aborts a request from any thread, also in the middle of a step that goes layer by layer."""
        self._leaving.add(request_id)

    def fail(self, request_id: int, error: Exception) -> None:
        """Ends a request that cannot go on; whoever follows it is told why."""
        if request_id in self.scheduler.sequences:
            self._emit(Failed(request_id=request_id, error=error))
            self.abort(request_id)

    def step(self) -> list[Event]:
        """One step for all requests; returns what happened since the last one."""
        self._abort_leaving()
        self.scheduler.expire(time.perf_counter())
        self._collect_ended()
        while len(self._flights) < self.most_in_flight and self._launch():
            pass
        if self._flights:
            self._land(wait_s=MOVE_WAIT_S)
        else:
            is_stuck = any(not sequence.is_paused for sequence in self.scheduler.sequences.values())
            is_encoding = any(active.prompt.is_encoding for active in self._active.values())
            assert is_encoding or not is_stuck, "requests wait and none can run"
        events, self._new_events = self._new_events, []
        return events

    def _launch(self) -> bool:
        """Plans a step and hands it to the device; False when nothing can run before another has landed."""
        self._feeding.encode_next()
        self._feeding.feed_prompts()
        budget, most, num_adjustments = self.scheduler.budget, self.scheduler.budget.most, len(self.adjustments)
        while (plan := self._next_plan()) is not None:
            started_at = time.perf_counter()
            if self.disk is not None:  # before anything may fail: what begins here always ends
                self.disk.mover.begin(plan.moves)
            if not plan.chunks:
                self._flights.append((plan, None, started_at))
                return True
            try:
                logits = self._begin(plan)
            except _StepLeft:
                self._fail_step(plan)
                self._abort_leaving()
                continue
            except BaseException as error:
                self._fail_step(plan)
                del self.adjustments[num_adjustments:]
                if not is_out_of_memory(error):
                    budget.most = most
                    raise
                if not self._halve(plan):
                    budget.most = most
                    if not self._give_up_prompts(plan):
                        raise
            else:
                self._flights.append((plan, logits, started_at))
                return True
            self.held.give_back()  # not before the error is gone, which holds what the step had made
        return False

    def _next_plan(self) -> StepPlan | None:
        """Plans a step without whoever may not go on under --strict: nobody else is to suffer from that."""
        while True:
            try:
                return self.scheduler.next_step()
            except ChunkRefused as refusal:
                self.fail(refusal.sequence_id, refusal.error)

    def _begin(self, plan: StepPlan) -> StepLogits:
        if self.on_plan is not None:
            self.on_plan(plan)
        for request_id in plan.preempted:
            self.model.lane.release(request_id)
            self._feeding.begin(request_id)
        samplers = {chunk.sequence_id: self._active[chunk.sequence_id].sampler for chunk in plan.chunks}
        return self._runner.run(
            plan, self.scheduler.sequences, samplers, partial(self._after_layer, plan, began=time.perf_counter())
        )

    def _after_layer(self, plan: StepPlan, num_done: int, num_layers: int, began: float | None = None) -> None:
        prompts = [chunk for chunk in plan.chunks if chunk.is_prefill]
        if prompts and self._leaving.issuperset(chunk.sequence_id for chunk in prompts):
            raise _StepLeft
        if self.on_layer is None or num_done == num_layers:  # the end of the step is told with it
            return
        now = time.perf_counter()
        for chunk in prompts:
            active = self._active[chunk.sequence_id]
            step_s = active.swept_s + now - (began or now)
            self.on_layer(active.progress_within(chunk, num_done / num_layers, step_s, now))

    def _abort_leaving(self) -> None:
        while self._leaving:
            self.abort(self._leaving.pop())

    def _fail_step(self, plan: StepPlan) -> None:
        self.scheduler.fail(plan.step)
        if self.scheduler.limits.restarts_after_failure:
            for chunk in plan.chunks:
                self.model.lane.release(chunk.sequence_id)
                if chunk.sequence_id in self._active:
                    self._feeding.begin(chunk.sequence_id)

    def _halve(self, plan: StepPlan) -> bool:
        """Half as many prompt tokens in a step from now on; False where that cannot be had, or did not help.

        Under --strict the prompts of the step are ended instead, and nobody else.
        """
        budget = self.scheduler.budget
        prompts = [chunk for chunk in plan.chunks if chunk.is_prefill]
        num_tokens = sum(chunk.num_tokens for chunk in prompts)
        if num_tokens < 2 or self.lane.reads_whole or (budget.most and num_tokens > budget.most):
            return False
        if self.memory.is_strict:
            refusal = f"--strict: a step with {num_tokens} prompt tokens did not fit into the memory."
            for chunk in prompts:
                self.fail(chunk.sequence_id, InvalidSetting(f"{refusal} Lower --chunk-size."))
            return True
        budget.most = num_tokens // 2
        self.adjustments.append(
            f"at most {budget.most} prompt tokens in a step from now on: {num_tokens} did not fit into the memory"
        )
        return True

    def _give_up_prompts(self, plan: StepPlan) -> bool:
        """Ends the prompts of a step that cannot be smaller, so that those who write go on; False where it has none."""
        prompts = [chunk for chunk in plan.chunks if chunk.is_prefill]
        for chunk in prompts:
            message = f"No memory was left for the prompt's next tokens ({chunk.num_tokens}), and fewer cannot be read."
            self.fail(chunk.sequence_id, MemoryTooSmall(f"{message} Raise --memory, or ask again when less runs."))
        return bool(prompts)

    def _land(self, wait_s: float = 0.0) -> None:
        """Waits for the first step in flight, and takes what it gave. `wait_s`: for moves, where it has no chunks."""
        plan, logits, started_at = self._flights.popleft()
        moved = self.disk.mover.landed(0.0 if plan.chunks else wait_s) if self.disk is not None else ()
        try:
            chosen = {} if logits is None else self._choose_tokens(plan, logits)
        except BaseException:
            self._flights.clear()
            self._fail_step(plan)
            raise
        # What is launched early waits for the step before it; the host may learn late that a step is done.
        landed_at = time.perf_counter()
        if logits is not None and (elapsed_s := logits.device_seconds()) is not None:
            started_at = landed_at - elapsed_s
        result = StepResult(
            step=plan.step,
            token_by_sequence={request_id: choice.token for request_id, choice in chosen.items()},
            finished={request_id: choice.finish for request_id, choice in chosen.items() if choice.finish},
            elapsed_s=landed_at - started_at,
            peak_bytes=self.held.peak_bytes,
            moved=moved,
        )
        self.scheduler.apply(result)
        self._record(plan, result, started_at)
        if not (plan.chunks or plan.moves or moved):
            return  # it waited, and there is nothing to tell yet
        if self.recorder is not None:
            pool = self.scheduler.pool
            kv_share = pool.num_held / pool.num_blocks
            memory_bytes = self.held.num_bytes
            self.recorder.take_step(plan, result, started_at=started_at, memory_bytes=memory_bytes, kv_share=kv_share)
        for request_id, choice in chosen.items():
            self._emit(choice.event)
            if choice.finish:
                self._finish(request_id, choice.finish)
        self._collect_ended()
        if self.on_step is not None:
            self.on_step(plan, result)
        if not self.scheduler.has_work:
            self._begin_last_stores()
            self.scheduler.check_idle()

    def _begin_last_stores(self) -> None:
        """Begins what the last step of the last request ordered: no other step may come for long."""
        moves = self.scheduler.moves
        if moves is not None and moves.are_ordered and self._launch():
            self._land()

    @property
    def has_work(self) -> bool:
        """Whether a step would bring some request forward, or end one."""
        return self.scheduler.has_work

    def warm_up(self) -> None:
        """Makes ahead of time what would be made in the middle of requests: captures of a GPU's steps."""
        self.model.lane.capture()
        self._runner.warm_up(self.model.spec.vocab_size)

    @contextmanager
    def limits(self, watch: Callable[[StepPlan, StepResult], None] | None = None) -> Generator[TokenBudget]:
        """Lends the limits of a step to a measurement, shows it every step, and puts everything back as it was."""
        budget = self.scheduler.budget
        lent, watcher, in_flight = (budget.ceiling, budget.target_s, budget.cost), self.on_step, self.most_in_flight
        self.on_step = watch or watcher
        try:
            yield budget
        finally:
            budget.ceiling, budget.target_s, budget.cost = lent
            self.on_step, self.most_in_flight = watcher, in_flight

    def set_priority(self, priority: PrefillPriority) -> None:
        """How steps are shared from now on."""
        self.scheduler.set_priority(priority)

    def chat_feed(self, parts: Sequence[TextPart], *, system: str | None = None) -> TokenFeed:
        """One user message made of the parts, to be streamed: pass it to `stream` or `submit` as the prompt."""
        return self.prompts.chat_feed(parts, system=system)

    def _choose_tokens(self, plan: StepPlan, logits: StepLogits) -> dict[int, ChosenToken]:
        logits.wait()
        chosen: dict[int, ChosenToken] = {}
        for chunk in plan.chunks:
            request_id = chunk.sequence_id
            if self.scheduler.sequences[request_id].is_leaving:
                continue
            try:
                choice = self._choose_token(chunk, logits)
            except Exception as error:  # a draw or a grammar that cannot go on ends its own request
                self._emit(Failed(request_id=request_id, error=error))
                self.scheduler.abort(request_id)
                continue
            if choice is not None:
                chosen[request_id] = choice
        return chosen

    def _choose_token(self, chunk: Chunk, logits: StepLogits) -> ChosenToken | None:
        """None where the chunk is not the last of what is known."""
        sequence = self.scheduler.sequences[chunk.sequence_id]
        active, rows = self._active[sequence.id], logits[sequence.id]
        if active.request.sampling.prompt_logprobs is not None and not active.token_ids:
            active.note_prompt_logprobs(sequence.tokens, sequence.num_computed, rows)
        if sequence.id in logits.pooled and not active.token_ids:
            active.note_pooled(logits.pooled[sequence.id], is_first=sequence.num_computed == 0)
        if not chunk.wants_logits:
            return None
        token, logprob = logits.choice(sequence.id)
        is_full = self._is_full(active, len(sequence.tokens) + 1)
        return active.choose(token, logprob, is_end=token in self.model.eos_ids, is_full=is_full)

    def _is_full(self, active: Active, num_tokens: int) -> bool:
        request = active.request
        has_room = request.num_slots(num_tokens) < self.scheduler.capacity
        if request.source is not None and (limit := request.source.max_answer_tokens) is not None:
            has_room = has_room and num_tokens - request.source.num_positions < limit
        return not has_room

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
            if (layers := chunk.layers) is not None:
                active.swept_s = result.elapsed_s + (active.swept_s if layers.first else 0.0)
            if layers is not None and not chunk.is_through:
                active.hits = chunk.hits
                share = layers.end / layers.num_layers
                self._emit(active.progress_within(chunk, share, active.swept_s, now))
            elif active.first_token_at is None:
                elapsed_s = result.elapsed_s if layers is None else active.swept_s
                active.swept_s = 0.0
                active.hits = chunk.hits
                active.chunks.append(ChunkRecord(start=chunk.start, end=chunk.end, ms=elapsed_s * 1e3))
                active.pace.note(chunk.start, chunk.end, elapsed_s)
                active.num_computed = max(active.num_computed, chunk.end)
                self._emit(active.progress(chunk, now))
            if chunk.wants_logits and active.first_token_at is None:
                active.first_token_at = now

    def _emit(self, event: Event) -> None:
        self._new_events.append(event)
        if self.recorder is not None:
            self.recorder.take_event(event)
        if event.request_id in self._mailboxes:
            self._mailboxes[event.request_id].append(event)

    def _collect_ended(self) -> None:
        for request_id, reason in self.scheduler.take_ended():
            self._finish(request_id, reason)

    def _finish(self, request_id: int, reason: FinishReason) -> None:
        self.model.lane.release(request_id)
        output = self._active.pop(request_id).output(reason, time.perf_counter())
        self._emit(Finished(request_id=request_id, output=output))
