"""Plain attention in float64: what every backend is held to."""

import torch


def dense(q, k, v, first, rule, sinks=None, spans=()):
    """[T, H, D] of queries at positions first... over all keys, with the whole score matrix in view.

    Queries of a span see the keys of it that come after them, too.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = torch.einsum("thd,shd->hts", q.double(), k) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    positions, keys = torch.arange(first, first + len(q))[:, None], torch.arange(len(k))
    seen = keys <= positions
    if rule.window:
        seen &= keys > positions - rule.window
    for span in spans:
        in_span = (keys >= span.start) & (keys < span.end) & (positions >= span.start) & (positions < span.end)
        seen |= in_span & (keys > positions)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hts,shd->thd", weights, v).float()
