"""Flags of commands that are settings: made from the fields of the settings, and read back into them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from itertools import chain
from typing import Any, get_type_hints

import typer

from penstock.config import PARSERS, EngineConfig, load_config
from penstock.request import SamplingParams
from penstock.server.settings import ServerSettings

# What the flag of a setting says. Its type is that of the field, and its default too, but for the engine's: those that
# are not given come from PENSTOCK_* or penstock.toml.
ENGINE = {
    "chunk_size": "Prompt tokens per chunk: a number, auto, or 0 to read prompts whole.",
    "overlap": "Tokens of the previous chunk to compute again.",
    "memory": "Byte budget, such as 6GiB: of the whole process, or of a GPU.",
    "context": "Most tokens of prompt and answer; past the model's own: a warning.",
    "lane": "Force a lane by its id.",
    "text_only": "Load the text part of an image-text model alone; unless given, where nothing can encode images.",
    "mmproj": "The vision tower of a GGUF file; unless given, the mmproj file beside it that fits.",
    "adapter": "A LoRA to merge into the weights: PEFT's folder, or its hub id.",
    "strict": "Refuse instead of adjusting.",
    "device": "auto, cuda or cpu; auto takes an NVIDIA GPU where there is one.",
    "dtype": "auto, float32 or bfloat16.",
    "quantize": "Weights in few bits: auto, keep (as the GGUF has them), int8, int4 or none.",
    "threads": "Processor threads; the physical cores unless given.",
    "cache_dir": "A folder that keeps keys and values for later processes; nothing is kept unless given.",
    "cache_disk": "Most bytes of that folder, such as 20GiB; 8GiB unless given.",
}
SHARING = {
    "priority": "How prompts and streams share steps: interleaved, prefill-first, ...",
    "latency_target_ms": "What a step beside running streams should take at most.",
    "max_running": "Most requests served at once.",
    "max_waiting": "Most requests that wait for others to end; more are answered with 429.",
    "max_waiting_tokens": "Most prompt tokens in the queue.",
}
SERVER = {
    "name": "What clients call the model; the name of its file or folder unless given.",
    "tool_parser": "How the model writes calls, such as hermes; as its chat template shows unless given.",
    "reasoning_parser": "How it marks reasoning, such as think, or none; as its template shows unless given.",
    "host": "Where to listen; 0.0.0.0 is reachable from other machines.",
    "port": "The port; 0 takes a free one.",
    "share_prefixes": "Let API keys find what was read for each other, which shows in times.",
    "pin_s": "After a call: seconds for which its prefix is spared from eviction.",
    "max_pinned_bytes": "Most bytes of keys and values that are spared so; half of the pages unless given.",
    "max_prompt_tokens": "Longest prompt that is taken.",
    "request_timeout_s": "Longest time of a request.",
    "keep_alive_s": "A silent stream gets a comment this often.",
    "body_timeout_s": "Longest pause while a request's body is sent or its answer is read.",
    "whole_body_timeout_s": "Longest time for a whole body.",
    "header_timeout_s": "Longest time until a connection asks, or asks again.",
    "max_connections": "Most connections; silent ones make room for new ones.",
    "max_connections_per_client": "Most connections of one address, such as a proxy's.",
    "drain_timeout_s": "After SIGTERM: time for running requests to end.",
}
SAMPLING = {
    "max_tokens": "Most tokens to write.",
    "temperature": "0 is greedy.",
    "top_k": "Choose among this many most likely tokens.",
    "top_p": "Choose among the most likely tokens that together reach this share.",
    "min_p": "Drop tokens below this share of the most likely one.",
    "repetition_penalty": "Above 1: what was read or written becomes less likely.",
    "frequency_penalty": "Taken off for each time a token was written.",
    "presence_penalty": "Taken off once a token was written.",
    "seed": "Makes sampling repeatable.",
    "stop": "Text that ends the answer; may be given several times.",
    "logprobs": "Log-probabilities with this many alternatives, in --json.",
}
HELP = ENGINE | SHARING | SERVER | SAMPLING
WRITTEN = {"chunk_size": str, "memory": str, "cache_disk": str, "priority": str, "stop": list[str]}  # on a command line
TYPES = get_type_hints(EngineConfig) | get_type_hints(SamplingParams) | get_type_hints(ServerSettings) | WRITTEN
DEFAULTS = {field.name: field.default for kind in (SamplingParams, ServerSettings) for field in fields(kind)}
DEFAULTS |= dict.fromkeys([*PARSERS, "stop"])


def with_settings(groups: Mapping[str, Collection[str]], **defaults: object) -> Callable[[Any], Any]:
    """Gives a command flags of settings, each group behind one of its own; its last parameter takes their values."""

    def flag(name: str) -> inspect.Parameter:
        default = defaults.get(name, DEFAULTS[name])
        hint = TYPES[name] if default is not None else TYPES[name] | None
        option = typer.Option(default, help=HELP[name])
        return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=option, annotation=hint)

    def add(command: Any) -> Any:
        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        listed = [[parameter, *map(flag, groups.get(parameter.name, ()))] for parameter in own]
        command.__signature__ = inspect.Signature([*chain.from_iterable(listed)])
        return command

    return add


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Reads the engine's settings among the flags of a command."""
    return load_config({name: value for name, value in settings.items() if name in PARSERS})


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what was not given."""
    return {name: value for name, value in settings.items() if value is not None}


def sampling_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Picks the sampling settings among the flags of a command, checked before any model is loaded."""
    values = {name: value for name, value in settings.items() if name in SAMPLING}
    SamplingParams.of(values)
    return values
