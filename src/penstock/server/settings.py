"""How a server is run: where it listens, who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import InvalidSetting

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # none: everybody who reaches the port may ask
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB
    max_image_bytes: int = 20 * MIB
    max_prompt_tokens: int | None = None  # None: what the context and the memory hold
    max_choices: int = 16
    request_timeout_s: float | None = None  # None: a request may take as long as it needs
    drain_timeout_s: float = 30.0
    body_timeout_s: float = 60.0  # the longest pause while a body is sent
    trace: Path | None = None  # written when the server ends
    keep_alive_s: float = 10.0  # a comment is sent when nothing else was for so long

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_image_bytes", "max_choices"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise InvalidSetting(f"max_prompt_tokens is {self.max_prompt_tokens}; it must be at least 1.")
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise InvalidSetting(f"request_timeout_s is {self.request_timeout_s}; it must be above 0.")
        for name in ("keep_alive_s", "body_timeout_s"):
            if getattr(self, name) <= 0:
                raise InvalidSetting(f"{name} is {getattr(self, name)}; it must be above 0.")
        if not 0 <= self.port < 65536:
            raise InvalidSetting(f"The port is {self.port}; it must be 0 (any free one) to 65535.")
        if any(not key for key in self.api_keys):
            raise InvalidSetting("An API key is empty. Give one with at least 1 character, or none.")
