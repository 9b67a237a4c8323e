"""Chunks of several sequences attended over pages, beside plain attention over each whole sequence."""

import torch
from dense_attention import dense

from penstock.attention.backend import ForwardInputs, MediaInputs
from penstock.attention.cpu import CpuAttention
from penstock.cache.storage import KvStorage

BLOCK = 16


def block_table(num_blocks, layout, first_free):
    if layout == "one run":
        return list(range(first_free, first_free + num_blocks))
    if layout == "scattered":
        return [first_free + 2 * i for i in range(num_blocks)]
    return [first_free + (i ^ 3) for i in range(num_blocks)]  # short runs, out of order


def paged(
    chunks, rule, layout, heads=4, kv_heads=2, size=16, dtype=torch.float32, sinks=None, spans=(), has_flash=True
):
    """Runs (start, end) chunks of several sequences as one step; returns what was attended and what should be."""
    generator = torch.Generator().manual_seed(3)
    blocks_of = [-(-end // BLOCK) for _, end in chunks]
    storage = KvStorage(
        num_layers=1,
        num_slots=BLOCK * (4 * sum(blocks_of) + 16),
        num_kv_heads=kv_heads,
        head_size=size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    tables, expected, queries, starts, free = [], [], [], [0], 0
    for (start, end), num_blocks, own_spans in zip(chunks, blocks_of, spans or [()] * len(chunks), strict=True):
        tables.append(block_table(num_blocks, layout, free))
        free = max(tables[-1]) + 4
        q = torch.randn(end - start, heads, size, generator=generator).to(dtype)
        k, v = (torch.randn(end, kv_heads, size, generator=generator).to(dtype) for _ in range(2))
        slots = [tables[-1][p // BLOCK] * BLOCK + p % BLOCK for p in range(end)]
        storage.keys[0][slots], storage.values[0][slots] = k, v
        expected.append(dense(q, k, v, start, rule, sinks, own_spans))
        queries.append(q)
        starts.append(starts[-1] + len(q))
    attention = CpuAttention(storage, BLOCK)
    attention.has_flash = has_flash
    attention.begin_step(
        ForwardInputs(
            ids_T=torch.zeros(starts[-1], dtype=torch.long),
            positions_T=torch.cat([torch.arange(start, end) for start, end in chunks]),
            query_starts=tuple(starts),
            context_lens=tuple(end for _, end in chunks),
            block_table=tuple(map(tuple, tables)),
            rotary_variants=("default",) * len(chunks),
            sequence_ids=tuple(range(len(chunks))),
            logit_rows=torch.zeros(0, dtype=torch.long),
            media=MediaInputs(rows_N=torch.zeros(0), features_ND=torch.zeros(0), spans=spans) if spans else None,
        )
    )
    return attention.attend(0, torch.cat(queries), rule, sinks).float(), torch.cat(expected)
