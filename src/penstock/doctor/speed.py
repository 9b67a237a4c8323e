"""A loaded model, measured: whether chunks change nothing, how fast it reads and writes, what to ask for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from statistics import fmean, median

from penstock.bench.workbench import EngineSubject, Workbench
from penstock.config import EngineConfig, written_budget
from penstock.doctor.advice import CONTEXT, NUM_STREAMS, SIZES, latency_target_ms, nearly_fastest
from penstock.doctor.diagnosis import Diagnosis, good, note, problem, refused
from penstock.document import Document
from penstock.engine.calibration import Observations, noting
from penstock.engine.engine import Engine
from penstock.engine.loading import load_model
from penstock.errors import PenstockError
from penstock.schedule.budget import StepCost, StepLoad

MAX_SECONDS = 20.0
READING_SHARE = 0.6
NUM_WRITTEN = 12
PROMPT_TOKENS = 2048
MARGIN = 1.1  # of memory, as the prediction is held to
# Mean difference of log-probabilities by which chunks may differ from the whole prompt: rounding.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.2}
CHECKED_TOKENS, CHECKED_CHUNK = 64, 13


class Recommendation(Document):
    memory: str
    prompt_tokens: int  # that this much memory holds
    chunk_size: int
    latency_target_ms: int | None  # None: even the longest that is tried leaves prompts too little
    flags: str


class Speed(Document):
    load_s: float
    measured_s: float
    read_tokens_per_s: dict[int, float]  # by chunk size, after 1,024 tokens
    write_tokens_per_s: float  # of one answer
    write_tokens_per_s_of_4: float  # of four together
    recommended: Recommendation


def diagnose_speed(model: str, config: EngineConfig) -> tuple[list[Diagnosis], Speed | None]:
    """Loads the model and times it; no speed where it could not be measured."""
    began = time.perf_counter()
    try:
        with Engine(load_model(model, config)) as engine:
            load_s = time.perf_counter() - began
            if obstacle := _obstacle(engine):
                return [obstacle], None
            findings = [diagnose_exactness(engine)]
            if engine.model.device.type == "cuda":  # what it was found to be fastest with
                findings.insert(0, good("attention", f"on this model: {engine.model.attention}"))
            speed = measured(engine, load_s=load_s)
            return [*findings, *_told(speed)], speed
    except PenstockError as error:
        return [refused("loading", error)], None


def _obstacle(engine: Engine) -> Diagnosis | None:
    """What cannot be timed by chunks."""
    remedy = "Time a prompt with penstock run, and explain it with --trace and penstock trace"
    if engine.lane.reads_source:
        return note("speed", "not timed: chunks of a source are passes over it, not tokens", remedy)
    if engine.lane.reads_whole:
        return note("speed", "not timed: prompts are read whole", remedy)
    if engine.scheduler.capacity < 2 * SIZES[0]:
        return note("speed", f"not timed: memory holds {engine.scheduler.capacity} tokens", "Raise --memory")
    return None


def measured(engine: Engine, *, load_s: float, most_seconds: float = MAX_SECONDS) -> Speed:
    began = time.perf_counter()
    bench, observations = Workbench.over(engine), Observations()
    bench.write(bench.prompt(8, "warm"), 2)  # first uses compile and cache
    prompt = bench.prompt(min(PROMPT_TOKENS, engine.scheduler.capacity // 2), "speed")
    with engine.limits(watch=noting(observations)):
        sizes = _read(engine, prompt, observations, began + READING_SHARE * most_seconds)
        context = min(CONTEXT, sum(sizes)) if engine.scheduler.prefix is not None else min(16, len(prompt))
        alone, together = (
            EngineSubject(engine).write_together([prompt[:context]] * count, NUM_WRITTEN, spare=2, until=began + until)
            for count, until in ((1, 0.8 * most_seconds), (NUM_STREAMS, most_seconds))
        )
    cost = StepCost.fitted(observations)
    rates = {size: size / max(1e-9, cost.predict(StepLoad().with_chunk(CONTEXT, size))) for size in sizes}
    return Speed(
        load_s=round(load_s, 1),
        measured_s=round(time.perf_counter() - began, 1),
        read_tokens_per_s={size: round(rate, 1) for size, rate in rates.items()},
        write_tokens_per_s=round(alone[0] / alone[1], 1),
        write_tokens_per_s_of_4=round(together[0] / together[1], 1),
        recommended=recommend(engine, cost, rates, context),
    )


def recommend(engine: Engine, cost: StepCost, rates: Mapping[int, float], context: int) -> Recommendation:
    """`context`: of the answers whose steps were timed."""
    chunk = nearly_fastest(rates)
    memory, budget = engine.model.memory, engine.model.budget_bytes
    num_tokens = engine.scheduler.capacity
    needed = MARGIN * memory.peak_bytes(chunk=chunk, context=num_tokens)
    target = latency_target_ms(cost, max(rates.values()), context)
    amount = written_budget(min(needed, budget))
    flags = f"--memory {amount} --chunk-size {chunk}"
    if target is not None:
        flags += f" --latency-target-ms {target}"
    return Recommendation(
        memory=amount, prompt_tokens=num_tokens, chunk_size=chunk, latency_target_ms=target, flags=flags
    )


def _read(engine: Engine, prompt: list[int], observations: Observations, until: float) -> list[int]:
    """The chunk sizes that were read: larger ones as long as there is time, memory and prompt for them."""
    request_id = engine.submit(prompt, max_tokens=1)
    sizes: list[int] = []
    with engine.limits() as budget:
        for size in SIZES:
            is_slow = bool(sizes) and size * observations[-1][1] / sizes[-1] > until - time.perf_counter()
            if is_slow or len(prompt) - sum(sizes) < size:
                break
            budget.ceiling = size
            engine.step()
            if observations[-1][0].num_tokens < size:
                break  # as much as memory allows
            sizes.append(size)
    engine.abort(request_id)
    return sizes


def diagnose_exactness(engine: Engine) -> Diagnosis:
    """The loaded weights themselves, in chunks and whole; two of three prompts must agree."""
    bench, found = Workbench.over(engine), list[float]()
    for seed in range(3):
        tokens = bench.prompt(CHECKED_TOKENS, seed)
        whole, chunked = (EngineSubject(engine).losses(tokens, size) for size in (0, CHECKED_CHUNK))
        found.append(fmean(abs(one - other) for one, other in zip(whole, chunked, strict=True)))
    limit, middle = ROUNDING[engine.model.dtype], median(found)
    finding = (
        f"the loaded weights give log-probabilities in chunks of {CHECKED_CHUNK} that are {middle:.1g} from those of "
        f"the whole prompt; rounding in {engine.model.dtype} is below {limit:g}"
    )
    if middle <= limit:
        return good("exactness", finding)
    return problem("exactness", finding, "Read prompts whole with --chunk-size 0, and report this as a bug")


def _told(speed: Speed) -> Iterator[Diagnosis]:
    rates = ", ".join(f"{rate:,.0f} by {size}" for size, rate in speed.read_tokens_per_s.items())
    yield good("speed", f"loads in {speed.load_s} s; reads {rates} tokens per second, after {CONTEXT:,} of them")
    four = f"{speed.write_tokens_per_s_of_4:,.1f} in four answers together"
    yield good("speed", f"writes {speed.write_tokens_per_s:,.1f} tokens per second, {four}")
    if speed.recommended.latency_target_ms is None:
        finding = "beside four answers a prompt reads at less than half its speed, whatever the latency target"
        yield note("speed", finding, "Leave --latency-target-ms out, or take a smaller model")
