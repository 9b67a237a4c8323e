"""`chat --url`: the same conversation with a model that a server runs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import closing
from typing import Any

from rich.console import Console

from penstock.cli.terminal import ShownAnswer, duration
from penstock.errors import InvalidSetting, PenstockError

TIMEOUT_S = 600


class ServerError(PenstockError):
    """What the server said, or that it cannot be reached."""


class RemoteModel:
    def __init__(self, url: str, api_key: str | None, sampling: dict[str, Any], console: Console) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidSetting(f"The address is {url!r}; it must begin with http:// or https://.")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._console = console
        with self._open("/v1/models") as answer:
            self.name: str = json.load(answer)["data"][0]["id"]

    def answer(self, messages: list[dict[str, Any]]) -> str:
        """Shows an answer as it comes; leaving it early makes the server stop within one chunk."""
        usage = None
        with ShownAnswer(self._console) as shown, closing(self._stream(messages)) as parts:
            for part in parts:
                usage = part.get("usage") or usage
                if progress := part.get("prompt_progress"):
                    shown.read(progress["processed"], progress["total"], _told(progress))
                for choice in part["choices"]:
                    shown.write(choice["delta"].get("content") or "")
                if shown.is_interrupted:
                    break
        self._console.print(_summary(usage), style="dim" if usage else "yellow")
        return shown.text

    def _stream(self, messages: list[dict[str, Any]]) -> Generator[dict[str, Any]]:
        options = {"stream": True, "return_progress": True, "stream_options": {"include_usage": True}}
        body = {"model": self.name, "messages": messages, **self._sampling, **options}
        with self._open("/v1/chat/completions", body) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line.removeprefix(b"data: "))
                if error := part.get("error"):
                    raise ServerError(error["message"])
                yield part

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise ServerError(_message(error)) from None
        except (urllib.error.URLError, OSError) as error:
            raise ServerError(f"The server at {self._url} cannot be reached: {error}. Is it running?") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"The server answered {error.code} {error.reason}."


def _told(progress: dict[str, Any]) -> list[str]:
    waits = f"waiting, place {progress['queue_position']}"
    left = [] if progress["eta_ms"] is None else [f"{duration(progress['eta_ms'] / 1e3)} left"]
    done = f"{progress['processed']:,}/{progress['total']:,} tokens"
    return [done, waits] if progress["queue_position"] else [done, *left]


def _summary(usage: dict[str, Any] | None) -> str:
    if usage is None:
        return "Stopped."
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return f"read {usage['prompt_tokens']:,} tokens ({cached:,} of them cached); wrote {usage['completion_tokens']:,}"
