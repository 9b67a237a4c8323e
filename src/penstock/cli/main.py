"""The command line: flags in, text and progress out. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli.bench import bench
from penstock.cli.flags import (
    ChunkSize,
    Context,
    Device,
    Dtype,
    FrequencyPenalty,
    Images,
    Json,
    LaneId,
    Logprobs,
    MaxTokens,
    Memory,
    MinP,
    Model,
    Overlap,
    PresencePenalty,
    Quantize,
    RepetitionPenalty,
    Seed,
    Stop,
    Strict,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    TraceFile,
    require_trace,
)
from penstock.config import DEFAULT_MODEL, PARSERS, EngineConfig, load_config
from penstock.errors import InvalidMedia, InvalidPrompt, InvalidSetting, PenstockError
from penstock.request import SamplingParams

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="penstock",
    help="Read long prompts into language models in bounded memory, exactly, without stalling anyone else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.command()
def run(
    context_of_call: typer.Context,
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The question or instruction.")] = None,
    files: Annotated[
        list[str] | None, typer.Option("-f", "--file", help="A text file, or - for standard input; may be repeated.")
    ] = None,
    images: Images = None,
    system: System = None,
    chunk_size: ChunkSize = None,
    overlap: Overlap = None,
    memory: Memory = None,
    context: Context = None,
    lane: LaneId = None,
    strict: Strict = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    threads: Threads = None,
    trace: TraceFile = None,
    json: Json = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    logprobs: Logprobs = None,
) -> None:
    """Read files and a question, and write the answer. Files and images come first, then the text, in one message."""
    config = _config(context_of_call)
    sampling = _sampling(context_of_call)
    if logprobs is not None and not json:
        raise InvalidSetting("--logprobs are shown in the JSON document only. Add --json.")
    _require_images(images or [])
    parts = _text_parts(files or [], prompt)
    trace = require_trace(trace)
    from penstock.cli.reading import run_once

    asked = {"images": images or [], "system": system, "sampling": sampling}
    raise typer.Exit(run_once(model, config, parts, **asked, as_json=json, trace=trace))


@app.command()
def chat(
    context_of_call: typer.Context,
    model: Model = DEFAULT_MODEL,
    files: Annotated[
        list[str] | None, typer.Option("-f", "--file", help="A text file that the first message begins with.")
    ] = None,
    images: Images = None,
    system: System = None,
    url: Annotated[str | None, typer.Option(help="Talk to a server, such as http://127.0.0.1:8000.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="PENSTOCK_API_KEY")] = None,
    chunk_size: ChunkSize = None,
    overlap: Overlap = None,
    memory: Memory = None,
    context: Context = None,
    lane: LaneId = None,
    strict: Strict = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    threads: Threads = None,
    trace: TraceFile = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
) -> None:
    """Talk with a model. What was read before is not read again."""
    config = _config(context_of_call)
    sampling = _sampling(context_of_call)
    if files and "-" in files:
        raise InvalidSetting("In a chat standard input is the conversation. Give a file instead of -.")
    _require_images(images or [])
    parts = _text_parts(files, None) if files else []
    if url is not None:
        if trace is not None:
            raise InvalidSetting("--trace is for a model in this process; a server has its own at /trace.")
        from penstock.cli.remote import run_remote_chat

        document = "\n\n".join("".join(part.pieces()) for part in parts)
        raise typer.Exit(run_remote_chat(url, api_key, system=system, document=document, sampling=sampling))
    trace = require_trace(trace)
    from penstock.cli.reading import run_chat

    asked = {"images": images or [], "system": system, "sampling": sampling}
    raise typer.Exit(run_chat(model, config, parts, **asked, trace=trace))


@app.command()
def serve(
    context_of_call: typer.Context,
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is reachable from other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that requests must bring; may be given several times.", envvar="PENSTOCK_API_KEY"),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may ask, such as https://example.org.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option(help="How prompts and streams share steps: interleaved, prefill-first, ...")
    ] = None,
    latency_target_ms: Annotated[
        float | None, typer.Option(help="What a step beside running streams should take at most.")
    ] = None,
    max_running: Annotated[int | None, typer.Option(help="Most requests served at once.")] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Most requests that wait for others to end; more are answered with 429.")
    ] = None,
    max_waiting_tokens: Annotated[int | None, typer.Option(help="Most prompt tokens in the queue.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt that is taken.")] = None,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body.")] = 32,
    request_timeout_s: Annotated[float | None, typer.Option(help="Longest time of a request.")] = None,
    keep_alive_s: Annotated[float, typer.Option(help="A silent stream gets a comment this often.")] = 10.0,
    body_timeout_s: Annotated[float, typer.Option(help="Longest pause while a request's body is sent.")] = 60.0,
    drain_timeout_s: Annotated[float, typer.Option(help="After SIGTERM: time for running requests to end.")] = 30.0,
    chunk_size: ChunkSize = None,
    overlap: Overlap = None,
    memory: Memory = None,
    context: Context = None,
    lane: LaneId = None,
    strict: Strict = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    threads: Threads = None,
    trace: TraceFile = None,
) -> None:
    """Serve a model: OpenAI's API, metrics, and a page with a live timeline."""
    config = _config(context_of_call)
    try:
        from penstock.server.process import serve as serve_until_told
        from penstock.server.settings import MIB, ServerSettings
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"Serving needs {error.name}. Install penstock[serve].") from None

    settings = ServerSettings(
        trace=require_trace(trace),
        model=model,
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        max_prompt_tokens=max_prompt_tokens,
        max_body_bytes=max_body_mib * MIB,
        request_timeout_s=request_timeout_s,
        keep_alive_s=keep_alive_s,
        body_timeout_s=body_timeout_s,
        drain_timeout_s=drain_timeout_s,
    )
    raise typer.Exit(serve_until_told(settings, config))


@app.command()
def plan(
    context_of_call: typer.Context,
    model: Model = DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 4096,
    chunk_size: ChunkSize = None,
    overlap: Overlap = None,
    memory: Memory = None,
    context: Context = None,
    lane: LaneId = None,
    strict: Strict = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Say what a prompt would cost, from the model's config alone."""
    from penstock.cli.planning import show_plan
    from penstock.engine.planning import plan_model

    config = _config(context_of_call)
    show_plan(plan_model(model, prompt_tokens, config), as_json=json)


@app.command()
def doctor(
    context_of_call: typer.Context,
    model: Model = DEFAULT_MODEL,
    memory: Memory = None,
    context: Context = None,
    lane: LaneId = None,
    strict: Strict = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    threads: Threads = None,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Load the model and time it, for 20 seconds at most.")
    ] = True,
    rerun: Annotated[bool, typer.Option("--rerun", help="Check exactness again, whatever was found before.")] = False,
    json: Json = False,
) -> None:
    """Look at the machine, a model and its speed, and say what to mend and what to ask for. Exit code 2: a problem."""
    config = _config(context_of_call)
    from penstock.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(model, config, rerun=rerun, with_speed=speed, as_json=json))


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="What --trace or a server's /trace wrote.", metavar="FILE")],
    slowest: Annotated[int, typer.Option(min=0, help="How many of the slowest steps to explain.")] = 5,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write it in the trace event format, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    json: Json = False,
) -> None:
    """Say where the time of a trace went: requests, gaps, memory, and the slowest steps with their reasons."""
    from penstock.cli.trace import show_trace

    show_trace(file, num_slowest=slowest, perfetto=perfetto, as_json=json)


def _config(call: typer.Context) -> EngineConfig:
    """The engine's settings among the flags of a command; their names are the same."""
    return load_config({name: call.params[name] for name in PARSERS if name in call.params})


def _sampling(call: typer.Context) -> dict[str, Any]:
    """The sampling settings among the flags of a command, checked before any model is loaded."""
    names = {field.name for field in fields(SamplingParams)} & set(call.params)
    values = {name: call.params[name] for name in names}
    values["stop"] = tuple(values.get("stop") or ())
    SamplingParams(**values)
    return values


def _require_images(names: list[str]) -> None:
    if missing := next((name for name in names if not Path(name).is_file()), None):
        raise InvalidMedia(f"The image {missing} does not exist.")


def _text_parts(files: list[str], prompt: str | None) -> list[Any]:
    from penstock.prompt.source import TextPart

    if files.count("-") > 1:
        raise InvalidSetting("Standard input was named twice (-f -); it can be read once.")
    if not files and prompt is None:
        raise InvalidPrompt("There is nothing to read. Give -p TEXT, -f FILE, or -f - for standard input.")
    parts = [
        TextPart(stream=sys.stdin.buffer, name="standard input") if name == "-" else TextPart.of_file(Path(name))
        for name in files
    ]
    return [*parts, TextPart.of_text(prompt)] if prompt is not None else parts


def main() -> None:
    try:
        app(standalone_mode=True)
    except PenstockError as error:
        typer.echo(f"penstock: {error}", err=True)
        sys.exit(EXIT_REFUSED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; there is nobody to tell
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
