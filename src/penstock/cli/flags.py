"""The flags that several commands have, each described once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import InvalidSetting

PEERS = ("transformers", "llama.cpp")
PEER_PYTHON = "PENSTOCK_PEER_PYTHON"

Model = Annotated[str, typer.Argument(help="smollm2, a folder, a .gguf file or a hub id.", metavar="MODEL")]
ChunkSize = Annotated[
    str | None, typer.Option(help="Prompt tokens per chunk: a number, auto, or 0 to read prompts whole.")
]
Overlap = Annotated[int | None, typer.Option(help="Tokens of the previous chunk to compute again.")]
Memory = Annotated[str | None, typer.Option(help="Byte budget, such as 6GiB: of the whole process, or of a GPU.")]
Context = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer; past the model's own: a warning.")]
LaneId = Annotated[str | None, typer.Option("--lane", help="Force a lane by its id.")]
Strict = Annotated[bool | None, typer.Option("--strict/--no-strict", help="Refuse instead of adjusting.")]
Device = Annotated[str | None, typer.Option(help="auto, cuda or cpu; auto takes an NVIDIA GPU where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")]
Quantize = Annotated[
    str | None, typer.Option(help="Weights in few bits: auto, keep (as the GGUF has them), int8, int4 or none.")
]
Threads = Annotated[int | None, typer.Option(help="Processor threads; the physical cores unless given.")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="Write every step and request to this file; `penstock trace` reads it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Choose among this many most likely tokens.")]
TopP = Annotated[float, typer.Option(help="Choose among the most likely tokens that together reach this share.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the most likely one.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: what was read or written becomes less likely.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Taken off for each time a token was written.")]
PresencePenalty = Annotated[float, typer.Option(help="Taken off once a token was written.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")]
Logprobs = Annotated[int | None, typer.Option(help="Log-probabilities with this many alternatives, in --json.")]
Images = Annotated[
    list[str] | None, typer.Option("--image", help="A picture, for a model that reads them; may be repeated.")
]
System = Annotated[str | None, typer.Option(help="System message.")]
Peers = Annotated[str, typer.Option(help="Measured beside: transformers, llama.cpp, or both with a comma between.")]
LlamaPython = Annotated[
    str | None, typer.Option(help="A Python that has llama-cpp-python; this one unless given.", envvar=PEER_PYTHON)
]


def chosen(flag: str, names: list[str] | None, known: tuple[str, ...]) -> list[str]:
    """All of them unless some are named."""
    for name in names or []:
        if name not in known:
            raise InvalidSetting(f"{flag} is {name!r}; it must be one of {', '.join(known)}.")
    return list(dict.fromkeys(names or known))


def chosen_peers(peers: str, llama_python: str | None) -> tuple[str, ...]:
    if llama_python is not None:
        os.environ[PEER_PYTHON] = llama_python
    names = [name.strip() for name in peers.split(",") if name.strip()]
    return tuple(chosen("--peers", names, PEERS)) if names else ()


def require_trace(path: Path | None) -> Path | None:
    if path is None:
        return None
    from penstock.trace.document import require_writable

    return require_writable(path)
