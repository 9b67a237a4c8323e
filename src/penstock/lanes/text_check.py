"""The self-check of causal models: do chunks of text give what the whole prompt gives, and how is the model to be run?

Everything is decided by what was measured: packed steps first, then the model's own cache, then no cache at all.
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
from penstock.lanes.comparison import (
    MOST_FAILURES,
    Case,
    Difference,
    compared,
    difference,
    exact_limit,
    first_line,
    held_to_float32,
    judged,
    num_failed,
    worst_of,
)
from penstock.lanes.own_cache import OwnCaches
from penstock.lanes.packed import CannotPack, PackedModel, attention_calls, use_paged_attention
from penstock.lanes.signature import ForwardSignature, read_signature
from penstock.lanes.verdicts import Finding, Verdict, Way

PROMPT_LENGTHS = (47, 61, 67)
CHUNKINGS: tuple[tuple[int, ...], ...] = ((5, 1, 17, 2, 31), (7,), (3,), (1,))
# Of two sequences that advance in the same calls; the last takes what is left of both.
PACKED_SIZES = (*((1, 5), (9, 1), (3, 7), (1, 20)) * 2, (max(PROMPT_LENGTHS), max(PROMPT_LENGTHS)))
BLOCK_SIZE = 8

# (storage, block size, heads) -> a backend over it
MakeAttention = Callable[[KvStorage, int, int], AttentionBackend]
# tokens of a sequence, sizes of its chunks -> logits [T, V]
Reader = Callable[[list[int], Iterator[int]], torch.Tensor]


def cpu_attention(storage: KvStorage, block_size: int, num_heads: int) -> AttentionBackend:
    return CpuAttention(storage, block_size)


@torch.inference_mode()
def check_text(model: Any, make_attention: MakeAttention = cpu_attention) -> Verdict:
    """Of a small copy in float32."""
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
    read = check.paged_reader() if has_pages else check.own_cache_reader(passes_mask=verdict.passes_mask)
    found = held_to_float32(zip(check.cases(read), exact.whole_TV, strict=True), CHUNKINGS[0], model.dtype)
    if has_pages:
        model.set_attn_implementation(own_attention)
    return found


class _TextCheck:
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

    def cases(self, read: Reader) -> Iterator[Case]:
        for tokens, whole_TV in zip(self.prompts, self.whole_TV, strict=True):
            yield Case(whole=whole_TV, read=partial(read, tokens), allowed=exact_limit(whole_TV))

    def _chunking(self, read: Reader) -> Finding:
        return compared(self.cases(read), CHUNKINGS, what="chunked logits", against="the whole prompt's")

    def _packing(self) -> Finding:
        """Two sequences in one call against each alone."""
        try:
            use_paged_attention(self.model)
            packed = self._packed_model()
        except CannotPack as error:
            return Finding(exact=False, max_difference=None, reason=str(error))
        pairs = ((0, 1), (1, 2), (2, 0))
        worst: list[Difference] = []
        for pair in pairs:
            try:
                logits = _read_together(packed, [self.prompts[index] for index in pair], self.device)
            except Exception as error:
                return Finding(exact=False, max_difference=None, reason=f"packed calls fail: {first_line(error)}")
            worst.append(worst_of(difference(own, self.whole_TV[i]) for own, i in zip(logits, pair, strict=True)))
            if num_failed(worst) > MOST_FAILURES:
                break
        return judged(worst, "packed logits", "each sequence's alone")

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
