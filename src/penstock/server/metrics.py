"""Metrics for Prometheus, under the names that people already chart, and those of stalls, chunks and memory."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from penstock.engine.engine import Engine
from penstock.request import Chunk, Output, StepPlan, StepResult

if TYPE_CHECKING:
    from penstock.server.board import Board

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25),
    *(0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160),
)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Stalls:
    """How long streams wait for other people's prompts: what a step takes beyond one that only decodes."""

    def __init__(self) -> None:
        self.suffered_s: dict[int, float] = {}  # by the streams that are being written
        self.caused_s: dict[int, float] = {}
        self._decode_step_s: float | None = None  # a moving mean of steps without a prompt

    def take_step(self, plan: StepPlan, result: StepResult) -> float:
        """Seconds that streams suffered in this step, summed over them; its prompts caused exactly as many."""
        prompts = [chunk for chunk in plan.chunks if chunk.is_prefill]
        decoded = {chunk.sequence_id for chunk in plan.chunks if not chunk.is_prefill}
        total = 0.0
        if prompts and self.suffered_s:
            total = self._share_out(prompts, decoded, result.elapsed_s)
        elif decoded and not prompts:
            known = self._decode_step_s
            self._decode_step_s = result.elapsed_s if known is None else known + 0.1 * (result.elapsed_s - known)
        for chunk in prompts:
            self.caused_s.setdefault(chunk.sequence_id, 0.0)
            if chunk.wants_logits:
                self.suffered_s.setdefault(chunk.sequence_id, 0.0)
        return total

    def leave(self, request_id: int) -> tuple[float, float]:
        return self.suffered_s.pop(request_id, 0.0), self.caused_s.pop(request_id, 0.0)

    def _share_out(self, prompts: list[Chunk], decoded: set[int], elapsed_s: float) -> float:
        usual = self._decode_step_s or 0.0
        total = 0.0
        for stream in self.suffered_s:
            stall_s = max(0.0, elapsed_s - usual) if stream in decoded else elapsed_s
            self.suffered_s[stream] += stall_s
            total += stall_s
        num_tokens = sum(chunk.num_tokens for chunk in prompts)
        for chunk in prompts:
            known = self.caused_s.get(chunk.sequence_id, 0.0)
            self.caused_s[chunk.sequence_id] = known + total * chunk.num_tokens / num_tokens
        return total


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()
        registry = self.registry = CollectorRegistry()
        self._lock = threading.Lock()  # the step thread and the event loop both write stalls
        self._stalls = Stalls()

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"penstock:{name}", text, buckets=SECONDS, registry=registry)

        def tokens(name: str, text: str) -> Histogram:
            return Histogram(f"penstock:{name}", text, buckets=TOKENS, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"penstock:{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"penstock:{name}", text, labels, registry=registry)

        self._ttft = seconds("time_to_first_token_seconds", "From the arrival of a request to its first token.")
        self._itl = seconds("inter_token_latency_seconds", "Between two tokens of an answer.")
        self._e2e = seconds("e2e_request_latency_seconds", "From the arrival of a request to its end.")
        self._queue = seconds("request_queue_time_seconds", "From the arrival of a request to its first chunk.")
        self._prefill = seconds("request_prefill_time_seconds", "From the first chunk of a prompt to the first token.")
        self._decode = seconds("request_decode_time_seconds", "From the first token to the last.")
        self._prompt_lengths = tokens("request_prompt_tokens", "Tokens of prompts.")
        self._answer_lengths = tokens("request_generation_tokens", "Tokens of answers.")
        self._prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of answered requests.")
        self._generation_tokens = counter("generation_tokens_total", "Tokens written.")
        self._queries = counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits_total", "Prompt tokens found there.")
        self._hits_by_reason = counter(
            "prefix_cache_hits_by_reason_total", "The same, by the reason why they were still there.", "reason"
        )
        self._moved_bytes = counter("disk_bytes_total", "Bytes to and from the cache folder, by direction.", "kind")
        self._moved_tokens = counter("disk_tokens_total", "Tokens whose keys and values were moved so.", "kind")
        self._disk_misses = counter("disk_misses_total", "Slabs that were gone or could not be proven.")
        self._disk_saved = gauge("disk_saved_seconds", "Predicted time of reading what was loaded, less the loads.")
        self._pinned = gauge("pinned_bytes", "Keys and values that are spared until the result of a call comes.")
        self._layer_bytes = gauge("layer_bytes_read", "Bytes of layers that were read from disk for steps so far.")
        self._layer_wait = gauge("layer_wait_seconds", "Time that steps waited for them.")
        self._preemptions = counter("num_preemptions_total", "Requests sent back to the queue to make room.")
        self._success = counter("request_success_total", "Requests that ended, by reason.", "finished_reason")
        self.cancelled = counter("request_cancelled_total", "Requests that their clients left.")
        self.unread_calls = counter("unread_calls_total", "Times that an answer opened like a call and was none.")
        self.batch_lines = counter("batch_lines_total", "Lines of batches that were answered, by status.", "status")
        self._running = gauge("num_requests_running", "Requests that are being served.")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self._kv = gauge("kv_cache_usage_perc", "Share of the blocks that requests hold, 0 to 1.")
        self._step_time = seconds("step_time_seconds", "What steps took.")
        self._step_predicted = seconds("step_time_predicted_seconds", "What steps were predicted to take.")
        self._step_tokens = tokens("iteration_tokens_total", "Tokens of a step.")
        self._chunk_tokens = tokens("prefill_chunk_tokens", "Tokens of a prompt's chunk.")
        self._suffered = counter("stall_seconds_suffered_total", "Time that streams waited for other people's prompts.")
        self._caused = counter("stall_seconds_caused_total", "The same time, as prompts caused it.")
        self._stall_suffered = seconds(
            "request_stall_suffered_seconds", "Per request: time waited for others' prompts."
        )
        self._stall_caused = seconds("request_stall_caused_seconds", "Per request: time that others waited for it.")
        self._memory = gauge("memory_resident_bytes", "Memory that is held: of the process, or of the card.")
        self._memory_predicted = gauge("memory_predicted_bytes", "Peak that the last step was planned with.")
        self._memory_peak = gauge("memory_peak_bytes", "The most that was held so far.")
        self._memory_budget = gauge("memory_budget_bytes", "The byte budget.")
        self._latency_target = gauge("latency_target_seconds", "The latency target; 0 without one.")
        self._info = gauge("model_info", "1, with the model and its lane.", "model_name", "lane")

    def describe(self, model: str, engine: Engine, board: Board) -> None:
        pool = engine.scheduler.pool
        self._info.labels(model, engine.lane.id).set(1)
        self._memory_budget.set(engine.model.budget_bytes)
        self._latency_target.set((engine.config.latency_target_ms or 0) / 1e3)
        self._kv.set_function(lambda: pool.num_held / pool.num_blocks)
        block_bytes = engine.config.block_size * engine.model.memory.shape.kv_bytes_per_token
        self._pinned.set_function(lambda: pool.num_pinned * block_bytes)
        if (moves := engine.scheduler.moves) is not None:
            self._disk_saved.set_function(lambda: moves.use.saved_s)
        if (stream := engine.model.lane.stream) is not None:
            self._layer_bytes.set_function(lambda: stream.num_read)
            self._layer_wait.set_function(lambda: stream.waited_s)
        self._memory.set_function(lambda: engine.held.num_bytes)
        self._running.set_function(lambda: board.num_running)
        self._waiting.set_function(lambda: board.num_waiting)

    def take_step(self, plan: StepPlan, result: StepResult) -> None:
        with self._lock:
            stalled_s = self._stalls.take_step(plan, result)
        self._suffered.inc(stalled_s)
        self._caused.inc(stalled_s)
        self._step_time.observe(result.elapsed_s)
        if plan.predicted_s:
            self._step_predicted.observe(plan.predicted_s)
        self._step_tokens.observe(plan.num_tokens)
        for chunk in plan.chunks:
            if chunk.is_prefill and chunk.is_through:
                self._chunk_tokens.observe(chunk.num_tokens)
        for moved in result.moved:
            kind = moved.move.kind
            self._moved_bytes.labels(kind).inc(moved.num_bytes)
            self._moved_tokens.labels(kind).inc(len(moved.move.slab.tokens) if moved.is_done else 0)
            self._disk_misses.inc(kind == "load" and not moved.is_done)
        self._preemptions.inc(len(plan.preempted))
        self._memory_predicted.set(plan.predicted_bytes)
        self._memory_peak.set(result.peak_bytes)

    def take_token(self, seconds: float, is_first: bool) -> None:
        """`seconds` since the arrival for the first token of an answer, since the token before for others."""
        (self._ttft if is_first else self._itl).observe(seconds)
        self._generation_tokens.inc()

    def end_answer(self, seconds: float, output: Output) -> None:
        self._e2e.observe(seconds)
        self._success.labels(output.finish_reason).inc()
        self._prompt_tokens.inc(output.num_prompt_tokens)
        self._queries.inc(output.num_prompt_tokens)
        self._hits.inc(output.num_cached_tokens)
        for reason, num_tokens in asdict(output.hits).items():
            self._hits_by_reason.labels(reason).inc(num_tokens)
        self._prompt_lengths.observe(output.num_prompt_tokens)
        self._answer_lengths.observe(len(output.token_ids))
        self._prefill.observe(output.prefill_s)
        self._decode.observe(output.decode_s)

    def end_request(self, request_id: int, output: Output | None, queue_time_s: float | None) -> None:
        with self._lock:
            suffered_s, caused_s = self._stalls.leave(request_id)
        self._stall_suffered.observe(suffered_s)
        self._stall_caused.observe(caused_s)
        if queue_time_s is not None:
            self._queue.observe(queue_time_s)
        if output is None:
            self.cancelled.inc()

    def forget(self, request_id: int) -> None:
        with self._lock:
            self._stalls.leave(request_id)

    def text(self) -> bytes:
        return generate_latest(self.registry)
