"""Work for a process of its own: what answers, refuses, takes for ever or too much memory, or breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import InvalidPrompt


def answering(given: str) -> Callable[[Any], Any]:
    num_asks = 0

    def work(value: Any) -> Any:
        nonlocal num_asks
        num_asks += 1
        match value:
            case "spin":
                while True:
                    pass
            case "eat":
                return len([bytes(1 << 20) + b"." for _ in range(4096)])
            case "refuse":
                raise InvalidPrompt("no")
            case "break":
                raise KeyError(value)
        return [given, num_asks, value]

    return work
