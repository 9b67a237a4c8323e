"""Proves on a small random copy of a model that reading in chunks gives what the whole prompt gives, and how to run it.

Everything is decided by what was measured: packed steps first, then the model's own cache, then no cache at all.
"""

# T tokens, V vocabulary

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.attention.cpu import CpuAttention
from penstock.cache.storage import KvStorage
from penstock.errors import UnsupportedModel
from penstock.lanes.own_cache import OwnCaches
from penstock.lanes.packed import CannotPack, PackedModel, attention_calls, use_paged_attention
from penstock.lanes.shrink import shrunken_models
from penstock.lanes.signature import ForwardSignature, read_signature
from penstock.lanes.verdicts import Finding, Verdict, Way

TOLERANCE = 1e-4  # times the deviation of the logits, where that is above 1
MOST_FAILURES = 1  # of three prompts: near-tied routers flip on rounding
PROMPT_LENGTHS = (47, 61, 67)
CHUNKINGS: tuple[tuple[int, ...], ...] = ((5, 1, 17, 2, 31), (7,), (3,), (1,))
# Of two sequences that advance in the same calls; the last takes what is left of both.
PACKED_SIZES = (*((1, 5), (9, 1), (3, 7), (1, 20)) * 2, (max(PROMPT_LENGTHS), max(PROMPT_LENGTHS)))
BLOCK_SIZE = 8
BFLOAT16_FACTOR = 1.5

# (storage, block size, heads) -> a backend over it
MakeAttention = Callable[[KvStorage, int, int], AttentionBackend]
# tokens of a sequence, sizes of its chunks -> logits [T, V]
Reader = Callable[[list[int], Iterator[int]], torch.Tensor]


def cpu_attention(storage: KvStorage, block_size: int, num_heads: int) -> AttentionBackend:
    return CpuAttention(storage, block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """Of one prompt: the largest over its rows, and what is allowed."""

    largest: float
    allowed: float

    @property
    def is_exact(self) -> bool:
        return self.largest <= self.allowed


def selfcheck(model: Any) -> Verdict:
    """The verdict of a transformers model in memory. Its weights are not touched: a small copy is checked."""
    return check_class(type(model), model.config, device=model.device)


@torch.inference_mode()
def check_class(
    model_class: Callable[[Any], Any],
    config: Any,
    *,
    device: torch.device | None = None,
    make_attention: MakeAttention = cpu_attention,
) -> Verdict:
    # A model fails in ways of its own, so every exception counts as a finding here and below.
    why_not = "no small copy of this config could be made"
    for model in shrunken_models(model_class, config):
        small = model.to(device or torch.device("cpu"))
        try:
            return _Check(small, make_attention).verdict()
        except UnsupportedModel:
            raise
        except Exception as error:
            why_not = f"the small copy fails by itself ({_first_line(error)})"
    unknown = Finding(exact=False, max_difference=None, reason=why_not)
    return Verdict(way=Way.OWN_CACHE, packing=unknown, **unknown.model_dump())


@torch.inference_mode()
def check_real_weights(model: Any, verdict: Verdict, make_attention: MakeAttention = cpu_attention) -> Finding:
    """In the weights' own dtype chunks may be no further from float32 than the whole prompt is, give or take a half.

    A float32 copy of the model exists meanwhile.
    """
    check = _Check(model, make_attention)
    exact = _Check(copy.deepcopy(model).float(), make_attention)
    if verdict.way in (Way.PACKED, Way.PAGED):
        own_attention = model.config._attn_implementation
        use_paged_attention(model)
        read = check.paged_reader()
    else:
        own_attention = None
        read = check.own_cache_reader(passes_mask=verdict.passes_mask)
    found: list[_Difference] = []
    for tokens, whole_TV, exact_TV in zip(check.prompts, check.whole_TV, exact.whole_TV, strict=True):
        yardstick = (whole_TV - exact_TV).abs().max().item()
        largest = (read(tokens, cycle(CHUNKINGS[0])) - exact_TV).abs().max().item()
        found.append(_Difference(largest=largest, allowed=BFLOAT16_FACTOR * yardstick))
    if own_attention is not None:
        model.set_attn_implementation(own_attention)
    worst = max(found, key=lambda one: one.largest / one.allowed if one.allowed else one.largest)
    dtype = str(model.dtype).removeprefix("torch.")
    yardstick = worst.allowed / BFLOAT16_FACTOR
    reason = f"in {dtype}, chunked logits are {worst.largest:.2g} from float32 and whole ones {yardstick:.2g}"
    return Finding(exact=_num_failed(found) <= MOST_FAILURES, max_difference=worst.largest, reason=reason)


class _Check:
    def __init__(self, model: Any, make_attention: MakeAttention) -> None:
        self.model = model
        self.signature: ForwardSignature = read_signature(model)
        self.make_attention = make_attention
        self.device = model.device
        generator = torch.Generator().manual_seed(1)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.prompts = [
            torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
        ]
        self.whole_TV = [self._whole(tokens) for tokens in self.prompts]

    def verdict(self) -> Verdict:
        own_attention = self.model.config._attn_implementation
        packing = self._packing()
        if packing.exact:
            chunking = self._chunking(self.paged_reader())
            if chunking.exact:
                return Verdict(way=Way.PACKED, packing=packing, **chunking.model_dump())
        elif packing.max_difference is not None:
            chunking = self._chunking(self.paged_reader())
            if chunking.exact:
                return Verdict(way=Way.PAGED, packing=packing, **chunking.model_dump())
        self.model.set_attn_implementation(own_attention)
        return self._own_cache(packing)

    def _own_cache(self, packing: Finding) -> Verdict:
        findings: list[tuple[bool, Finding]] = []
        for passes_mask in (False, True):
            if passes_mask and not self.signature.accepts("attention_mask"):
                continue
            found = self._chunking(self.own_cache_reader(passes_mask=passes_mask))
            if found.exact:
                return Verdict(way=Way.OWN_CACHE, passes_mask=passes_mask, packing=packing, **found.model_dump())
            findings.append((passes_mask, found))
        measured = [item for item in findings if item[1].max_difference is not None] or findings
        passes_mask, found = min(measured, key=lambda item: item[1].max_difference or float("inf"))
        if not self._keeps_cache(passes_mask):
            found = found.model_copy(update={"reason": "it hands over no cache, so each call reads the whole sequence"})
            return Verdict(way=Way.RECOMPUTED, packing=packing, **found.model_dump())
        return Verdict(way=Way.OWN_CACHE, passes_mask=passes_mask, packing=packing, **found.model_dump())

    # --- what is compared ---

    def _whole(self, tokens: list[int]) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=self.device)}
        if self.signature.accepts_use_cache:
            inputs["use_cache"] = False
        return self.model(**inputs).logits[0].float()

    def _chunking(self, read: Reader) -> Finding:
        """Awkward chunkings of the three prompts against each read whole by the model itself."""
        worst: list[_Difference] = []
        for tokens, whole_TV in zip(self.prompts, self.whole_TV, strict=True):
            try:
                worst.append(_worst(_difference(read(tokens, cycle(sizes)), whole_TV) for sizes in CHUNKINGS))
            except Exception as error:
                return Finding(exact=False, max_difference=None, reason=f"chunks fail: {_first_line(error)}")
            if _num_failed(worst) > MOST_FAILURES:
                break
        return _judged(worst, "chunked logits", "the whole prompt's")

    def _packing(self) -> Finding:
        """Two sequences in one call against each alone."""
        try:
            use_paged_attention(self.model)
            packed = self._packed_model()
        except CannotPack as error:
            return Finding(exact=False, max_difference=None, reason=str(error))
        pairs = ((0, 1), (1, 2), (2, 0))
        worst: list[_Difference] = []
        for pair in pairs:
            try:
                logits = _read_together(packed, [self.prompts[index] for index in pair], self.device)
            except Exception as error:
                return Finding(exact=False, max_difference=None, reason=f"packed calls fail: {_first_line(error)}")
            worst.append(_worst(_difference(own, self.whole_TV[i]) for own, i in zip(logits, pair, strict=True)))
            if _num_failed(worst) > MOST_FAILURES:
                break
        return _judged(worst, "packed logits", "each sequence's alone")

    # --- the ways of reading ---

    def _packed_model(self) -> PackedModel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls = attention_calls(self.model, self.signature)
        num_blocks = 2 * -(-max(PROMPT_LENGTHS) // BLOCK_SIZE)
        storage = KvStorage(
            num_layers=len(calls),
            num_slots=num_blocks * BLOCK_SIZE,
            num_kv_heads=calls[0].num_kv_heads,
            head_size=calls[0].head_size,
            dtype=self.model.dtype,
            device=self.device,
        )
        attention = self.make_attention(storage, BLOCK_SIZE, calls[0].num_heads)
        return PackedModel(self.model, self.signature, attention, num_calls=len(calls))

    def paged_reader(self) -> Reader:
        packed = self._packed_model()

        def read(tokens: list[int], sizes: Iterator[int]) -> torch.Tensor:
            return torch.cat(
                [packed.run(step_inputs([tokens], [span], self.device)) for span in spans(len(tokens), sizes)]
            )

        return read

    def own_cache_reader(self, *, passes_mask: bool) -> Reader:
        def read(tokens: list[int], sizes: Iterator[int]) -> torch.Tensor:
            caches = OwnCaches(self.model, self.signature, passes_mask=passes_mask)
            return torch.cat([self._own_chunk(caches, tokens, *span) for span in spans(len(tokens), sizes)])

        return read

    def _own_chunk(self, caches: OwnCaches, tokens: list[int], start: int, end: int) -> torch.Tensor:
        ids = torch.tensor(tokens[start:end], device=self.device)
        return caches.read(0, ids, start=start, rows=torch.arange(end - start, device=self.device))

    def _keeps_cache(self, passes_mask: bool) -> bool:
        caches = OwnCaches(self.model, self.signature, passes_mask=passes_mask)
        self._own_chunk(caches, self.prompts[0], 0, 2)
        return caches.keeps_cache(0)


def spans(num_tokens: int, sizes: Iterator[int]) -> list[tuple[int, int]]:
    found, start = [], 0
    while start < num_tokens:
        end = min(start + next(sizes), num_tokens)
        found.append((start, end))
        start = end
    return found


def step_inputs(
    sequences: Sequence[list[int]], chunks: Sequence[tuple[int, int]], device: torch.device
) -> ForwardInputs:
    """A step of one chunk per sequence, every row's logits wanted; each sequence has the pages of its place."""
    num_blocks = -(-max(PROMPT_LENGTHS) // BLOCK_SIZE)
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    for tokens, (start, end) in zip(sequences, chunks, strict=True):
        ids += tokens[start:end]
        positions += range(start, end)
        starts.append(len(ids))
    return ForwardInputs(
        ids_T=torch.tensor(ids, device=device),
        positions_T=torch.tensor(positions, device=device),
        query_starts=tuple(starts),
        context_lens=tuple(end for _, end in chunks),
        block_table=tuple(
            tuple(range(index * num_blocks, index * num_blocks + num_blocks)) for index in range(len(chunks))
        ),
        rotary_variants=("default",) * len(chunks),
        sequence_ids=tuple(range(len(chunks))),
        logit_rows=torch.arange(len(ids), device=device),
    )


def _read_together(packed: PackedModel, pair: Sequence[list[int]], device: torch.device) -> list[torch.Tensor]:
    """Both sequences advance in the same calls by chunks of different sizes, as prompts beside decodes do."""
    places = [0, 0]
    logits: list[list[torch.Tensor]] = [[], []]
    for sizes in PACKED_SIZES:
        _advance_both(packed, pair, places, sizes, logits, device)
    return [torch.cat(own) for own in logits]


def _advance_both(
    packed: PackedModel,
    pair: Sequence[list[int]],
    places: list[int],
    sizes: tuple[int, int],
    logits: list[list[torch.Tensor]],
    device: torch.device,
) -> None:
    """A sequence leaves one token for the last step, so that every call holds both."""
    is_last = min(sizes) >= max(PROMPT_LENGTHS)
    chunks = []
    for tokens, place, size in zip(pair, places, sizes, strict=True):
        chunks.append((place, len(tokens) if is_last else min(place + size, len(tokens) - 1)))
    live = [index for index, (start, end) in enumerate(chunks) if end > start]
    if len(live) < 2:
        return
    rows = packed.run(step_inputs(pair, chunks, device))
    for index, (start, end) in enumerate(chunks):
        first = 0 if index == 0 else chunks[0][1] - chunks[0][0]
        logits[index].append(rows[first : first + end - start])
        places[index] = end


def _difference(logits_TV: torch.Tensor, whole_TV: torch.Tensor) -> _Difference:
    largest = (logits_TV - whole_TV).abs().max().item()
    deviation = whole_TV.std().item()
    return _Difference(largest=float("inf") if largest != largest else largest, allowed=TOLERANCE * max(1.0, deviation))


def _worst(differences: Iterable[_Difference]) -> _Difference:
    """The largest, or the first that is too large: then the rest need not be computed."""
    worst = _Difference(largest=0.0, allowed=0.0)
    for difference in differences:
        worst = max(worst, difference, key=lambda one: one.largest)
        if not worst.is_exact:
            break
    return worst


def _num_failed(worst: Sequence[_Difference]) -> int:
    return sum(not difference.is_exact for difference in worst)


def _judged(worst: Sequence[_Difference], what: str, against: str) -> Finding:
    if _num_failed(worst) > MOST_FAILURES:
        largest = max(difference.largest for difference in worst)
        allowed = min(difference.allowed for difference in worst)
        if largest == float("inf"):
            return Finding(exact=False, max_difference=None, reason=f"{what} are not numbers")
        reason = f"{what} differ from {against} by {largest:.1e}, {allowed:.0e} is allowed"
        return Finding(exact=False, max_difference=largest, reason=reason)
    exact = [difference.largest for difference in worst if difference.is_exact]
    return Finding(exact=True, max_difference=max(exact), reason=f"{what} agree with {against} to {max(exact):.1e}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
