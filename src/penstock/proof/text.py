"""The self-check of causal models: do chunks of text give what the whole prompt gives, and how is the model to be run?

Everything is decided by what was measured: joined steps first, then the model's own cache, then no cache at all.
"""

# T tokens, V vocabulary

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from penstock.attention.backend import AttentionBackend, ForwardInputs
from penstock.attention.cpu import CpuAttention
from penstock.cache.storage import KvStorage
from penstock.errors import first_line
from penstock.foreign.forward import CachedForward
from penstock.foreign.own_cache import OwnCaches
from penstock.foreign.pages import CannotJoin, JoinedModel, attention_calls, pages_of, use_paged_attention
from penstock.foreign.signature import read_signature
from penstock.proof.comparison import (
    MAX_FAILURES,
    Case,
    Difference,
    compared,
    difference,
    exact_limit,
    held_to_float32,
    judged,
    num_failed,
    spans,
    worst_of,
)
from penstock.proof.verdict import Finding, Verdict, Way

PROMPT_LENGTHS = (47, 61, 67)
CHUNKINGS: tuple[tuple[int, ...], ...] = ((5, 1, 17, 2, 31), (7,), (3,), (1,))
# Of two sequences that advance in the same calls; the last takes what is left of both.
JOINED_SIZES = (*((1, 5), (9, 1), (3, 7), (1, 20)) * 2, (max(PROMPT_LENGTHS), max(PROMPT_LENGTHS)))
BLOCK_SIZE = 8

# (storage, block size, heads) -> a backend over it
MakeAttention = Callable[[KvStorage, int, int], AttentionBackend]
# tokens of a sequence, sizes of its chunks -> logits [T, V]
Reader = Callable[[list[int], Iterator[int]], torch.Tensor]
# `passes_mask` and `passes_positions`, as OwnCaches takes them
Given = dict[str, Any]


def cpu_attention(storage: KvStorage, block_size: int, num_heads: int) -> AttentionBackend:
    return CpuAttention(storage, block_size)


@torch.inference_mode()
def check_text(model: Any, make_attention: MakeAttention = cpu_attention) -> Verdict:
    """Checks a small copy in float32."""
    return _TextCheck(model, make_attention).verdict()


@torch.inference_mode()
def check_real_text(model: Any, verdict: Verdict, make_attention: MakeAttention = cpu_attention) -> Finding:
    """The loaded weights in their own dtype, in the way that the verdict allows. A float32 copy exists meanwhile."""
    check = _TextCheck(model, make_attention)
    exact = _TextCheck(copy.deepcopy(model).float(), make_attention)
    own_attention = model.config._attn_implementation
    has_pages = verdict.way in (Way.PACKED, Way.PAGED)
    if has_pages:
        use_paged_attention(model)
    given = verdict.model_dump(include={"passes_mask", "passes_positions"})
    read = check.paged_reader() if has_pages else check.own_cache_reader(given)
    found = held_to_float32(zip(check.cases(read), exact.whole_TV, strict=True), CHUNKINGS[0], model.dtype)
    if has_pages:
        model.set_attn_implementation(own_attention)
    return found


class _TextCheck:
    def __init__(self, model: Any, make_attention: MakeAttention) -> None:
        self.model = model
        self.forward = CachedForward(model, read_signature(model))
        self.signature = self.forward.signature
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
        if packing.exact or packing.max_difference is not None:
            chunking = self._chunking(self.paged_reader())
            if chunking.exact:
                way = Way.PACKED if packing.exact else Way.PAGED
                return Verdict(way=way, packing=packing, **chunking.model_dump())
        self.model.set_attn_implementation(own_attention)
        return self._own_cache(packing)

    def _own_cache(self, packing: Finding) -> Verdict:
        findings: list[tuple[Given, Finding]] = []
        for given in self._ways_to_call():
            found = self._chunking(self.own_cache_reader(given))
            if found.exact and self._keeps_cache(given):
                return Verdict(way=Way.OWN_CACHE, packing=packing, **given, **found.model_dump())
            findings.append((given, found))
        measured = [item for item in findings if item[1].max_difference is not None] or findings
        given, found = min(measured, key=lambda item: item[1].max_difference or float("inf"))
        way = Way.OWN_CACHE
        if not self._keeps_cache(given):
            way = Way.RECOMPUTED
            reason = "it hands over no cache, so each call reads the whole sequence"
            found = Finding(exact=False, max_difference=found.max_difference, reason=reason)
        return Verdict(way=way, packing=packing, **given, **found.model_dump())

    def _ways_to_call(self) -> list[Given]:
        """What a call may be given: that with which a whole prompt has the logits of the plain forward."""
        masks = (False, True) if self.signature.accepts("attention_mask") else (False,)
        positions = (True, False) if self.signature.accepts("position_ids") else (False,)
        ways = [{"passes_mask": mask, "passes_positions": given} for given in positions for mask in masks]
        return [way for way in ways if self._reads_whole(way)] or ways

    def _reads_whole(self, given: Given) -> bool:
        cases = self.cases(self.own_cache_reader(given))
        return compared(cases, [(max(PROMPT_LENGTHS),)], what="logits", against="the plain forward's").exact

    # --- what is compared ---

    def _whole(self, tokens: list[int]) -> torch.Tensor:
        return self.forward.call({"input_ids": torch.tensor([tokens], device=self.device)}).logits[0].float()

    def cases(self, read: Reader) -> Iterator[Case]:
        for tokens, whole_TV in zip(self.prompts, self.whole_TV, strict=True):
            yield Case(whole=whole_TV, read=partial(read, tokens), allowed=exact_limit(whole_TV))

    def _chunking(self, read: Reader) -> Finding:
        return compared(self.cases(read), CHUNKINGS, what="chunked logits", against="the whole prompt's")

    def _packing(self) -> Finding:
        """Two sequences in one call against each alone."""
        try:
            use_paged_attention(self.model)
            joined = self._joined_model()
        except CannotJoin as error:
            return Finding.unmeasured(str(error))
        pairs = ((0, 1), (1, 2), (2, 0))
        worst: list[Difference] = []
        for pair in pairs:
            try:
                logits = _read_together(joined, [self.prompts[index] for index in pair], self.device)
            except Exception as error:
                return Finding.unmeasured(f"packed calls fail: {first_line(error)}")
            worst.append(worst_of(difference(own, self.whole_TV[i]) for own, i in zip(logits, pair, strict=True)))
            if num_failed(worst) > MAX_FAILURES:
                break
        return judged(worst, "packed logits", "each sequence's alone")

    # --- the ways of reading ---

    def _joined_model(self) -> JoinedModel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            calls = attention_calls(self.model, self.signature)
        num_blocks = 2 * -(-max(PROMPT_LENGTHS) // BLOCK_SIZE)
        storage = pages_of(self.model, calls, num_blocks * BLOCK_SIZE)
        attention = self.make_attention(storage, BLOCK_SIZE, calls[0].num_heads)
        return JoinedModel(self.model, self.signature, attention, num_calls=len(calls))

    def paged_reader(self) -> Reader:
        joined = self._joined_model()

        def read(tokens: list[int], sizes: Iterator[int]) -> torch.Tensor:
            return torch.cat(
                [joined.run(step_inputs([tokens], [span], self.device)) for span in spans(len(tokens), sizes)]
            )

        return read

    def own_cache_reader(self, given: Given) -> Reader:
        def read(tokens: list[int], sizes: Iterator[int]) -> torch.Tensor:
            caches = OwnCaches(self.forward, **given)
            return torch.cat([self._own_chunk(caches, tokens, *span) for span in spans(len(tokens), sizes)])

        return read

    def _own_chunk(self, caches: OwnCaches, tokens: list[int], start: int, end: int) -> torch.Tensor:
        ids = torch.tensor(tokens[start:end], device=self.device)
        return caches.read(0, ids, start=start, rows=torch.arange(end - start, device=self.device))

    def _keeps_cache(self, given: Given) -> bool:
        caches = OwnCaches(self.forward, **given)
        self._own_chunk(caches, self.prompts[0], 0, 2)
        return caches.keeps_cache(0)


def step_inputs(
    sequences: Sequence[list[int]], chunks: Sequence[tuple[int, int]], device: torch.device
) -> ForwardInputs:
    """A step of one chunk per sequence, every row's logits wanted; each sequence has the pages of its place."""
    num_blocks = -(-max(*PROMPT_LENGTHS, *map(len, sequences)) // BLOCK_SIZE)
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


def _read_together(joined: JoinedModel, pair: Sequence[list[int]], device: torch.device) -> list[torch.Tensor]:
    """Both sequences advance in the same calls by chunks of different sizes, as prompts beside decodes do."""
    places = [0, 0]
    logits: list[list[torch.Tensor]] = [[], []]
    for sizes in JOINED_SIZES:
        is_last = min(sizes) >= max(PROMPT_LENGTHS)
        # A sequence leaves one token for the last step, so that every call holds both.
        ends = [
            len(tokens) if is_last else min(place + size, len(tokens) - 1)
            for tokens, place, size in zip(pair, places, sizes, strict=True)
        ]
        chunks = list(zip(places, ends, strict=True))
        if any(start == end for start, end in chunks):
            continue
        rows = joined.run(step_inputs(pair, chunks, device)).split([end - start for start, end in chunks])
        for own, part in zip(logits, rows, strict=True):
            own.append(part)
        places = ends
    return [torch.cat(own) for own in logits]
