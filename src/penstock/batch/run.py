"""Runs a batch: lines go out beside each other, as many as keep the engine busy, and answers come in as they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.batch.answers import AnswerFile, answer_name
from penstock.batch.lines import WINDOW_BYTES, InvalidLine, Line, in_order, read_line
from penstock.errors import EngineClosed

Post = Callable[[str, bytes, str], Awaitable[tuple[int, bytes]]]  # (route, body, id of the request): (status, body)
STOPPING = 503  # the engine takes no more: what was asked stays unanswered, for the next run


@dataclass(slots=True)
class BatchCounts:
    num_lines: int = 0  # that are answered now
    num_bytes: int = 0  # of them, and of the answers that were there before
    num_skipped: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0

    def add_usage(self, usage: Mapping[str, Any]) -> None:
        """Adds what one answer took; the API of responses has other names for it."""
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.cached_tokens += details.get("cached_tokens", 0)
        self.written_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))


class Batch:
    def __init__(
        self,
        post: Post,
        answers: AnswerFile,
        *,
        defaults: Mapping[str, Any],
        most_at_once: int,
        watch: Callable[[BatchCounts], None],
        route: str | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """`watch` is called with every line that is answered or was answered before. `route`: of all lines."""
        self._post = post
        self._answers = answers
        self._defaults = defaults
        self._room = asyncio.Semaphore(most_at_once)
        self._watch = watch
        self._route = route
        self._window_bytes = window_bytes
        self.counts = BatchCounts()

    async def run(self, lines: Iterator[Line]) -> None:
        """Answers every line that has no answer yet. Cancelled, it leaves the others for the next run."""
        try:
            async with asyncio.TaskGroup() as group:
                for line in in_order(self._unanswered(lines), self._window_bytes):
                    await self._room.acquire()
                    group.create_task(self._answer(line))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _unanswered(self, lines: Iterator[Line]) -> Iterator[Line]:
        for line in lines:
            if not self._answers.has(line):
                yield line
                continue
            self.counts.num_skipped += 1
            self.counts.num_bytes += len(line.raw) + 1
            self._watch(self.counts)

    async def _answer(self, line: Line) -> None:
        try:
            await self._ask(line)
        finally:
            self._room.release()
        self.counts.num_lines += 1
        self.counts.num_bytes += len(line.raw) + 1
        self._watch(self.counts)

    async def _ask(self, line: Line) -> None:
        try:
            ask = read_line(line, self._defaults, self._route)
        except InvalidLine as error:
            self._answers.write_error(line, error.custom_id, str(error))
            return
        status, body = await self._post(ask.route, json.dumps(ask.body).encode(), answer_name(line))
        if status == STOPPING:
            raise EngineClosed("The engine takes no more requests. Run the batch again: it goes on where it ended.")
        self._answers.write(line, ask.custom_id, status, body)
        self.counts.add_usage(json.loads(body).get("usage") or {})
