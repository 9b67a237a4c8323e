"""A quick look at a model in memory: does a short prompt in chunks give the logits of the whole prompt?"""

# T tokens, V vocabulary

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.lanes.forward_call import TextCall, cache_name, read_in_chunks

NUM_TOKENS = 24
CHUNK_SIZES = (7, 3, 1)
NUM_PROMPTS = 3
EXACT_FLOAT32 = 1e-4  # of the logits' deviation, where that is above 1
LOW_PRECISION_STEPS = 8  # roundings of the largest logit; less cannot be told from rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkVerdict:
    exact: bool
    max_difference: float
    reason: str


def chunk_check(model: Any, *, chunk_sizes: tuple[int, ...] = CHUNK_SIZES, num_padding: int = 0) -> ChunkVerdict:
    """A chunk size is wrong if two of three prompts are, because near ties of a router may turn on rounding."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            trials = [trial for size in chunk_sizes for trial in _trials(model, size, num_padding)]
    except (PenstockError, RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        problem = " ".join(str(error).split())[:200]
        reason = f"a forward over a chunk fails ({problem})."
        return ChunkVerdict(exact=False, max_difference=float("inf"), reason=reason)
    finally:
        model.train(was_training)
    worst = max(trials, key=lambda trial: trial.difference / trial.limit)
    wrong = [size for size in chunk_sizes if sum(t.is_wrong for t in trials if t.chunk_size == size) >= 2]
    what = f"in chunks of {wrong[0]}" if wrong else "in chunks"
    reason = f"{what}, its logits differ by {worst.difference:.2g} from the whole prompt's (limit {worst.limit:.2g})."
    return ChunkVerdict(exact=not wrong, max_difference=worst.difference, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    chunk_size: int
    difference: float
    limit: float

    @property
    def is_wrong(self) -> bool:
        return not self.difference <= self.limit  # also where it is not a number


def _trials(model: Any, chunk_size: int, num_padding: int) -> list[_Trial]:
    """One prompt, and two more where it fails."""
    trials: list[_Trial] = []
    for seed in range(NUM_PROMPTS):
        difference, limit = _difference_and_limit(model, seed, chunk_size, num_padding)
        trials.append(_Trial(chunk_size=chunk_size, difference=difference, limit=limit))
        if not trials[0].is_wrong:
            break
    return trials


def _difference_and_limit(model: Any, seed: int, chunk_size: int, num_padding: int) -> tuple[float, float]:
    inputs = _inputs(model, seed, num_padding)
    whole_TV = model(**inputs, use_cache=True, return_dict=True).logits[0, num_padding:].float()
    chunked_TV = (
        read_in_chunks(
            model,
            TextCall.of(inputs),
            model=model,
            cache=(cache_name(model.forward), None),
            chunk_limit=lambda start: chunk_size,
            num_logit_rows=None,
            takes_logit_rows=False,
            on_chunk=lambda start, end, reason: None,
        )
        .logits[0, num_padding:]
        .float()
    )
    return float((whole_TV - chunked_TV).abs().max()), exact_limit(model, whole_TV)


def exact_limit(model: Any, logits: torch.Tensor) -> float:
    """The largest difference from these logits that is rounding."""
    limit = EXACT_FLOAT32 * max(1.0, float(logits.std()))
    if model.dtype != torch.float32:
        limit = max(limit, LOW_PRECISION_STEPS * torch.finfo(model.dtype).eps * float(logits.abs().max()))
    return limit


def _inputs(model: Any, seed: int, num_padding: int) -> dict[str, torch.Tensor]:
    """Ordinary tokens, no placeholders of media; the first `num_padding` are masked."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, NUM_TOKENS), generator=generator)
    for name in ("image_token_id", "video_token_id", "audio_token_id", "image_token_index", "pad_token_id"):
        if isinstance(special := getattr(model.config, name, None), int):
            ids[ids == special] = (special + 1) % vocabulary
    inputs = {"input_ids": ids.to(model.device)}
    positions = torch.arange(NUM_TOKENS, device=model.device)[None] - num_padding
    if num_padding:
        inputs["attention_mask"] = (positions >= 0).long()
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = positions.clamp(min=0)
    return inputs
