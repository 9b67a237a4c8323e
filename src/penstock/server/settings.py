"""How a server is run: where it listens, who may ask, and how much."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.answer.formats import FORMATS, REASONINGS
from penstock.config import GIB, MIB
from penstock.errors import InvalidSetting

NAME = re.compile(r"[!-~]{1,128}")
TIMEOUTS = ("request_timeout_s", "keep_alive_s", "body_timeout_s", "whole_body_timeout_s", "header_timeout_s")
LIMITS = ("max_body_bytes", "max_files_bytes", "max_image_bytes", "max_choices", "max_prompt_tokens")
CONNECTIONS = ("max_connections", "max_connections_per_client")


def name_of(model: str) -> str:
    """Names a model after its file or its folder; one that is no path keeps its name."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name or "model"
    return path.stem if path.is_file() else model


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    model: str
    name: str | None = None  # as clients know the model; None: that of its file or folder
    aliases: tuple[str, ...] = ()  # other names that it answers to
    tool_parser: str | None = None  # how the model writes calls; None: as its chat template shows
    reasoning_parser: str | None = None  # the same of reasoning; "none": it stays in the text
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # none: everybody who reaches the port may ask
    share_prefixes: bool = False  # between API keys; if not, requests find what was read for their own key alone
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # without a key, on a loopback address: names beside localhost
    max_body_bytes: int = 32 * MIB
    max_image_bytes: int = 20 * MIB
    max_prompt_tokens: int | None = None  # None: what the context and the memory hold
    max_choices: int = 16
    files: Path | None = None  # where files and batches are kept; None: a folder that ends with the server
    max_files_bytes: int = GIB
    max_stored_bytes: int = 16 * MIB  # of responses that can be asked for again, and as many of threads
    pin_s: float = 60.0  # for so long nothing evicts what an answer that ended with a call has read and written
    max_pinned_bytes: int | None = None  # of keys and values; None: half of the pages
    request_timeout_s: float | None = None  # None: a request may take as long as it needs
    drain_timeout_s: float = 30.0
    body_timeout_s: float = 60.0  # the longest pause while a body is sent, or an answer is read
    whole_body_timeout_s: float = 300.0
    header_timeout_s: float = 10.0  # until a connection has sent the headers of a request, its first or its next
    max_connections: int = 512  # fewer where the process may not open so many files
    max_connections_per_client: int = 256
    trace: Path | None = None  # written when the server ends
    keep_alive_s: float = 10.0  # a comment is sent when nothing else was for so long

    @property
    def served_name(self) -> str:
        return self.name or name_of(self.model)

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if name is not None and not NAME.fullmatch(name):
                raise InvalidSetting(f"A name of the model is {name!r}; give 1 to 128 visible characters.")
        for name, known in (("tool_parser", FORMATS), ("reasoning_parser", [*REASONINGS, "none"])):
            if (value := getattr(self, name)) is not None and value not in known:
                raise InvalidSetting(f"There is no {name} {value!r}; known ones are {', '.join(known)}.")
        for name in (*LIMITS, *CONNECTIONS):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidSetting(f"{name} is {value}; it must be at least 1.")
        for name in TIMEOUTS:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InvalidSetting(f"{name} is {value}; it must be above 0.")
        for name in ("pin_s", "max_pinned_bytes"):
            if (value := getattr(self, name)) is not None and not 0 <= value < float("inf"):
                raise InvalidSetting(f"{name} is {value}; it must be 0 (nothing is pinned) or more.")
        if not 0 <= self.port < 65536:
            raise InvalidSetting(f"The port is {self.port}; it must be 0 (any free one) to 65535.")
        if any(not key for key in self.api_keys):
            raise InvalidSetting("An API key is empty. Give one with at least 1 character, or none.")
