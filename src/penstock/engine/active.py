"""What the engine keeps beside a running sequence: how its text is made, its times, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from penstock.engine.feed import TokenFeed
from penstock.engine.held_memory import HeldMemory
from penstock.engine.sampler import Sampler, token_logprob
from penstock.engine.stopping import StopText
from penstock.lanes.lane import LanePrompt
from penstock.plan.pace import Pace
from penstock.prompt.tokens import Detokenizer
from penstock.request import (
    Chunk,
    ChunkRecord,
    FinishReason,
    Hits,
    Output,
    PrefillProgress,
    Request,
    Token,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenToken:
    token: int
    finish: FinishReason | None
    event: Token


@dataclass(slots=True, kw_only=True)
class Active:
    request: Request
    prompt: LanePrompt
    feed: TokenFeed | None
    sampler: Sampler
    detokenizer: Detokenizer
    stop: StopText
    held: HeldMemory
    final_peak: Callable[[int, int], int]  # of a prompt, by the size of its chunks and its tokens
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    chunks: list[ChunkRecord] = field(default_factory=list)
    pace: Pace
    hits: Hits = field(default_factory=Hits)
    num_computed: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    predicted_bytes: int = 0
    swept_s: float = 0.0  # of the chunk that stands between two layers, in the steps before
    pooled: torch.Tensor | None = None  # None: no embedding is wanted, or nothing was read yet

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt.num_tokens if self.feed is None else self.feed.num_given

    def choose(self, token: int, logprob: TokenLogprob | None, *, is_end: bool, is_full: bool) -> ChosenToken:
        """The token as text, and whether the answer ends with it: a stop string may end it in the middle of one."""
        sampling = self.request.sampling
        is_end = is_end and not sampling.ignore_eos
        num_tokens = len(self.token_ids) + 1
        text = "" if is_end else self.detokenizer.push(token)
        if num_tokens > sampling.min_tokens:
            text = self.stop.push(text)
        finish: FinishReason | None = "stop" if is_end or self.stop.is_stopped or self.sampler.is_complete else None
        if finish is None and (num_tokens >= sampling.max_tokens or is_full):
            finish = "length"
        if finish is not None:
            text += self.stop.push(self.detokenizer.flush()) + self.stop.flush()
            finish = "stop" if self.stop.is_stopped else finish
        self.token_ids.append(token)
        self.text.append(text)
        if logprob is not None:
            self.logprobs.append(logprob)
        event = Token(request_id=self.request.id, token_id=token, text=text, logprob=logprob)
        return ChosenToken(token=token, finish=finish, event=event)

    def note_prompt_logprobs(self, tokens: list[int], first: int, rows: torch.Tensor) -> None:
        """Row i holds what the model expects after position first + i."""
        num_alternatives = self.request.sampling.prompt_logprobs or 0
        del self.prompt_logprobs[first + 1 :]  # of a reading before this one, which was broken off
        for index, row in enumerate(rows):
            position = first + index + 1
            if position < len(tokens):
                self.prompt_logprobs.append(token_logprob(row, tokens[position], num_alternatives))

    def note_pooled(self, pooled: torch.Tensor, *, is_first: bool) -> None:
        """Hidden states of one more chunk: their sum, or the last. A prompt that begins again starts from nothing."""
        is_sum = self.request.sampling.pooling == "mean" and not is_first and self.pooled is not None
        self.pooled = self.pooled + pooled if is_sum else pooled

    def progress(self, chunk: Chunk, now: float) -> PrefillProgress:
        feed, source = self.feed, self.request.source
        total = chunk.num_prompt_tokens if feed is None else chunk.num_prompt_tokens or feed.num_total
        estimate = max(total or (feed.num_total_estimate if feed else 0), chunk.end)
        num_computed = self.num_computed
        if source is not None:
            total = estimate = source.num_tokens
            num_computed = self.request.num_read(num_computed)
        elapsed = now - (self.started_at or now)
        speed = (num_computed - self.hits.num_tokens) / elapsed if elapsed > 0 else 0.0
        return PrefillProgress(
            request_id=self.request.id,
            num_computed=num_computed,
            num_cached=self.hits.num_tokens,
            num_total=total,
            num_total_estimate=estimate,
            chunk_start=chunk.start,
            chunk_end=chunk.end,
            elapsed_s=elapsed,
            tokens_per_s=speed,
            eta_s=self._seconds_left(num_computed, estimate, elapsed),
            memory_bytes=self.held.num_bytes,
            predicted_peak_bytes=self._final_peak(estimate),
        )

    def progress_within(self, chunk: Chunk, share: float, step_s: float, now: float) -> PrefillProgress:
        """Progress while a chunk is computed, of which a share of the layers is done, `step_s` after its step began."""
        num_done = chunk.start + int(share * chunk.num_tokens)
        estimate = max(chunk.num_prompt_tokens or (self.feed.num_total_estimate if self.feed else 0), chunk.end)
        speed = (num_done - chunk.start) / step_s if step_s > 0 else 0.0
        return PrefillProgress(
            request_id=self.request.id,
            num_computed=num_done,
            num_cached=self.hits.num_tokens,
            num_total=chunk.num_prompt_tokens,
            num_total_estimate=estimate,
            chunk_start=chunk.start,
            chunk_end=chunk.end,
            elapsed_s=now - (self.started_at or now - step_s),
            tokens_per_s=speed,
            eta_s=(estimate - num_done) / speed if speed else 0.0,
            memory_bytes=self.held.num_bytes,
            predicted_peak_bytes=self.predicted_bytes,
        )

    def _final_peak(self, num_tokens: int) -> int:
        """Predicts the peak that the whole prompt will have; of a source that is the first step's already."""
        first = self.chunks[0]
        planned = 0 if self.request.source else self.final_peak(first.end - first.start, num_tokens)
        return max(self.predicted_bytes, planned)

    def _seconds_left(self, num_done: int, num_total: int, elapsed_s: float) -> float:
        if self.request.source is None:
            return self.pace.seconds_left(num_done, num_total, elapsed_s)
        return elapsed_s * (num_total - num_done) / num_done if num_done else 0.0  # a tile sees all from the start

    def output(self, reason: FinishReason, now: float) -> Output:
        request, sampling, first, pooled = self.request, self.request.sampling, self.first_token_at, self.pooled
        return Output(
            request_id=request.id,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=request.num_read(self.num_computed),
            hits=self.hits,
            chunks=tuple(self.chunks),
            ttft_s=None if first is None else first - request.arrived_at,
            prefill_s=(first or now) - (self.started_at or now),
            decode_s=0.0 if first is None else now - first,
            peak_bytes=self.held.peak_bytes,
            predicted_peak_bytes=self.predicted_bytes,
            logprobs=None if sampling.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if sampling.prompt_logprobs is None else tuple(self.prompt_logprobs),
            embedding=None if pooled is None else tuple(torch.nn.functional.normalize(pooled, dim=0).tolist()),
        )
