"""What a run showed, and whether it keeps what is promised."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random

from penstock.config import PrefillPriority
from penstock.document import Document
from penstock.simulate.costs import MACHINES, Machine, Reading
from penstock.simulate.simulate import SimulatedRun, simulate
from penstock.simulate.workloads import SCENARIOS, SIZES, Sizes, lone_question
from penstock.trace.percentile import percentile

TARGETS_S = (0.02, 0.05, 0.1, 0.2, None)
MAX_OVER_TARGET = 1.1
MAX_GAP_AT_50_MS = 0.055
MAX_TTFT_OF_PREFILL_FIRST = 1.35
MAX_STEPS_TO_FIRST_CHUNK = 3


class RunSummary(Document):
    """One run in numbers. Times of a run that was given up cover what had happened."""

    scenario: str
    machine: str
    priority: PrefillPriority
    target_ms: float | None
    reading: Reading  # how long prompts were read
    is_complete: bool
    ttft_p50_s: float
    ttft_p99_s: float
    long_prompt_ttft_s: float | None  # None: the scenario has no such prompt
    gap_p50_ms: float
    gap_p99_ms: float
    governed_share: float  # of the gaps: the decodes alone fit the target, and no floor went over it
    governed_gap_p99_ms: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    num_preemptions: int
    longest_wait_s: float
    num_steps: int
    simulated_s: float

    @classmethod
    def of(cls, run: SimulatedRun, scenario: str) -> RunSummary:
        ttfts = [life.ttft_s for life in run.arrived]
        gaps = run.counted_gaps()
        lengths = [gap.end - gap.begin for gap in gaps]
        governed = [gap.end - gap.begin for gap in gaps if gap.is_governed]
        watched = run.watched
        has_ttft = watched is not None and watched.first_token_at is not None
        return cls.from_fields_of(
            run,
            scenario=scenario,
            machine=run.machine.name,
            reading=run.machine.reading,
            target_ms=None if run.target_s is None else run.target_s * 1e3,
            ttft_p50_s=percentile(ttfts, 0.5),
            ttft_p99_s=percentile(ttfts, 0.99),
            long_prompt_ttft_s=watched.ttft_s if watched is not None and has_ttft else None,
            gap_p50_ms=percentile(lengths, 0.5) * 1e3,
            gap_p99_ms=percentile(lengths, 0.99) * 1e3,
            governed_share=len(governed) / max(1, len(gaps)),
            governed_gap_p99_ms=percentile(governed, 0.99) * 1e3,
            prompt_tokens_per_s=run.num_prompt_tokens / max(run.elapsed_s, 1e-9),
            generated_tokens_per_s=run.num_generated / max(run.elapsed_s, 1e-9),
            longest_wait_s=max((life.wait_s for life in run.arrived), default=0.0),
            simulated_s=run.elapsed_s,
        )

    @property
    def name(self) -> str:
        target = "no target" if self.target_ms is None else f"{self.target_ms:g} ms"
        read = "" if self.reading == "chunks" else f", {self.reading}"
        return f"{self.machine} {self.scenario} {self.priority.value} {target}{read}"


def run_all(pool: Executor, machine: str, scenario: str, seed: int) -> list[RunSummary]:
    """Runs a scenario with every priority at every target, each in a process of the pool; and one also with sweeps."""
    asked = [(priority, target_s, "chunks") for priority, target_s in product(PrefillPriority, TARGETS_S)]
    if scenario == "beside-64k":
        asked += product([PrefillPriority.INTERLEAVED], TARGETS_S[:-1], ["sweeps", "auto"])
    return list(pool.map(partial(_run, machine, scenario, seed), *zip(*asked, strict=True)))


def _run(
    name: str, scenario: str, seed: int, priority: PrefillPriority, target_s: float | None, reading: Reading
) -> RunSummary:
    machine, trace = replace(MACHINES[name], reading=reading), SCENARIOS[scenario](SIZES[name], Random(seed))
    return RunSummary.of(simulate(trace, machine, priority=priority, target_s=target_s, seed=seed), scenario)


class Check(Document):
    name: str
    holds: bool
    found: str


class Report(Document):
    seed: int
    sources: dict[str, str]
    titles: dict[str, str]
    runs: list[RunSummary]
    checks: list[Check]


def check_all(summaries: Iterable[RunSummary]) -> list[Check]:
    summaries = list(summaries)
    checks = [_check_target(s) for s in summaries if _is_bound(s)]
    checks += [
        Check(name=f"{s.name}: every request ends", holds=False, found="given up: prompts were read again and again")
        for s in summaries
        if not s.is_complete
    ]
    in_chunks = [s for s in summaries if s.reading == "chunks" and s.machine == "h200"]
    beside = {(s.priority, s.target_ms): s for s in in_chunks if s.scenario == "beside-64k"}
    if beside:
        checks += _check_beside(beside[PrefillPriority.INTERLEAVED, 50.0], beside[PrefillPriority.PREFILL_FIRST, None])
    return checks


def check_lone_question(machine: Machine, *, seed: int, sizes: Sizes | None = None) -> list[Check]:
    """A short question that arrives alone beside the document is not stuck behind it."""
    trace = lone_question(sizes or SIZES[machine.name], Random(seed))
    checks = []
    for priority in PrefillPriority:
        steps = []
        for target_s in TARGETS_S:
            run = simulate(trace, machine, priority=priority, target_s=target_s, seed=seed)
            steps.append(run.lives[1].steps_to_first_chunk)
        checks.append(
            Check(
                name=f"{machine.name} {priority.value}: a question alone beside the document gets its first chunk "
                f"within {MAX_STEPS_TO_FIRST_CHUNK} steps, at every target",
                holds=max(steps) <= MAX_STEPS_TO_FIRST_CHUNK,
                found=f"{max(steps)} steps at most",
            )
        )
    return checks


def _is_bound(summary: RunSummary) -> bool:
    """Whether the run says anything about its target."""
    is_aimed = summary.priority is not PrefillPriority.PREFILL_FIRST and summary.target_ms is not None
    return is_aimed and summary.governed_share > 0


def _check_target(summary: RunSummary) -> Check:
    assert summary.target_ms is not None
    limit_ms = MAX_OVER_TARGET * summary.target_ms
    return Check(
        name=f"{summary.name}: p99 gap at most {limit_ms:.0f} ms where the decodes alone fit and no floor went over it",
        holds=summary.governed_gap_p99_ms <= limit_ms,
        found=f"{summary.governed_gap_p99_ms:.1f} ms over {summary.governed_share:.0%} of the gaps",
    )


def _check_beside(interleaved: RunSummary, prefill_first: RunSummary) -> list[Check]:
    ratio = (interleaved.long_prompt_ttft_s or 0.0) / (prefill_first.long_prompt_ttft_s or 1e-9)
    return [
        Check(
            name=f"{interleaved.name}: p99 gap at most {MAX_GAP_AT_50_MS * 1e3:.0f} ms",
            holds=interleaved.gap_p99_ms <= MAX_GAP_AT_50_MS * 1e3,
            found=f"{interleaved.gap_p99_ms:.1f} ms",
        ),
        Check(
            name=f"{interleaved.name}: TTFT of the long prompt at most {MAX_TTFT_OF_PREFILL_FIRST} x prefill-first's",
            holds=0 < ratio <= MAX_TTFT_OF_PREFILL_FIRST,
            found=f"{ratio:.2f} x",
        ),
    ]
