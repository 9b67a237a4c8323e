"""`penstock serve`: a model behind HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.bench.work import SHAPES
from penstock.cli.flags import Model, TraceFile
from penstock.cli.settings import ENGINE, SERVER, SHARING, engine_config, with_settings
from penstock.cli.terminal import importing
from penstock.config import DEFAULT_MODEL, MIB, EngineConfig
from penstock.errors import InvalidSetting
from penstock.ray import require_ray
from penstock.server.settings import CONNECTIONS, TIMEOUTS, ServerSettings

TIMES = (*TIMEOUTS, "drain_timeout_s")


@with_settings(
    {
        "model": ("name",),
        "alias": ("tool_parser", "reasoning_parser", "host", "port"),
        "api_key": ("share_prefixes", "pin_s", "max_pinned_bytes"),
        "cors_origin": (*SHARING, "max_prompt_tokens"),
        "max_files_mib": (*TIMES, *CONNECTIONS, *ENGINE),
    }
)
def serve(
    model: Model = DEFAULT_MODEL,
    alias: Annotated[
        list[str] | None, typer.Option(help="Another name that the model answers to; may be given several times.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that requests must bring; may be given several times.", envvar="PENSTOCK_API_KEY"),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may ask, such as https://example.org.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Without a key: a name besides localhost that requests may be sent to.")
    ] = None,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body.")] = 32,
    files: Annotated[
        Path | None, typer.Option(help="A folder for files and batches, which a later server goes on with.")
    ] = None,
    max_files_mib: Annotated[int, typer.Option(help="Most bytes of files that are kept.")] = 1024,
    random_weights: Annotated[
        str | None,
        typer.Option(help=f"Serve a shape with random weights, to measure it: {', '.join(SHAPES)}.", metavar="SHAPE"),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run several replicas on Ray behind this server.")] = False,
    replicas: Annotated[str, typer.Option(help="With --ray: how many of each model, or from-to, such as 1-3.")] = "2",
    backlog_s: Annotated[
        float, typer.Option(help="With --ray and from-to: seconds of reading that each may have before it; then more.")
    ] = 5.0,
    patience_s: Annotated[
        float, typer.Option(help="With --ray and from-to: for so long fewer must be enough before one is drained.")
    ] = 30.0,
    with_model: Annotated[
        list[str] | None, typer.Option(help="With --ray: another model, by its own name; may be given several times.")
    ] = None,
    trace: TraceFile = None,
    **settings: Any,
) -> None:
    """Serve a model: OpenAI's API, metrics, and a page with a live timeline."""
    config = engine_config(settings)
    if random_weights is not None:
        _require_shape(random_weights, model, config, is_fleet=ray)
        model = random_weights
    try:
        with importing():
            from penstock.engine.loading import load_model
            from penstock.server.app import make_app
            from penstock.server.process import serve as serve_until_told
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"Serving needs {error.name}. Install penstock[serve].") from None

    asked = ServerSettings(
        model=model,
        aliases=tuple(alias or ()),
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        allowed_hosts=tuple(allowed_host or ()),
        max_body_bytes=max_body_mib * MIB,
        files=files,
        max_files_bytes=max_files_mib * MIB,
        trace=trace,
        **{name: value for name, value in settings.items() if name in SERVER},
    )
    if not ray:
        if with_model:
            raise InvalidSetting("--with-model needs --ray: a server without it has one model.")
        load = load_model
        if random_weights is not None:
            from penstock.bench.random_model import load_shape as load

            typer.echo(f"The weights of {model} are random: its answers mean nothing.", err=True)
        raise typer.Exit(serve_until_told(asked, lambda: make_app(asked, config, load)))
    if trace is not None:
        raise InvalidSetting("--trace is of one engine; with --ray ask /trace?replica=NAME instead.")
    require_ray()
    from penstock.ray.fleet import FleetSettings, serve_fleet

    fleet = FleetSettings.of(replicas, backlog_s=backlog_s, patience_s=patience_s)
    others = [replace(asked, model=name, name=None, aliases=()) for name in with_model or []]
    raise typer.Exit(serve_fleet([asked, *others], config, fleet))


def _require_shape(shape: str, model: str, config: EngineConfig, *, is_fleet: bool) -> None:
    if shape not in SHAPES:
        raise InvalidSetting(f"--random-weights is {shape!r}; it must be one of {', '.join(SHAPES)}.")
    if model != DEFAULT_MODEL:
        raise InvalidSetting(f"--random-weights takes the place of MODEL, which is {model!r}. Give one of them.")
    if config.lane is not None or config.adapter is not None or is_fleet:
        raise InvalidSetting("--random-weights are those of our own decoder; leave out --lane, --adapter and --ray.")
