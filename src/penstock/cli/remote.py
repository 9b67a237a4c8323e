"""`chat --url`: the same conversation with a model that a server runs."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from penstock.cli.terminal import EXIT_OK, Interrupt, ReadingBar, ask_user, duration
from penstock.errors import InvalidSetting, PenstockError

TIMEOUT_S = 600


class ServerError(PenstockError):
    """What the server said, or that it cannot be reached."""


class RemoteModel:
    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidSetting(f"The address is {url!r}; it must begin with http:// or https://.")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        with self._open("/v1/models") as answer:
            self.name: str = json.load(answer)["data"][0]["id"]

    def stream(self, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The parts of an answer as they come. Closing the iterator leaves, and the server stops within one chunk."""
        asked = {key: value for key, value in sampling.items() if value is not None}
        options = {"stream": True, "return_progress": True, "stream_options": {"include_usage": True}}
        body = {"model": self.name, "messages": messages, **asked, **options}
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


def run_remote_chat(
    url: str, api_key: str | None, *, system: str | None, document: str, sampling: dict[str, Any]
) -> int:
    console = Console(stderr=True, highlight=False)
    model = RemoteModel(url, api_key)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    console.print(f"{model.name} at {url}. An empty line or Ctrl-D ends the chat.", style="dim")
    while text := ask_user(console):
        messages.append({"role": "user", "content": f"{document}\n\n{text}" if document else text})
        try:
            answer = _follow(model, messages, sampling, console)
        except ServerError as error:
            console.print(f"penstock: {error}", style="red")
            messages.pop()
            continue
        document = ""
        messages.append({"role": "assistant", "content": answer})
    return EXIT_OK


def _follow(model: RemoteModel, messages: list[dict[str, str]], sampling: dict[str, Any], console: Console) -> str:
    bar, said, usage = ReadingBar(console), [], None
    parts = model.stream(messages, sampling)
    with Interrupt().watching() as interrupt:
        try:
            for part in parts:
                usage = part.get("usage") or usage
                if progress := part.get("prompt_progress"):
                    _show(bar, progress)
                for choice in part["choices"]:
                    bar.close()
                    said.append(choice["delta"].get("content") or "")
                    sys.stdout.write(said[-1])
                    sys.stdout.flush()
                if interrupt.is_requested:
                    break
        finally:
            bar.close()
            parts.close()  # ty: ignore[missing-attribute]
    sys.stdout.write("\n")
    sys.stdout.flush()
    console.print(_summary(usage), style="dim" if usage else "yellow")
    return "".join(said)


def _show(bar: ReadingBar, progress: dict[str, Any]) -> None:
    waits = f"waiting, place {progress['queue_position']}"
    left = "" if progress["eta_ms"] is None else f"{duration(progress['eta_ms'] / 1e3)} left"
    bar.show(
        total=progress["total"],
        completed=progress["processed"],
        done=f"{progress['processed']:,}/{progress['total']:,} tokens",
        speed=waits if progress["queue_position"] else left,
        memory="",
    )


def _summary(usage: dict[str, Any] | None) -> str:
    if usage is None:
        return "Stopped."
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return f"read {usage['prompt_tokens']:,} tokens ({cached:,} of them cached); wrote {usage['completion_tokens']:,}"
