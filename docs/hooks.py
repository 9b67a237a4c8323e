"""Fills the generated parts of the reference when the site is built.

A page holds a marker such as `<!-- generated: commands -->`. Its text is made from the code, so that both agree.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from penstock.cli.main import app
from penstock.config import CONFIG_FILE, EngineConfig
from penstock.models.gguf_translation import ARCHITECTURES
from penstock.models.spec import FAMILIES
from penstock.request import Finished, Output, PrefillProgress, SamplingParams, Token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    spelling: str
    help: str


NO_FLAG = Flag(spelling="", help="")
MARKER = re.compile(r"<!-- generated: ([\w-]+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](), markdown)


def commands() -> str:
    return "\n\n".join(_command(name, command) for name, command in _leaves())


def engine_settings() -> str:
    flags, comments = _flags_by_name(), _comments(EngineConfig)
    rows = [
        (
            _code(field.name),
            _code(flags.get(field.name, NO_FLAG).spelling),
            _code(f"PENSTOCK_{field.name.upper()}"),
            _default(field.default),
            _meaning(flags.get(field.name, NO_FLAG).help, comments.get(field.name, "")),
        )
        for field in dataclasses.fields(EngineConfig)
    ]
    return _table(("setting", "flag", "environment", "default", "meaning"), rows)


def sampling_settings() -> str:
    flags, comments = _flags_by_name(), _comments(SamplingParams)
    rows = [
        (
            _code(field.name),
            _code(flags.get(field.name, NO_FLAG).spelling),
            _code(str(field.type)),
            _default(field.default),
            _meaning(flags.get(field.name, NO_FLAG).help, comments.get(field.name, "")),
        )
        for field in dataclasses.fields(SamplingParams)
    ]
    return _table(("setting", "flag", "type", "default", "meaning"), rows)


def settings_file() -> str:
    return _code(CONFIG_FILE)


def families() -> str:
    gguf_names: dict[str, list[str]] = {}
    for name, family in ARCHITECTURES.items():
        gguf_names.setdefault(family.model_type, []).append(name)
    # A llama file with a sliding window is a mistral model.
    gguf_names.setdefault("mistral", []).append("llama")
    rows = [(_code(name), ", ".join(map(_code, gguf_names.get(name, []))) or "not read") for name in FAMILIES]
    return _table(("`model_type` of a folder", "architecture of a GGUF file"), rows)


def fields_of(kind: type) -> Callable[[], str]:
    def table() -> str:
        comments = _comments(kind)
        rows = []
        for field in dataclasses.fields(kind):
            default = "required" if field.default is dataclasses.MISSING else _default(field.default)
            rows.append((_code(field.name), _code(str(field.type)), default, _meaning(comments.get(field.name, ""))))
        return _table(("field", "type", "default", "meaning"), rows)

    return table


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "engine-settings": engine_settings,
    "settings-file": settings_file,
    "families": families,
    "sampling-settings": sampling_settings,
    "prefill-progress": fields_of(PrefillProgress),
    "token": fields_of(Token),
    "finished": fields_of(Finished),
    "output": fields_of(Output),
}


def _command(name: str, command: Any) -> str:
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    rows = [
        (
            ", ".join(map(_code, _spellings(parameter))),
            _kind(hints[parameter.name]) + (", repeatable" if parameter.multiple else ""),
            _default(parameter.default),
            _meaning(parameter.help or ""),
        )
        for parameter in sorted(command.params, key=lambda parameter: parameter.param_type_name)
    ]
    return f"## penstock {name}\n\n{command.help}\n\n" + _table(("flag", "value", "default", "meaning"), rows)


def _spellings(parameter: Any) -> list[str]:
    is_argument = parameter.param_type_name == "argument"
    return [parameter.metavar or parameter.name.upper()] if is_argument else sorted(parameter.opts, key=len)


def _flags_by_name() -> dict[str, Flag]:
    return {
        parameter.name: Flag(spelling=_spellings(parameter)[-1], help=parameter.help or "")
        for name, command in reversed(_leaves())
        for parameter in command.params
    }


def _leaves() -> list[tuple[str, Any]]:
    """Every command that does something, with its whole name: `bench schedule`, not `bench`."""
    found: list[tuple[str, Any]] = []
    pending = [("", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop(0)
        inner = getattr(command, "commands", None)
        if inner is None:
            found.append((name, command))
        else:
            pending += [(f"{name} {child}".strip(), value) for child, value in inner.items()]
    return found


def _kind(hint: Any) -> str:
    """`str | None`, annotated or not, is text."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is list:
        hint = typing.get_args(hint)[0]
    return {str: "text", int: "whole number", float: "number", bool: "switch", Path: "file"}[hint]


def _comments(kind: type) -> dict[str, str]:
    """The comment behind each field, as it stands in the source."""
    found = re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(kind), flags=re.MULTILINE)
    return dict(found)


def _meaning(*texts: str) -> str:
    """The texts as sentences, none of them twice. Help texts are sentences already, comments are not."""
    sentences = [text if text.endswith(".") else f"{text[:1].upper()}{text[1:]}." for text in texts if text]
    return _cell(" ".join(dict.fromkeys(sentences)))


def _default(value: object) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return _code(str(value))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""  # within backticks a bar ends no cell


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
