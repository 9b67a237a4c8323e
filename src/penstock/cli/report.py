"""The JSON documents that commands print; nothing else makes JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.document import Document
from penstock.plan.memory import over_budget
from penstock.plan.placement import StreamingPlan
from penstock.trace.document import TraceLane

if TYPE_CHECKING:
    from penstock.engine.planning import ModelPlan
    from penstock.lanes.lane import LaneFacts
    from penstock.plan.prompt_plan import PromptPlan
    from penstock.request import Output
    from penstock.schedule.moves import DiskUse


class RunPlan(Document):
    chunk_size: int  # the largest chunk of the plan
    num_chunks: int  # that the plan has for this prompt
    peak_bytes: int  # that the plan predicts
    adjustments: list[str]  # what had to be changed, or was done whole instead of streamed; and a peak above --memory


class ReportedChunk(Document):
    start: int  # its first token; of a source that an encoder reads, positions count work
    end: int  # the token after its last
    ms: float  # of the whole step


class PeakBytes(Document):
    measured: int  # the most resident memory that the process ever had
    predicted: int  # the largest prediction among the steps of this request


class Logprob(Document):
    token_id: int  # the token of the answer
    logprob: float  # of the model itself, before penalties and temperature
    alternatives: list[tuple[int, float]]  # pairs of token and log-probability


class DiskReport(Document):
    loaded_tokens: int  # of keys and values that came from the folder
    loaded_bytes: int  # that they took
    stored_tokens: int  # of those that were in the folder when the answer ended; others follow until the process ends
    stored_bytes: int  # that they took
    num_misses: int  # slabs that were gone or damaged
    saved_s: float  # what reading the loaded tokens is predicted to take, less the loads


class PrintedReport(Document):
    def to_json(self) -> str:
        """Leaves out the fields that are there only where something was given."""
        return self.model_dump_json(indent=2, exclude_defaults=True)


class RunReport(PrintedReport):
    model: str  # as it was named
    lane: TraceLane  # the facts of the lane
    plan: RunPlan  # what was expected
    prompt_tokens: int  # after an interruption: those that were taken from the input
    cached_tokens: int  # of the prompt, from the prefix cache; a new process has those of the cache folder alone
    chunks: list[ReportedChunk]  # every chunk that was computed for the prompt
    token_ids: list[int]  # the answer, with the end token if there was one
    text: str  # the answer
    finish_reason: str  # stop (an end token or a stop string), length (--max-tokens or the context) or abort
    ttft_ms: float | None  # from submission to the first token of the answer; null if there was none
    prefill_tokens_per_s: float  # prompt tokens computed, by the time from the first chunk to the first token
    decode_tokens_per_s: float  # tokens after the first one, by the time that they took
    peak_bytes: PeakBytes  # measured and predicted
    logprobs: list[Logprob] | None = None  # only where --logprobs was given
    disk: DiskReport | None = None  # only with a cache folder

    @classmethod
    def of(
        cls,
        model: str,
        facts: LaneFacts,
        plan: PromptPlan,
        output: Output,
        *,
        memory: int | None = None,
        disk: DiskUse | None = None,
    ) -> RunReport:
        """Makes the report of a run; `memory`: the budget that was given, if any."""
        over = over_budget(output.peak_bytes, memory)
        adjustments = [*plan.adjustments, *([over] if over else [])]
        return cls.from_fields_of(
            output,
            model=model,
            lane=TraceLane.of(facts.after_reading(output.num_prompt_chunks)),
            plan=RunPlan.from_fields_of(plan, adjustments=adjustments),
            prompt_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            chunks=[ReportedChunk(start=chunk.start, end=chunk.end, ms=round(chunk.ms, 3)) for chunk in output.chunks],
            ttft_ms=None if output.ttft_s is None else round(output.ttft_s * 1e3, 3),
            prefill_tokens_per_s=round(output.prefill_tokens_per_s, 2),
            decode_tokens_per_s=round(output.decode_tokens_per_s, 2),
            peak_bytes=PeakBytes(measured=output.peak_bytes, predicted=output.predicted_peak_bytes),
            logprobs=None if output.logprobs is None else [Logprob.from_fields_of(each) for each in output.logprobs],
            disk=None if disk is None else DiskReport.from_fields_of(disk, saved_s=round(disk.saved_s, 3)),
        )


class PlanReport(PrintedReport):
    model: str  # as it was named
    lane: TraceLane  # the facts of the lane
    prompt_tokens: int  # as given
    chunk_size: int  # the largest chunk
    num_chunks: int  # that the prompt is read in
    runtime_bytes: int  # Python, torch and libraries: a constant, since a plan does not load torch
    weight_bytes: int  # in the chosen data type
    kv_bytes: int  # keys and values of the whole prompt
    state_bytes: int  # recurrent state
    activation_bytes: int  # of the largest chunk, at the end of the prompt; with what images need
    logits_bytes: int  # of one token
    peak_bytes: int  # the highest over the chunks
    fits: bool  # both the budget and the context
    adjustments: list[str]  # every value that had to be changed
    adapter: str | None = None  # its name; only where --adapter was given
    streaming: StreamingPlan | None = None  # what layers on disk cost; only where some do not stay in memory
    disk_bytes: int | None = None  # of the prompt in the cache folder; only with --cache-dir
    recording_bytes: int | None = None  # of captured steps; only on a GPU

    @classmethod
    def of(cls, plan: ModelPlan) -> PlanReport:
        prompt = plan.prompt
        return cls.from_fields_of(
            prompt,
            model=plan.model,
            adapter=plan.adapter,
            disk_bytes=plan.disk_bytes,
            lane=TraceLane.of(plan.lane.after_reading(prompt.num_chunks)),
            activation_bytes=prompt.activation_bytes + prompt.media_bytes,
            streaming=plan.streaming,
            recording_bytes=prompt.recording_bytes or None,
        )
