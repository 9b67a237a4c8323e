"""Attention over pages on a CPU: contiguous runs are attended through views, tile by tile, and merged exactly.

A query tile sees the tokens before it without any mask; only its own square, and the edge of a window, need one.
No tensor here grows with the context: the largest is a tile by a tile. In bfloat16 the C kernel does this work where it
can run; it stands in `cpu_compiled`.
"""

# T tokens of the step, Q queries of a tile, N keys of a segment, H heads, K key-value heads, D head size

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.attention.backend import AttentionRule, ForwardInputs, HeadNorms, Rotation
from penstock.attention.cpu_compiled import LARGEST_GROUP, make_compiled
from penstock.cache.storage import KvStorage
from penstock.request import Span

QUERY_ROWS = 512
KEY_ROWS = 1024  # only where scores are materialised

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRun:
    """Positions [start, end) of a sequence lie in the adjacent slots that begin at `slot`."""

    start: int
    end: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Keys [start, end) that a query tile sees: all of them, or by a rule of positions."""

    start: int
    end: int
    is_masked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryMask:
    """Tells which keys the queries [start, end) see: those up to them within a window, or those after them."""

    start: int
    end: int
    window: int | None = None
    is_reversed: bool = False  # they see what comes after them

    def is_causal_square(self, first: int, last: int) -> bool:
        """Whether the keys are the queries' own and no window cuts them, which needs no table."""
        is_cut = self.window is not None and self.end - self.start > self.window
        return (first, last) == (self.start, self.end) and not is_cut and not self.is_reversed

    def table(self, first: int, last: int, like: torch.Tensor) -> torch.Tensor:
        """0 where query (row) sees key (column). The lowest finite number elsewhere: an infinite one would give a row
        that sees nothing a log-sum-exp of 0, and the merge would count it."""
        queries_Q1 = torch.arange(self.start, self.end, device=like.device)[:, None]
        keys_N = torch.arange(first, last, device=like.device)
        is_seen_QN = keys_N > queries_Q1 if self.is_reversed else keys_N <= queries_Q1
        if self.window is not None:
            is_seen_QN &= keys_N > queries_Q1 - self.window
        table_QN = torch.zeros(is_seen_QN.shape, dtype=like.dtype, device=like.device)
        return table_QN.masked_fill_(~is_seen_QN, torch.finfo(like.dtype).min)


def contiguous_runs(blocks: tuple[int, ...], block_size: int, num_tokens: int) -> tuple[SlotRun, ...]:
    runs: list[SlotRun] = []
    for index, block in enumerate(blocks):
        start, end = index * block_size, min((index + 1) * block_size, num_tokens)
        if start >= num_tokens:
            break
        if runs and runs[-1].slot + (start - runs[-1].start) == block * block_size:
            runs[-1] = SlotRun(start=runs[-1].start, end=end, slot=runs[-1].slot)
        else:
            runs.append(SlotRun(start=start, end=end, slot=block * block_size))
    return tuple(runs)


def segments(start: int, end: int, window: int | None) -> Iterator[Segment]:
    """What queries [start, end) see: the window's edge, the tokens that all of them see, and their own square."""
    first = 0 if window is None else max(0, start - window + 1)
    if end - start == 1:
        yield Segment(start=first, end=end, is_masked=False)
        return
    seen_by_all = 0 if window is None else max(first, min(end - window, start))
    if first < seen_by_all:
        yield Segment(start=first, end=seen_by_all, is_masked=True)
    if seen_by_all < start:
        yield Segment(start=seen_by_all, end=start, is_masked=False)
    yield Segment(start=start, end=end, is_masked=True)


class CpuAttention:
    failure = None

    def __init__(self, storage: KvStorage, block_size: int) -> None:
        self.storage = storage
        self.block_size = block_size
        self._inputs: ForwardInputs | None = None
        self._runs: list[tuple[SlotRun, ...]] = []  # of the step's chunks, made when torch first needs them
        self.compiled = make_compiled(storage, block_size)  # None: torch attends
        self.name = "torch" if self.compiled is None else self.compiled.name
        self.has_flash = storage.device.type == "cpu"  # torch's kernel that gives log-sum-exps is for processors

    def begin_step(self, inputs: ForwardInputs) -> None:
        self._inputs = inputs
        self._runs = []
        if self.compiled is not None:
            self.compiled.begin_step(inputs)

    def store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor | None,
        v_TKD: torch.Tensor | None,
        rotation: Rotation | None,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        if norms is not None:
            q_THD = norms.q(q_THD)
            k_TKD = k_TKD if k_TKD is None or norms.k is None else norms.k(k_TKD)
        if self.compiled is not None and _are_bfloat16(q_THD, k_TKD, v_TKD, rotation):
            return self.compiled.store(layer, q_THD, k_TKD, v_TKD, rotation)
        if k_TKD is not None and v_TKD is not None:
            self._store_pages(layer, k_TKD, v_TKD, rotation)
        rotated_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        if rotation is None:
            rotated_THD.copy_(q_THD)
        else:
            rotation.apply(slice(None), q_THD, out=rotated_THD)
        return rotated_THD

    def _store_pages(self, layer: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rotation: Rotation | None) -> None:
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        for row, start, end, runs in self._chunks():
            for first, last, slot in _slots(runs, start, end):
                rows, pages = slice(row + first - start, row + last - start), slice(slot, slot + last - first)
                if rotation is None:
                    keys[pages] = k_TKD[rows]
                else:
                    rotation.apply(rows, k_TKD[rows], out=keys[pages])
                values[pages] = v_TKD[rows]

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        group = q_THD.shape[1] // self.storage.keys[layer].shape[1]
        sees_spans = rule.sees_spans and self._has_spans
        is_taken = q_THD.dtype == torch.bfloat16 and group <= LARGEST_GROUP and not sees_spans
        if self.compiled is not None and is_taken:
            return self.compiled.attend(layer, q_THD, rule, sinks_H)
        out_THD, has_flash = torch.empty_like(q_THD), self.has_flash and rule.softcap is None
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        for index, (row, start, end, runs) in enumerate(self._chunks()):
            spans = self._spans(index) if rule.sees_spans else ()
            for tile in range(start, end, QUERY_ROWS):
                tile_end = min(tile + QUERY_ROWS, end)
                rows = slice(row + tile - start, row + tile_end - start)
                queries = _Tile(has_flash, q_THD[rows], keys, values, runs, tile, tile_end, rule)
                out_THD[rows] = queries.attended(sinks_H, spans)
        return out_THD

    @property
    def _has_spans(self) -> bool:
        return self._inputs is not None and self._inputs.media is not None and any(self._inputs.media.spans)

    def _spans(self, chunk: int) -> tuple[Span, ...]:
        assert self._inputs is not None, "begin_step comes first"
        media = self._inputs.media
        return media.spans[chunk] if media is not None and media.spans else ()

    def _chunks(self) -> Iterator[tuple[int, int, int, tuple[SlotRun, ...]]]:
        """Yields (first row, first position, end position, runs) of each chunk."""
        assert self._inputs is not None, "begin_step comes first"
        if not self._runs:
            self._runs = [
                contiguous_runs(blocks, self.block_size, length)
                for blocks, length in zip(self._inputs.block_table, self._inputs.context_lens, strict=True)
            ]
        for chunk, runs in zip(self._inputs.chunks(), self._runs, strict=True):
            yield *chunk, runs


def _are_bfloat16(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, rotation: Rotation | None) -> bool:
    tensors = (q, k, v) if rotation is None else (q, k, v, rotation.cos_T1R, rotation.sin_T1R)
    return all(tensor is None or tensor.dtype == torch.bfloat16 for tensor in tensors)


def _slots(runs: tuple[SlotRun, ...], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first, last, slot of first) of each run's part of positions [start, end)."""
    for run in runs:
        first, last = max(start, run.start), min(end, run.end)
        if first < last:
            yield first, last, run.slot + first - run.start


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries at positions [start, end) of a sequence, its pages, and whether torch's kernel attends to them."""

    has_flash: bool
    q_QHD: torch.Tensor
    keys_SKD: torch.Tensor
    values_SKD: torch.Tensor
    runs: tuple[SlotRun, ...]
    start: int
    end: int
    rule: AttentionRule

    def attended(self, sinks_H: torch.Tensor | None, spans: tuple[Span, ...]) -> torch.Tensor:
        """Attends over all that the queries see; partial results are merged by their log-sum-exp."""
        merged: tuple[torch.Tensor, torch.Tensor] | None = None
        for segment in segments(self.start, self.end, self.rule.window):
            mask = QueryMask(start=self.start, end=self.end, window=self.rule.window) if segment.is_masked else None
            for part in self._parts(self.q_QHD, segment.start, segment.end, mask):
                merged = part if merged is None else _merge(merged, part)
        assert merged is not None
        for span in spans:
            self._merge_span(merged, span)
        out_QHD, lse_QH1 = merged
        if sinks_H is not None:
            out_QHD = out_QHD * torch.sigmoid(lse_QH1 - sinks_H[:, None])
        return out_QHD.to(self.q_QHD.dtype)

    def _merge_span(self, merged: tuple[torch.Tensor, torch.Tensor], span: Span) -> None:
        """Adds what a span's queries see besides: the keys of the span that come after them, window or not."""
        first, last = max(self.start, span.start), min(self.end, span.end)
        if first >= last:
            return
        assert self.rule.softcap is None, "no family has both spans and softcaps"
        rows, mask = slice(first - self.start, last - self.start), QueryMask(start=first, end=last, is_reversed=True)
        out_QHD, lse_QH1 = merged
        for low in range(first, span.end, KEY_ROWS):
            for part in self._parts(self.q_QHD[rows], low, min(low + KEY_ROWS, span.end), mask):
                out_QHD[rows], lse_QH1[rows] = _merge((out_QHD[rows], lse_QH1[rows]), part)

    def _parts(
        self, q_QHD: torch.Tensor, start: int, end: int, mask: QueryMask | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (what queries get, log-sum-exp [Q, H, 1]) of the keys [start, end), run by run."""
        for first, last, slot in _slots(self.runs, start, end):
            pages = slice(slot, slot + last - first)
            attend = self._by_flash if self.has_flash else self._by_scores
            yield attend(q_QHD, self.keys_SKD[pages], self.values_SKD[pages], first, mask)

    def _by_flash(
        self, q_QHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, first_key: int, mask: QueryMask | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends by torch's kernel. A single query's head groups become rows, sharing each key read."""
        num_queries, num_heads, head_size = q_QHD.shape
        num_keys, num_kv_heads = k_NKD.shape[:2]
        last_key = first_key + num_keys
        is_causal = mask is not None and mask.is_causal_square(first_key, last_key)
        mask_QN = None if mask is None or is_causal else mask.table(first_key, last_key, q_QHD)
        k, v = k_NKD.transpose(0, 1)[None], v_NKD.transpose(0, 1)[None]
        if num_queries == 1:
            group = num_heads // num_kv_heads
            q = q_QHD.reshape(1, num_kv_heads, group, head_size)
            rows = None if mask_QN is None else mask_QN.expand(group, -1)
            out, lse = _flash(q, k, v, 0.0, False, attn_mask=rows, scale=self.rule.scale)
            return out.reshape(1, num_heads, head_size), lse.reshape(1, num_heads, 1)
        out, lse = _flash(q_QHD.transpose(0, 1)[None], k, v, 0.0, is_causal, attn_mask=mask_QN, scale=self.rule.scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)[..., None]

    def _by_scores(
        self, q_QHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, first_key: int, mask: QueryMask | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends with the scores in view, for softcaps and other devices, in key tiles so that they stay small."""
        num_queries, num_heads, head_size = q_QHD.shape
        num_kv_heads = k_NKD.shape[1]
        group = num_heads // num_kv_heads
        q_KGQD = q_QHD.view(num_queries, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
        q_KRD = q_KGQD.reshape(num_kv_heads, -1, head_size)
        merged: tuple[torch.Tensor, torch.Tensor] | None = None
        for low in range(0, k_NKD.shape[0], KEY_ROWS):
            high = min(low + KEY_ROWS, k_NKD.shape[0])
            scores_KRN = torch.bmm(q_KRD, k_NKD[low:high].permute(1, 2, 0)).float().mul_(self.rule.scale)
            if self.rule.softcap is not None:
                scores_KRN.div_(self.rule.softcap).tanh_().mul_(self.rule.softcap)
            scores = scores_KRN.view(num_kv_heads, group, num_queries, high - low)
            if mask is not None:
                scores += mask.table(first_key + low, first_key + high, scores)
            lse = scores.logsumexp(-1)
            weights = scores.sub_(lse[..., None]).exp_().to(q_QHD.dtype)
            out_KRD = torch.bmm(weights.view(num_kv_heads, -1, high - low), v_NKD[low:high].transpose(0, 1))
            out = out_KRD.view(num_heads, num_queries, head_size).transpose(0, 1)
            part = (out, lse.view(num_heads, num_queries).transpose(0, 1)[..., None])
            merged = part if merged is None else _merge(merged, part)
        assert merged is not None
        return merged


def _merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets."""
    (out_one, lse_one), (out_other, lse_other) = one, other
    lse = torch.logaddexp(lse_one, lse_other)
    merged = out_one * (lse_one - lse).exp_()
    return merged.addcmul_(out_other, (lse_other - lse).exp_()), lse
