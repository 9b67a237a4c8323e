"""Images that see themselves, on a GPU: their rows are attended once more, over gathered keys.

The kernels are causal. Rows of such spans are few, and a span is read once, so a gather of its context is affordable.
"""

# T tokens of the step, Q queries of a span, N keys, H heads, K key-value heads, D head size, S slots

from __future__ import annotations

import torch

from penstock.attention.backend import AttentionRule, ForwardInputs
from penstock.request import Span


def attend_spans(
    inputs: ForwardInputs,
    block_size: int,
    pages_SKD: tuple[torch.Tensor, torch.Tensor],
    q_THD: torch.Tensor,
    out_THD: torch.Tensor,
    rule: AttentionRule,
) -> None:
    """Replaces the rows of the step's spans by attention over what they see: their past and all of their span."""
    if inputs.media is None or not rule.sees_spans:
        return
    chunks = zip(inputs.media.spans, inputs.chunks(), inputs.block_table, strict=False)  # no spans: none has any
    for spans, (first_row, start, end), block_ids in chunks:
        blocks = torch.tensor(block_ids if spans else (), device=q_THD.device)
        for span in spans:
            queries = range(max(start, span.start), min(end, span.end))
            first_key = 0 if rule.window is None else max(0, queries.start - rule.window + 1)
            keys_N = torch.arange(first_key, span.end, device=q_THD.device)
            slots_N = blocks[keys_N // block_size] * block_size + keys_N % block_size
            rows = slice(first_row + queries.start - start, first_row + queries.stop - start)
            k_NKD, v_NKD = (pages[slots_N] for pages in pages_SKD)
            out_THD[rows] = _attended(q_THD[rows], k_NKD, v_NKD, _seen(queries, keys_N, span, rule), rule)


def _seen(queries: range, keys_N: torch.Tensor, span: Span, rule: AttentionRule) -> torch.Tensor:
    """[Q, N]: whether the query sees the key. A window limits what comes before, not what comes after."""
    queries_Q1 = torch.arange(queries.start, queries.stop, device=keys_N.device)[:, None]
    is_seen_QN = (keys_N <= queries_Q1) | (keys_N >= span.start)
    return is_seen_QN if rule.window is None else is_seen_QN & (keys_N > queries_Q1 - rule.window)


def _attended(
    q_QHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, is_seen_QN: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    assert rule.softcap is None, "no family has both spans and softcaps"
    heads_first = (x.transpose(0, 1)[None] for x in (q_QHD, k_NKD, v_NKD))
    attended = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=is_seen_QN, scale=rule.scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
