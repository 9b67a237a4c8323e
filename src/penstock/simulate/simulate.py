"""The real scheduler in virtual time: a cost model stands where the lane would be."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache
from penstock.config import PrefillPriority
from penstock.request import FinishReason, Request, SamplingParams, StepPlan, StepResult
from penstock.schedule.budget import POLICIES, StepCost, StepLoad, TokenBudget
from penstock.schedule.scheduler import Limits, Scheduler
from penstock.schedule.sweeps import Sweeps
from penstock.simulate.costs import Machine
from penstock.simulate.workloads import Arrival, Arrivals

BLOCK_SIZE = 16
NOISE = 0.02  # standard deviation of a step's time, as a share of it
SAMPLING = SamplingParams(max_tokens=1_000_000)
# A run is given up when this many times its tokens were read: sequences preempt one another in circles.
MAX_READINGS = 4


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
    """A gap lies between two tokens of one request."""

    begin: float
    end: float
    is_governed: bool  # the latency target could be kept: the decodes alone fit it, and no floor went over it


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
    pool, sweeps = BlockPool(num_blocks), Sweeps(num_layers=machine.num_layers, are_forced=machine.reading == "sweeps")
    return Scheduler(
        limits=Limits(
            block_size=BLOCK_SIZE,
            max_context=num_blocks * BLOCK_SIZE,
            max_running=max_running or machine.max_running,
            priority=priority,
            sweeps=None if machine.reading == "chunks" else sweeps,
        ),
        budget=TokenBudget(ceiling=machine.ceiling, floor=machine.floor, target_s=target_s, cost=cost),
        pool=pool,
        prefix=PrefixCache(pool),
        model_identity=machine.name,
        chunk_limit=lambda start, resident, wanted: wanted,
        peak_estimate=lambda num_tokens, context, resident: 0,
    )


class SimulatedRun:
    """A trace of arrivals, the scheduler that serves it, and what happened."""

    def __init__(
        self, trace: Arrivals, machine: Machine, priority: PrefillPriority, target_s: float | None, rng: Random
    ) -> None:
        self.trace, self.machine, self.priority, self.target_s = trace, machine, priority, target_s
        self.lives: dict[int, Life] = {}
        self.gaps: list[Gap] = []
        self.num_steps = self.num_prompt_tokens = self.num_generated = 0
        self.elapsed_s = self._step_began = 0.0
        self._rng = rng
        num_blocks = trace.num_blocks or machine.num_blocks
        cost = calibrated_cost(machine, rng)
        self._scheduler = make_scheduler(
            machine, priority=priority, target_s=target_s, num_blocks=num_blocks, cost=cost
        )
        self._everyone = (*trace.arrivals, *trace.running)
        # Prompts differ in their first token, so that no two share a prefix; slices of one tuple are cheap.
        self._text = tuple(range(max(arrival.num_prompt_tokens for arrival in self._everyone)))

    @property
    def is_complete(self) -> bool:
        return not self._scheduler.has_work

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

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

    def run(self) -> None:
        arrivals = self.trace.arrivals
        self._start_running()
        num_submitted = 0
        most_read = MAX_READINGS * sum(a.num_prompt_tokens + a.num_generated for a in self._everyone)
        while num_submitted < len(arrivals) or self._scheduler.has_work:
            if self.num_prompt_tokens > most_read:
                break
            while num_submitted < len(arrivals) and arrivals[num_submitted].at_s <= self.elapsed_s:
                self._submit(num_submitted, arrivals[num_submitted])
                num_submitted += 1
            plan = self._scheduler.next_step()
            if plan is not None:
                self._step(plan)
            else:
                assert num_submitted < len(arrivals), "work was there and nothing was planned"
                self.elapsed_s = arrivals[num_submitted].at_s
        self._scheduler.check()

    def _start_running(self) -> None:
        """Reads the prompts of those that already run, before the clock starts."""
        policy, self._scheduler.policy = self._scheduler.policy, POLICIES[PrefillPriority.PREFILL_FIRST]
        for index, arrival in enumerate(self.trace.running, start=len(self.trace.arrivals)):
            self._submit(index, arrival)
        while any(life.num_generated == 0 for life in self.lives.values()):
            plan = self._scheduler.next_step()
            assert plan is not None
            self._step(plan)
        self._scheduler.policy = policy
        for life in self.lives.values():
            life.last_token_at -= self.elapsed_s
        self.elapsed_s = 0.0
        self.gaps.clear()
        self.num_prompt_tokens = self.num_generated = 0

    def _submit(self, index: int, arrival: Arrival) -> None:
        prompt = (index, *self._text[1 : arrival.num_prompt_tokens])
        self._scheduler.submit(Request(id=index, prompt=prompt, sampling=SAMPLING, arrived_at=arrival.at_s))
        self.lives[index] = Life(arrival=arrival, submitted_before_step=self.num_steps)

    def _step(self, plan: StepPlan) -> None:
        self.num_steps += 1
        is_governed = self._advance(plan)
        token_by_sequence: dict[int, int] = {}
        finished: dict[int, FinishReason] = {}
        for chunk in plan.chunks:
            life = self.lives[chunk.sequence_id]
            if life.first_chunk_at is None:
                life.first_chunk_at = self._step_began
                life.steps_to_first_chunk = self.num_steps - life.submitted_before_step
            if chunk.wants_logits:
                token_by_sequence[chunk.sequence_id] = life.num_generated
                self._note_token(life, is_governed)
                if life.num_generated == life.arrival.num_generated:
                    finished[chunk.sequence_id] = "length"
        result = StepResult(
            step=plan.step,
            token_by_sequence=token_by_sequence,
            finished=finished,
            elapsed_s=self.elapsed_s - self._step_began,
            peak_bytes=0,
        )
        self._scheduler.apply(result)

    def _advance(self, plan: StepPlan) -> bool:
        """Moves the clock by what the step takes; says whether the target could be kept."""
        load = StepLoad.of(plan.chunks)
        decodes = StepLoad(num_tokens=load.num_decodes, decode_contexts=load.decode_contexts)
        self._step_began = self.elapsed_s
        expected_s = self.machine.seconds(load.features)
        self.elapsed_s += expected_s * max(0.5, self._rng.gauss(1.0, NOISE))
        self.num_prompt_tokens += load.num_prompt_tokens
        if self.target_s is None or self.machine.seconds(decodes.features) > self.target_s:
            return False
        is_at_floor = POLICIES[self.priority].has_floor and 0 < load.num_prompt_tokens <= self.machine.floor
        return not (is_at_floor and expected_s > self.target_s)

    def _note_token(self, life: Life, is_governed: bool) -> None:
        life.num_generated += 1
        self.num_generated += 1
        if life.first_token_at is None:
            life.first_token_at = self.elapsed_s
        else:
            # A gap of several steps is a preemption, which no chunk size prevents.
            is_next = life.last_token_step == self.num_steps - 1
            self.gaps.append(Gap(life.last_token_at, self.elapsed_s, is_governed and is_next))
        life.last_token_at = self.elapsed_s
        life.last_token_step = self.num_steps


def simulate(
    trace: Arrivals, machine: Machine, *, priority: PrefillPriority, target_s: float | None, seed: int
) -> SimulatedRun:
    """Runs the trace to its end. Equal seeds give equal runs."""
    simulated = SimulatedRun(trace, machine, priority, target_s, Random(seed))
    simulated.run()
    return simulated
