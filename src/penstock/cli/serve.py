"""`penstock serve`: a model behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.flags import Model, TraceFile
from penstock.cli.settings import ENGINE, SERVER, SHARING, engine_config, with_settings
from penstock.config import DEFAULT_MODEL, MIB
from penstock.errors import InvalidSetting
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
    trace: TraceFile = None,
    **settings: Any,
) -> None:
    """Serve a model: OpenAI's API, metrics, and a page with a live timeline."""
    config = engine_config(settings)
    try:
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
    raise typer.Exit(serve_until_told(asked, config))
