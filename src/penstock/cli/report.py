"""The JSON documents that commands print; nothing else makes JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from penstock.trace.document import Lane

if TYPE_CHECKING:
    from penstock.engine.planning import ModelPlan
    from penstock.lanes.lane import LaneFacts
    from penstock.plan.prompt_plan import PromptPlan
    from penstock.request import Output, TokenLogprob


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunPlan(_Document):
    chunk_size: int
    num_chunks: int
    peak_bytes: int
    adjustments: list[str]


class Chunk(_Document):
    start: int
    end: int
    ms: float


class PeakBytes(_Document):
    measured: int
    predicted: int


class Logprob(_Document):
    token_id: int
    logprob: float
    alternatives: list[tuple[int, float]]

    @classmethod
    def of(cls, logprob: TokenLogprob) -> Logprob:
        return cls(token_id=logprob.token_id, logprob=logprob.logprob, alternatives=list(logprob.alternatives))


class RunReport(_Document):
    model: str
    lane: Lane
    plan: RunPlan
    prompt_tokens: int
    cached_tokens: int
    chunks: list[Chunk]
    token_ids: list[int]
    text: str
    finish_reason: str
    ttft_ms: float | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    peak_bytes: PeakBytes
    logprobs: list[Logprob] | None = None  # only where --logprobs was given

    @classmethod
    def of(cls, model: str, facts: LaneFacts, plan: PromptPlan, adjustments: list[str], output: Output) -> RunReport:
        return cls(
            model=model,
            lane=Lane.of(facts.after_reading(output.num_prompt_chunks)),
            plan=RunPlan(
                chunk_size=plan.chunk_size,
                num_chunks=plan.num_chunks,
                peak_bytes=plan.peak_bytes,
                adjustments=adjustments,
            ),
            prompt_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            chunks=[Chunk(start=chunk.start, end=chunk.end, ms=round(chunk.ms, 3)) for chunk in output.chunks],
            token_ids=list(output.token_ids),
            text=output.text,
            finish_reason=output.finish_reason,
            ttft_ms=None if output.ttft_s is None else round(output.ttft_s * 1e3, 3),
            prefill_tokens_per_s=round(output.prefill_tokens_per_s, 2),
            decode_tokens_per_s=round(output.decode_tokens_per_s, 2),
            peak_bytes=PeakBytes(measured=output.peak_bytes, predicted=output.predicted_peak_bytes),
            logprobs=None if output.logprobs is None else [Logprob.of(logprob) for logprob in output.logprobs],
        )

    def to_json(self) -> str:
        return self.model_dump_json(indent=2, exclude={"logprobs"} if self.logprobs is None else None)


class PlanReport(_Document):
    model: str
    lane: Lane
    prompt_tokens: int
    chunk_size: int
    num_chunks: int
    runtime_bytes: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    activation_bytes: int
    logits_bytes: int
    peak_bytes: int
    fits: bool
    adjustments: list[str]

    @classmethod
    def of(cls, plan: ModelPlan) -> PlanReport:
        prompt = plan.prompt
        return cls(
            model=plan.model,
            lane=Lane.of(plan.lane.after_reading(prompt.num_chunks)),
            prompt_tokens=prompt.prompt_tokens,
            chunk_size=prompt.chunk_size,
            num_chunks=prompt.num_chunks,
            runtime_bytes=prompt.runtime_bytes,
            weight_bytes=prompt.weight_bytes,
            kv_bytes=prompt.kv_bytes,
            state_bytes=prompt.state_bytes,
            activation_bytes=prompt.activation_bytes + prompt.media_bytes,
            logits_bytes=prompt.logits_bytes,
            peak_bytes=prompt.peak_bytes,
            fits=prompt.fits,
            adjustments=list(prompt.adjustments),
        )

    def to_json(self) -> str:
        return self.model_dump_json(indent=2)
