"""The real scheduler in virtual time: a cost model stands where the lane would be."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from penstock.bench.costs import Machine
from penstock.bench.workloads import Arrival, Trace
from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.config import PrefillPriority
from penstock.request import Chunk, FinishReason, Request, SamplingParams, StepPlan, StepResult
from penstock.schedule.budget import POLICIES, StepCost, StepLoad, TokenBudget
from penstock.schedule.scheduler import Limits, Scheduler

BLOCK_SIZE = 16
NOISE = 0.02  # standard deviation of a step's time, as a share of it
SAMPLING = SamplingParams(max_tokens=1_000_000)
# A run is given up when this many times its tokens were read: sequences preempt one another in circles.
MOST_READINGS = 4


@dataclass(slots=True, kw_only=True)
class Life:
    """What happened to one request."""

    arrival: Arrival
    submitted_before_step: int = 0
    first_chunk_at: float | None = None
    steps_to_first_chunk: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    last_token_step: int = 0
    num_generated: int = 0

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None, "the request ended without a token"
        return self.first_token_at - self.arrival.at_s

    @property
    def wait_s(self) -> float:
        assert self.first_chunk_at is not None, "the request never got a chunk"
        return self.first_chunk_at - self.arrival.at_s


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of one request."""

    begin: float
    end: float
    is_governed: bool  # the latency target could be kept: the decodes alone fit it, and no floor went over it


@dataclass(slots=True, kw_only=True)
class Run:
    machine: Machine
    priority: PrefillPriority
    target_s: float | None
    trace: Trace
    lives: dict[int, Life] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated: int = 0
    elapsed_s: float = 0.0
    is_complete: bool = False

    @property
    def arrived(self) -> list[Life]:
        """Those of the trace that got a token, without the ones that ran when it began."""
        lives = (self.lives.get(index) for index in range(len(self.trace.arrivals)))
        return [life for life in lives if life is not None and life.first_token_at is not None]

    @property
    def watched(self) -> Life | None:
        return None if self.trace.watched is None else self.lives[self.trace.watched]

    def counted_gaps(self) -> list[Gap]:
        watched = self.watched
        if not self.trace.gaps_end_with_watched or watched is None or watched.first_token_at is None:
            return self.gaps
        begin, end = watched.arrival.at_s, watched.first_token_at
        return [gap for gap in self.gaps if begin <= gap.begin < end]


def calibrated_cost(machine: Machine, rng: Random) -> StepCost:
    """What a scheduler knows at start: a handful of timed steps, as the engine takes them at load."""

    def timed(load: StepLoad) -> tuple[StepLoad, float]:
        return load, machine.seconds(load.features) * rng.gauss(1.0, NOISE)

    chunk = machine.ceiling // 4
    loads = [StepLoad().with_chunk(start, size) for start in (0, chunk, 4 * chunk) for size in (chunk, chunk // 8)]
    loads += [StepLoad(num_tokens=count, decode_contexts=count * chunk) for count in (1, 4, 4, 8)]
    return StepCost.fitted([timed(load) for load in loads])


def make_scheduler(
    machine: Machine,
    *,
    priority: PrefillPriority,
    target_s: float | None,
    num_blocks: int,
    cost: StepCost,
    max_running: int | None = None,
) -> Scheduler:
    pool = BlockPool(num_blocks)
    return Scheduler(
        limits=Limits(
            block_size=BLOCK_SIZE,
            max_context=num_blocks * BLOCK_SIZE,
            max_running=max_running or machine.max_running,
            priority=priority,
        ),
        budget=TokenBudget(ceiling=machine.ceiling, floor=machine.floor, target_s=target_s, cost=cost),
        pool=pool,
        prefix=PrefixCache(pool),
        model_identity=machine.name,
        chunk_limit=lambda start, resident, wanted: wanted,
        peak_estimate=lambda num_tokens, context, resident: 0,
    )


def simulate(trace: Trace, machine: Machine, *, priority: PrefillPriority, target_s: float | None, seed: int) -> Run:
    """Runs the trace to its end. Equal seeds give equal runs."""
    return _Simulation(trace, machine, priority, target_s, Random(seed)).run()


class _Simulation:
    def __init__(
        self, trace: Trace, machine: Machine, priority: PrefillPriority, target_s: float | None, rng: Random
    ) -> None:
        self.out = Run(machine=machine, priority=priority, target_s=target_s, trace=trace)
        self.machine = machine
        self.rng = rng
        self.scheduler = make_scheduler(
            machine,
            priority=priority,
            target_s=target_s,
            num_blocks=trace.num_blocks or machine.num_blocks,
            cost=calibrated_cost(machine, rng),
        )
        self.now = 0.0
        # Prompts differ in their first token, so that no two share a prefix; slices of one tuple are cheap.
        everyone = (*trace.arrivals, *trace.running)
        self._text = tuple(range(max(a.num_prompt_tokens for a in everyone)))

    def run(self) -> Run:
        out, trace = self.out, self.out.trace
        self._start_running(trace.running)
        num_submitted = 0
        everyone = (*trace.arrivals, *trace.running)
        most_read = MOST_READINGS * sum(a.num_prompt_tokens + a.num_generated for a in everyone)
        while num_submitted < len(trace.arrivals) or self.scheduler.has_work:
            if out.num_prompt_tokens > most_read:
                break
            while num_submitted < len(trace.arrivals) and trace.arrivals[num_submitted].at_s <= self.now:
                self._submit(num_submitted, trace.arrivals[num_submitted])
                num_submitted += 1
            plan = self.scheduler.next_step()
            if plan is not None:
                self._step(plan)
            else:
                assert num_submitted < len(trace.arrivals), "work was there and nothing was planned"
                self.now = trace.arrivals[num_submitted].at_s
        out.is_complete = not self.scheduler.has_work
        out.elapsed_s = self.now
        out.num_preemptions = self.scheduler.num_preemptions
        self.scheduler.check()
        return out

    def _start_running(self, running: tuple[Arrival, ...]) -> None:
        """Reads the prompts of those that already run, before the clock starts."""
        policy, self.scheduler.policy = self.scheduler.policy, POLICIES[PrefillPriority.PREFILL_FIRST]
        first = len(self.out.trace.arrivals)
        for index, arrival in enumerate(running, start=first):
            self._submit(index, arrival)
        while any(self.out.lives[i].num_generated == 0 for i in range(first, first + len(running))):
            plan = self.scheduler.next_step()
            assert plan is not None
            self._step(plan)
        self.scheduler.policy = policy
        for life in self.out.lives.values():
            life.last_token_at -= self.now
        self.now = 0.0
        self.out.gaps.clear()
        self.out.num_prompt_tokens = self.out.num_generated = 0

    def _submit(self, index: int, arrival: Arrival) -> None:
        prompt = (index, *self._text[1 : arrival.num_prompt_tokens])
        self.scheduler.submit(Request(id=index, prompt=prompt, sampling=SAMPLING, arrived_at=arrival.at_s))
        self.out.lives[index] = Life(arrival=arrival, submitted_before_step=self.out.num_steps)

    def _step(self, plan: StepPlan) -> None:
        out = self.out
        out.num_steps += 1
        is_governed = self._advance(plan)
        token_by_sequence: dict[int, int] = {}
        finished: dict[int, FinishReason] = {}
        for chunk in plan.chunks:
            life = out.lives[chunk.sequence_id]
            if life.first_chunk_at is None:
                life.first_chunk_at = self._step_began
                life.steps_to_first_chunk = out.num_steps - life.submitted_before_step
            if chunk.wants_logits:
                token_by_sequence[chunk.sequence_id] = life.num_generated
                self._note_token(life, is_governed)
                if life.num_generated == life.arrival.num_generated:
                    finished[chunk.sequence_id] = "length"
        self.scheduler.apply(
            StepResult(
                step=plan.step,
                token_by_sequence=token_by_sequence,
                finished=finished,
                elapsed_s=self.now - self._step_began,
                peak_bytes=0,
            )
        )

    def _advance(self, plan: StepPlan) -> bool:
        """Moves the clock by what the step takes; says whether the target could be kept."""
        out = self.out
        prompt_chunks: list[Chunk] = []
        num_decodes = decode_contexts = 0
        for chunk in plan.chunks:
            if chunk.is_prompt or chunk.end - chunk.start > 1:
                prompt_chunks.append(chunk)
            else:
                num_decodes += 1
                decode_contexts += chunk.end
        load = decodes = StepLoad(num_tokens=num_decodes, decode_contexts=decode_contexts)
        for chunk in prompt_chunks:
            load = load.with_chunk(chunk.start, chunk.num_tokens)
        self._step_began = self.now
        expected_s = self.machine.seconds(load.features)
        self.now += expected_s * max(0.5, self.rng.gauss(1.0, NOISE))
        num_prompt_tokens = load.num_tokens - num_decodes
        out.num_prompt_tokens += num_prompt_tokens
        if out.target_s is None or self.machine.seconds(decodes.features) > out.target_s:
            return False
        is_at_floor = POLICIES[out.priority].has_floor and 0 < num_prompt_tokens <= self.machine.floor
        return not (is_at_floor and expected_s > out.target_s)

    def _note_token(self, life: Life, is_governed: bool) -> None:
        out = self.out
        life.num_generated += 1
        out.num_generated += 1
        if life.first_token_at is None:
            life.first_token_at = self.now
        else:
            # A gap of several steps is a preemption, which no chunk size prevents.
            is_next = life.last_token_step == out.num_steps - 1
            out.gaps.append(Gap(life.last_token_at, self.now, is_governed and is_next))
        life.last_token_at = self.now
        life.last_token_step = out.num_steps
