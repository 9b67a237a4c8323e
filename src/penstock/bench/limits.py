"""`DeviceLimits`: what a device multiplies and reads at most, as measured; the least time that work needs by them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise

from penstock.document import Document
from penstock.models.projections import EXPERT_ROLES, projections
from penstock.models.quantization import Quantization, matrix_bytes
from penstock.models.spec import DecoderSpec

LIMIT_S = 1.0  # for each limit
BYTES = 2  # of a number in bfloat16
# (rows, inputs, outputs) of the products that are tried; on a processor also so few that others miss some.
ON_PROCESSOR = ((256, 1024, 2048), (1024, 1024, 4096))
ON_CARD = ((8192, 8192, 8192), (8192, 4096, 24576), (16384, 4096, 4096))


class DeviceLimits(Document):
    product_gflops: float
    read_gb_per_s: float

    def larger(self, other: DeviceLimits) -> DeviceLimits:
        """Whatever disturbs the measurement of a limit lowers it."""
        ours, theirs = self.model_dump(), other.model_dump()
        return DeviceLimits(**{name: max(value, theirs[name]) for name, value in ours.items()})


def limits_of_processor(threads: int) -> DeviceLimits:
    import penstock.engine  # noqa: F401 - says how threads wait, before torch

    # isort: split
    import torch

    torch.set_num_threads(threads)
    return measured_limits("cpu")


def measured_limits(device: str) -> DeviceLimits:
    """Measures the best of products of bfloat16 rows, and of sums over memory."""
    import torch

    is_card = device == "cuda"
    seconds = partial(_fastest_s, torch.cuda.synchronize if is_card else lambda: None)
    products = []
    for num_rows, num_inputs, num_outputs in ON_CARD if is_card else ON_PROCESSOR:
        rows, matrix = (torch.randn(length, num_inputs, device=device).bfloat16() for length in (num_rows, num_outputs))
        products.append(2 * rows.numel() * num_outputs / seconds(partial(torch.matmul, rows, matrix.T)))
        del rows, matrix
    # One after the other, so that none is still in a cache.
    pieces = torch.ones(4, 2**30, dtype=torch.bfloat16, device=device) if is_card else torch.ones(16, 4 * 2**20)
    order = cycle(pieces)
    read = pieces[0].nbytes / seconds(lambda: next(order).sum(dtype=torch.float32))
    return DeviceLimits(product_gflops=max(products) / 1e9, read_gb_per_s=read / 1e9)


def _fastest_s(wait: Callable[[], object], work: Callable[[], object]) -> float:
    """Times the work to the end of a wait for the device, over and over."""
    began = time.perf_counter()
    ends = [began]
    while ends[-1] - began < LIMIT_S:
        work()
        wait()
        ends.append(time.perf_counter())
    return min(end - start for start, end in pairwise(ends))


def least_read_s(
    spec: DecoderSpec, num_tokens: int, limits: DeviceLimits, quantization: Quantization | None = None
) -> float:
    """Tells the least time for a prompt: nothing but its products, or nothing but reading the weights once."""
    read_s = least_step_s(spec, [0] * num_tokens, limits, quantization)
    return max(least_product_s(spec, num_tokens, limits), read_s)


def least_product_s(spec: DecoderSpec, num_tokens: int, limits: DeviceLimits) -> float:
    """Tells that of a prompt's products. Of the last layer, all tokens but one need keys and values alone."""
    before, last = replace(spec, layers=spec.layers[:-1]), spec.layers[-1]
    attending = (layer for layer in before.layers if layer.has_attention)
    pairs = sum(_num_pairs(num_tokens, layer.window) * layer.head_size for layer in attending)
    kept = 2 * last.kv_rows * spec.hidden_size if last.has_attention else 0
    flops = 2 * num_tokens * (_parameters_of_layers(before, 1) + kept) + 2 * spec.vocab_size * spec.hidden_size
    return (flops + 4 * spec.num_heads * pairs) / (limits.product_gflops * 1e9)


def least_step_s(
    spec: DecoderSpec, contexts: Sequence[int], limits: DeviceLimits, quantization: Quantization | None = None
) -> float:
    """Tells the least time for one token of each answer: weights, and the keys and values before it, read once.

    Experts are expected to be chosen alike, as random weights choose them.
    """
    weights = _parameters_of_layers(spec, len(contexts)) + spec.vocab_size * spec.hidden_size
    attending = [layer for layer in spec.layers if layer.has_attention]
    seen = sum(min(context, layer.window or context) * layer.kv_rows for context in contexts for layer in attending)
    saved = 0 if quantization is None else _saved_bytes(spec, len(contexts), quantization)
    return (BYTES * (weights + 2 * seen) - saved) / (limits.read_gb_per_s * 1e9)


def _saved_bytes(spec: DecoderSpec, num_rows: int, quantization: Quantization) -> float:
    """Tells how much less is read of matrices that are kept in few bits."""
    saved, looked_up = 0.0, {"layer_table"} if spec.has_tied_embeddings else {"layer_table", "embeddings"}
    for matrix in projections(spec):
        types = quantization.types(matrix)
        if types and matrix.role not in looked_up:
            kept = sum(matrix_bytes(kind, num_outputs, matrix.num_inputs) for kind, num_outputs in types)
            share = 1 - _unchosen(spec, num_rows) if matrix.role in EXPERT_ROLES else 1
            saved += share * (BYTES * matrix.num_outputs * matrix.num_inputs - kept)
    return saved


def _num_pairs(num_tokens: int, window: int | None) -> int:
    """Counts (query, key) pairs of causal attention."""
    span = min(num_tokens, window or num_tokens)
    return span * (span + 1) // 2 + (num_tokens - span) * span


def _parameters_of_layers(spec: DecoderSpec, num_rows: int) -> float:
    """Counts the parameters of the layers that so many rows together are multiplied with."""
    everything = spec.num_parameters - spec.num_embedded
    if spec.experts is None:
        return everything
    of_one = (2 + spec.experts.is_gated) * spec.experts.intermediate_size * spec.hidden_size
    num_sparse = sum(layer.has_experts for layer in spec.layers)
    return everything - num_sparse * spec.experts.num_experts * _unchosen(spec, num_rows) * of_one


def _unchosen(spec: DecoderSpec, num_rows: int) -> float:
    """Tells the share of experts that none of so many rows chooses."""
    return (1 - spec.experts.num_active / spec.experts.num_experts) ** num_rows if spec.experts else 0.0
