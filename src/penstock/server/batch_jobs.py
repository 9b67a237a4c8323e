"""Batches of the server: files of requests, answered one file after the other beside whoever else asks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp

from penstock.batch.answers import AnswerFile, is_failed
from penstock.batch.lines import lines_of
from penstock.batch.run import Batch, BatchCounts
from penstock.errors import EngineClosed
from penstock.server.inside import post_inside
from penstock.server.kept_files import KeptFiles, write_whole
from penstock.server.problems import Refused, problem_of
from penstock.server.service import Service

log = logging.getLogger("penstock.server")

MAX_BATCHES = 1000
LAST = 2**31 - 1  # the priority of lines that name none: whoever asks for one answer goes first
BUSY, RETRY_S = 429, 1.0
WINDOW_BYTES = 1 << 20  # of lines that are read and put in order at once, while everybody waits
DAY_S = 86_400
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
Ending = Literal["completed", "failed", "expired", "cancelled"]
Status = Literal["validating", "in_progress", "finalizing", "cancelling"] | Ending
ENDED = ("completed", "failed", "expired", "cancelled")


class RequestCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchMistake(BaseModel):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchMistakes(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchMistake]


class BatchObject(BaseModel):
    """Describes a batch, as OpenAI's API does."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchMistakes | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class _Job(BaseModel):
    scope: str
    batch: BatchObject

    def enter(self, status: Status) -> None:
        self.batch.status = status
        if status != "validating":
            setattr(self.batch, f"{status}_at", int(time.time()))


class BatchJobs:
    """Answers one batch after the other; what a server that ends leaves unanswered, the next one goes on with."""

    def __init__(self, app: ASGIApp, service: Service, folder: Path, files: KeptFiles) -> None:
        self._app = app
        self._service = service
        self._files = files
        self._folder = folder
        self._jobs: dict[str, _Job] = {}
        self._waiting: asyncio.Queue[_Job] = asyncio.Queue()
        self._running: tuple[_Job, asyncio.Task[None]] | None = None
        self._worker: asyncio.Task[None] | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def start(self) -> None:
        """Takes up the batches of an earlier server, the oldest first."""
        found = sorted(self._found(), key=lambda job: job.batch.created_at)
        self._jobs = {job.batch.id: job for job in found}
        for job in found:
            if job.batch.status not in ENDED:
                self._waiting.put_nowait(job)
        self._worker = asyncio.create_task(self._work())

    def _found(self) -> Iterator[_Job]:
        for path in self._folder.glob("batch_*.json"):
            with suppress(ValidationError):
                yield _Job.model_validate_json(path.read_bytes())

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})

    async def create(
        self, scope: str, file_id: str, endpoint: Endpoint, metadata: dict[str, str] | None
    ) -> BatchObject:
        self._files.find(scope, file_id)
        self._forget_old()
        total = await asyncio.to_thread(_num_lines, self._files.path(file_id))
        if total == 0:
            raise Refused("The file has no lines. Write one JSON request a line.", param="input_file_id")
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=endpoint,
            input_file_id=file_id,
            created_at=now,
            expires_at=now + DAY_S,
            request_counts=RequestCounts(total=total),
            metadata=metadata,
        )
        job = self._jobs[batch.id] = _Job(scope=scope, batch=batch)
        self._save(job)
        self._waiting.put_nowait(job)
        return batch

    def _forget_old(self) -> None:
        """Makes room for one more; only batches that have ended are forgotten."""
        while len(self._jobs) >= MAX_BATCHES:
            old = next((job for job in self._jobs.values() if job.batch.status in ENDED), None)
            if old is None:
                raise Refused(f"{MAX_BATCHES} batches wait, the most there may be. Try again later.", status=429)
            del self._jobs[old.batch.id]
            self._record(old).unlink(missing_ok=True)

    def find(self, scope: str, batch_id: str) -> BatchObject:
        return self._job(scope, batch_id).batch

    def listed(self, scope: str) -> list[BatchObject]:
        """Lists batches, the newest first."""
        return [job.batch for job in reversed(self._jobs.values()) if job.scope == scope]

    def cancel(self, scope: str, batch_id: str) -> BatchObject:
        job = self._job(scope, batch_id)
        if job.batch.status in ENDED:
            raise Refused(f"The batch is {job.batch.status} already.", status=409)
        job.enter("cancelling")
        if self._running is not None and self._running[0] is job:
            self._running[1].cancel()
        self._save(job)
        return job.batch

    def _job(self, scope: str, batch_id: str) -> _Job:
        job = self._jobs.get(batch_id)
        if job is None or job.scope != scope:
            raise Refused(f"There is no batch {batch_id[:80]!r}. List those that there are at /v1/batches.", status=404)
        return job

    async def _work(self) -> None:
        while True:
            job = await self._waiting.get()
            task = asyncio.create_task(self._run(job))
            self._running = job, task
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:  # the server ends: the batch stays as it is, for the next one
                task.cancel()
                await asyncio.wait({task})
                raise
            finally:
                self._running = None

    async def _run(self, job: _Job) -> None:
        """Answers the lines, whatever ends that, and publishes the answers that there are."""
        ending: Ending | None = "cancelled"
        if job.batch.status != "cancelling":
            job.enter("in_progress")
            self._save(job)
            ending = await self._ending(job)
        if ending is None:
            return  # the server ends, and the next one goes on
        job.enter("finalizing")
        with suppress(FileNotFoundError):  # nothing was answered
            await asyncio.to_thread(self._publish, job)
        job.enter(ending)
        self._save(job)
        counts = job.batch.request_counts.model_dump()
        log.info("batch ended", extra={"batch_id": job.batch.id, "status": ending, **counts})

    async def _ending(self, job: _Job) -> Ending | None:
        try:
            async with asyncio.timeout(job.batch.expires_at - time.time()):
                await self._answer(job)
        except TimeoutError:
            return "expired"
        except EngineClosed:
            return None
        except asyncio.CancelledError:
            if job.batch.status != "cancelling":
                raise
            return "cancelled"
        except Exception as error:
            _, answer = problem_of(error, job.batch.id)
            job.batch.errors = BatchMistakes(data=[BatchMistake(code="failed", message=answer.error.message)])
            return "failed"
        return "completed"

    async def _answer(self, job: _Job) -> None:
        answers = AnswerFile(self._answers(job))
        try:
            with self._files.path(job.batch.input_file_id).open("rb") as file:
                batch = Batch(
                    partial(self._post, job.scope),
                    answers,
                    defaults={"model": self._service.name, "priority": LAST},
                    most_at_once=max(1, self._service.config.max_running // 2),
                    watch=partial(self._watch, job, answers),
                    route=job.batch.endpoint,
                    window_bytes=WINDOW_BYTES,
                )
                await batch.run(lines_of(file))
        except FileNotFoundError:
            raise Refused("The file of requests was deleted. Put it there again, and create another batch.") from None
        finally:
            answers.close()

    def _watch(self, job: _Job, answers: AnswerFile, counts: BatchCounts) -> None:
        job.batch.request_counts.failed = answers.num_failed
        job.batch.request_counts.completed = counts.num_lines + counts.num_skipped - answers.num_failed
        if not self._files.has_room(answers.num_bytes):
            raise Refused("No room is left for answers. Delete files, or start a server with a higher --max-files-mib.")

    async def _post(self, scope: str, route: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        while True:
            status, answer = await post_inside(self._app, route, body, request_id, sharing_scope=scope)
            if status != BUSY:
                self._service.metrics.batch_lines.labels(str(status)).inc()
                return status, answer
            await asyncio.sleep(RETRY_S)

    def _publish(self, job: _Job) -> None:
        """Parts the answers into a file of those that were given and one of failures."""
        source, batch = self._answers(job), job.batch
        if batch.request_counts.failed:
            wrong = source.with_suffix(".errors.part")
            right = source.with_suffix(".answers.part")
            with source.open("rb") as lines, wrong.open("wb") as failed, right.open("wb") as answered:
                for line in lines:
                    (failed if is_failed(line) else answered).write(line)
            batch.error_file_id = self._files.adopt(job.scope, wrong, f"{batch.id}_errors.jsonl").id
            source.unlink()
            source = right
        if source.stat().st_size:
            batch.output_file_id = self._files.adopt(job.scope, source, f"{batch.id}_output.jsonl").id
        else:
            source.unlink()

    def _answers(self, job: _Job) -> Path:
        return self._folder / f"{job.batch.id}.jsonl"

    def _record(self, job: _Job) -> Path:
        return self._folder / f"{job.batch.id}.json"

    def _save(self, job: _Job) -> None:
        write_whole(self._record(job), job.model_dump_json())


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in lines_of(file))
