"""`penstock bench`: measurements; those on the real engine that are no suites are here."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.bench.work import SHAPES
from penstock.cli.cpu import cpu
from penstock.cli.flags import Json, Model
from penstock.cli.schedule import fleet, schedule, scheduling_cost
from penstock.cli.settings import given, with_settings
from penstock.cli.suites import add_suites
from penstock.config import DEFAULT_MODEL
from penstock.errors import InvalidSetting

SHAPE_NAMES = tuple(SHAPES)


@with_settings({"latency_target_ms": ("threads", "dtype")})
def stalls(
    model: Model = DEFAULT_MODEL,
    decodes: Annotated[int, typer.Option(help="Streams that run when the long prompt arrives.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the long prompt.")] = 6000,
    latency_target_ms: Annotated[float, typer.Option(help="The target that the priorities are measured under.")] = 150,
    most_seconds: Annotated[float, typer.Option(help="Time for one variant; then it says how far it came.")] = 90,
    json: Json = False,
    **settings: Any,
) -> None:
    """Measure the gaps of running streams while a long prompt is read beside them, on the real engine."""
    from pydantic_core import to_json

    from penstock.bench.probes import stalls
    from penstock.bench.workbench import BenchSettings, ProbeSizes

    sizes = ProbeSizes(num_streams=decodes, beside_tokens=prompt_tokens, latency_target_ms=latency_target_ms)
    results = []
    for result in stalls(BenchSettings(model=model, **given(settings)), sizes, most_seconds):
        results.append(result)
        if not json:
            print(
                f"{result.name:<38} gap p50 {result.gap_p50_ms:>8.0f} ms  p99 {result.gap_p99_ms:>8.0f} ms  "
                f"max {result.gap_max_ms:>8.0f} ms  read {result.num_read:>6} in {result.seconds:>6.1f} s  "
                f"{result.tokens_per_s:>6.0f} tok/s",
                flush=True,
            )
    if json:
        print(to_json(results, indent=2).decode())


@with_settings({"profile": ("lane",)})
def gpu(
    model: Annotated[str | None, typer.Argument(help="A model to measure; or give --random-weights.")] = None,
    random_weights: Annotated[bool, typer.Option(help="A shape with random weights, no file.")] = False,
    shape: Annotated[str, typer.Option(help=f"Of the random weights: {', '.join(SHAPE_NAMES)}.")] = SHAPE_NAMES[0],
    parts: Annotated[
        str,
        typer.Option(help="p prompts, d decodes, m 65k beside 32 decodes, o full queue, s sampled, b bytes."),
    ] = "pdmo",
    target: Annotated[list[float] | None, typer.Option(help="m again under this latency target, in ms.")] = None,
    chunk_size: Annotated[int, typer.Option(help="The most prompt tokens of a step.")] = 8192,
    memory: Annotated[str | None, typer.Option(help="Budget, such as 100GiB; most of the card unless given.")] = None,
    profile: Annotated[bool, typer.Option(help="Also show which kernels take the time.")] = False,
    **settings: Any,
) -> None:
    """Measure a GPU over fixed work that other engines can be given too; the last line is RESULT and JSON."""
    if (model is None) != random_weights:
        raise InvalidSetting("Give a model or --random-weights, and not both.")
    if random_weights and settings["lane"] is not None:
        raise InvalidSetting("--random-weights are those of our own decoder; --lane takes a model.")
    if wrong := set(parts) - set("pdmosb"):
        raise InvalidSetting(f"--parts has {''.join(sorted(wrong))!r}; the parts are p, d, m, o, s and b.")
    if shape not in SHAPE_NAMES:
        raise InvalidSetting(f"--shape is {shape!r}; it must be one of {', '.join(SHAPE_NAMES)}.")
    from pydantic_core import to_json

    from penstock.bench.gpu import measure_gpu

    def report(name: str, value: object) -> None:
        print(f"{name}: {value}", flush=True)

    asked = {"chunk_size": chunk_size, "memory": memory, **settings}
    found = measure_gpu(model, shape, parts, target or [], asked, report, with_profile=profile)
    print("RESULT", to_json(found).decode())


bench = typer.Typer(help="Measurements that anyone can repeat.", no_args_is_help=True)
add_suites(bench)
for command in (schedule, fleet, scheduling_cost, stalls, gpu, cpu):
    bench.command()(command)
