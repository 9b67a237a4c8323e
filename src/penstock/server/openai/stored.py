"""Responses that are kept for a while, so that the next one can go on from there."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.server.problems import Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    answer: bytes  # JSON, as it was sent
    messages: bytes  # JSON, of the conversation with this answer, without instructions

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.messages)


class StoredResponses:
    """Keeps responses within a number of bytes; those that nobody asked for the longest go first.

    Each is found again only by requests of its own scope, which is that of their API key.
    """

    def __init__(self, max_bytes: int, code: str | None = None, way_out: str = "as input") -> None:
        """`code`: by which clients know that one is gone. `way_out`: where the whole conversation can be sent."""
        self._max_bytes, self._code, self._way_out = max_bytes, code, way_out
        self._num_bytes = 0
        self._found: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, scope: str, answer: dict[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        kept = StoredResponse(answer=_json(answer), messages=_json(messages))
        with self._lock:
            self._drop((scope, answer["id"]))
            if kept.num_bytes > self._max_bytes:
                return  # nor is anything else forgotten for it
            self._found[scope, answer["id"]] = kept
            self._num_bytes += kept.num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._found)))

    def answer(self, scope: str, response_id: str) -> Any:
        return json.loads(self._kept(scope, response_id).answer)

    def messages(self, scope: str, response_id: str) -> list[dict[str, Any]]:
        return json.loads(self._kept(scope, response_id).messages)

    def delete(self, scope: str, response_id: str) -> None:
        self._kept(scope, response_id)
        with self._lock:
            self._drop((scope, response_id))

    def _kept(self, scope: str, response_id: str) -> StoredResponse:
        with self._lock:
            kept = self._found.get((scope, response_id))
            if kept is None:
                raise Refused(
                    f"There is no response {response_id[:80]!r} any more. Send the whole conversation {self._way_out}.",
                    status=404,
                    param=None if self._code else "previous_response_id",
                    code=self._code,
                )
            self._found.move_to_end((scope, response_id))
        return kept

    def _drop(self, key: tuple[str, str]) -> None:
        if (dropped := self._found.pop(key, None)) is not None:
            self._num_bytes -= dropped.num_bytes


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
