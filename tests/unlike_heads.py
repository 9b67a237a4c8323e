"""Two prompts read in chunks by three layers: two with heads of their own number and size, and one without keys."""

import torch
from dense_attention import dense

from penstock.attention.backend import AttentionRule, ForwardInputs, MediaInputs
from penstock.cache.storage import KvStorage
from penstock.request import Span

BLOCK = 16
NUM_HEADS = 4
KV_HEADS, SIZES = (2, 1), (16, 32)
# (pages, rule) of each layer; the last attends to what the first has stored, and images see themselves in one alone.
LAYERS = (
    (0, AttentionRule(scale=0.3, window=9)),
    (1, AttentionRule(scale=1.0, sees_spans=False)),
    (0, AttentionRule(scale=0.2, sees_spans=False)),
)
SPAN = Span(start=20, end=33)
STEPS = ([(0, 37), (0, 5)], [(37, 38), (5, 41)], [(38, 50), (41, 42)])
TABLES = ((6, 1, 4, 9), (3, 0, 5))


def attended_and_expected(make_attention, dtype=torch.float32, device="cpu"):
    """Attention by chunks of all layers, one after another, beside plain attention over the whole prompts."""
    generator = torch.Generator().manual_seed(4)

    def normal(num_tokens, heads, size):
        return torch.randn(num_tokens, heads, size, generator=generator).to(dtype)

    lengths = [50, 42]
    queries = [[normal(length, NUM_HEADS, SIZES[pages]) for length in lengths] for pages, _ in LAYERS]
    keys, values = (
        [[normal(length, heads, size) for length in lengths] for heads, size in zip(KV_HEADS, SIZES, strict=True)]
        for _ in range(2)
    )
    storage = KvStorage(
        num_layers=2,
        num_slots=10 * BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=SIZES,
        dtype=dtype,
        device=torch.device(device),
    )
    attention = make_attention(storage, BLOCK, NUM_HEADS)
    found = [[[] for _ in lengths] for _ in LAYERS]
    for chunks in STEPS:
        attention.begin_step(_inputs(chunks))
        for layer, (pages, rule) in enumerate(LAYERS):
            parts = [
                torch.cat([of[i][first:end] for i, (first, end) in enumerate(chunks)])
                for of in (queries[layer], keys[pages], values[pages])
            ]
            q, k, v = (part.to(device) for part in parts)
            stored = (None, None) if layer == 2 else (k, v)
            out = attention.attend(pages, attention.store(pages, q, *stored, None), rule).cpu().float()
            for index, part in enumerate(out.split([end - first for first, end in chunks])):
                found[layer][index].append(part)
    expected = [
        [dense(queries[layer][i], keys[pages][i], values[pages][i], 0, rule, None, _spans(rule, i)) for i in range(2)]
        for layer, (pages, rule) in enumerate(LAYERS)
    ]
    return [[torch.cat(parts) for parts in layer] for layer in found], expected


def _spans(rule, index):
    return (SPAN,) if rule.sees_spans and index == 0 else ()


def _inputs(chunks):
    starts = [0]
    for first, end in chunks:
        starts.append(starts[-1] + end - first)
    has_span = chunks[0][0] < SPAN.end
    nothing = torch.zeros(0)
    return ForwardInputs(
        ids_T=torch.zeros(starts[-1], dtype=torch.long),
        positions_T=torch.cat([torch.arange(first, end) for first, end in chunks]),
        query_starts=tuple(starts),
        context_lens=tuple(end for _, end in chunks),
        block_table=TABLES,
        rotary_variants=("default",) * 2,
        sequence_ids=(0, 1),
        logit_rows=torch.zeros(0, dtype=torch.long),
        media=MediaInputs(rows_N=nothing, features_ND=nothing, spans=((SPAN,), ())) if has_span else None,
    )
