"""Attention of a few rows of a source over all of its keys, without a table of rows by keys.

Where no softcap or special mask asks for the scores themselves, torch's flash kernel keeps them in registers. A
relative bias depends on the distance alone, so one row of distances serves as the table of a whole tile.
"""

# B batch, H heads, K key-value heads, G heads per key-value head, D head size, T rows of a tile, S source tokens,
# N keys of a tile, X distances: 2 S - 1

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

KEY_ROWS = 1024
SCORE_ROWS = 256
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# (batch, head, query positions, key positions) -> which pairs see each other; the library's own kind of rule
MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenByAll:
    """Keys that every row sees, which are no tokens of the source. `addend`: of rows [low, high) to their scores."""

    k_BKGD: torch.Tensor
    v_BKGD: torch.Tensor
    addend: Callable[[int, int], torch.Tensor] | None = None  # [B, H, T, G]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRule:
    """What changes the scores of a layer besides its keys. None: nothing of that kind."""

    scale: float
    softcap: float | None = None
    bias_HX: torch.Tensor | None = None  # of each distance key - query, from -(S - 1) to S - 1
    mask: MaskFunction | None = None
    is_padding_BS: torch.Tensor | None = None
    keys: Callable[[int, int], tuple[int, int]] | None = None  # rows [start, end) see none outside
    beside: SeenByAll | None = None


def attend(
    q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, start: int, rule: SourceRule
) -> torch.Tensor:
    """[B, H, T, D]: the rows from position `start` on over all keys of the source."""
    has_rules = rule.softcap is not None or rule.mask is not None or rule.beside is not None
    is_plain = not has_rules and q_BHTD.shape[1] == k_BKSD.shape[1]
    has_one_addend = rule.bias_HX is None or rule.is_padding_BS is None
    if is_plain and has_one_addend and q_BHTD.device.type == "cpu":
        return _by_flash(q_BHTD, k_BKSD, v_BKSD, start, rule)
    parts = [
        _by_scores(q_BHTD[:, :, low : low + SCORE_ROWS], k_BKSD, v_BKSD, start + low, rule)
        for low in range(0, q_BHTD.shape[2], SCORE_ROWS)
    ]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _by_flash(
    q_BHTD: torch.Tensor, k_BHSD: torch.Tensor, v_BHSD: torch.Tensor, start: int, rule: SourceRule
) -> torch.Tensor:
    if rule.bias_HX is not None:
        # Rows are turned around because a view can only step forwards through the distances.
        bias_1HTS = _distance_view(rule.bias_HX, start, q_BHTD.shape[2], k_BHSD.shape[2])[None]
        return _flash(q_BHTD.flip(2), k_BHSD, v_BHSD, 0.0, False, attn_mask=bias_1HTS, scale=rule.scale)[0].flip(2)
    mask = None
    if rule.is_padding_BS is not None:
        mask = _additive(rule.is_padding_BS[:, None, None], q_BHTD.dtype)
        mask = mask.expand(-1, 1, q_BHTD.shape[2], -1)
    return _flash(q_BHTD, k_BHSD, v_BHSD, 0.0, False, attn_mask=mask, scale=rule.scale)[0]


def _distance_view(bias_HX: torch.Tensor, start: int, num_rows: int, num_keys: int) -> torch.Tensor:
    """[H, T, S] with the last row first: row r holds position start + T - 1 - r. No bytes of its own."""
    offset = bias_HX.storage_offset() + num_keys - start - num_rows
    return bias_HX.as_strided((bias_HX.shape[0], num_rows, num_keys), (bias_HX.stride(0), 1, 1), offset)


def _by_scores(
    q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, start: int, rule: SourceRule
) -> torch.Tensor:
    """Keys in tiles, merged by their running maximum and sum."""
    B, H, T, D = q_BHTD.shape
    K = k_BKSD.shape[1]
    q_BKRD = q_BHTD.reshape(B, K, H // K * T, D)
    highest = torch.full((B, H, T, 1), torch.finfo(torch.float32).min, device=q_BHTD.device)
    total = torch.zeros((B, H, T, 1), device=q_BHTD.device)
    out = torch.zeros((B, H, T, v_BKSD.shape[3]), device=q_BHTD.device)
    for k_BKND, v_BKND, addend, is_hidden in _key_tiles(k_BKSD, v_BKSD, start, T, rule):
        scores = (q_BKRD @ k_BKND.transpose(2, 3)).float().mul_(rule.scale).view(B, H, T, -1)
        if rule.softcap is not None:
            scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        if addend is not None:
            scores += addend
        if is_hidden is not None:
            scores.masked_fill_(is_hidden, torch.finfo(torch.float32).min)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        shrink = (highest - higher).exp_()
        weights = scores.sub_(higher).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        weights = weights.to(v_BKND.dtype).view(B, K, -1, v_BKND.shape[2])
        out.mul_(shrink).add_((weights @ v_BKND).view(B, H, T, -1))
        highest = higher
    return out.div_(total).to(q_BHTD.dtype)


def _key_tiles(
    k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, start: int, num_rows: int, rule: SourceRule
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """Yields keys, values, what is added to their scores, and which pairs do not see each other."""
    if (beside := rule.beside) is not None:
        addend = None if beside.addend is None else beside.addend(start, start + num_rows)
        yield beside.k_BKGD, beside.v_BKGD, addend, None
    batch, num_keys = k_BKSD.shape[0], k_BKSD.shape[2]
    first, last = (0, num_keys) if rule.keys is None else rule.keys(start, start + num_rows)
    for low in range(max(0, first), min(last, num_keys), KEY_ROWS):
        high = min(low + KEY_ROWS, last, num_keys)
        is_hidden = _hidden(batch, start, num_rows, low, high, rule, k_BKSD.device)
        if is_hidden is not None and bool(is_hidden.all()):
            continue
        addend = None
        if rule.bias_HX is not None:
            addend = _distance_view(rule.bias_HX, start, num_rows, num_keys)[:, :, low:high].flip(1)
        yield k_BKSD[:, :, low:high], v_BKSD[:, :, low:high], addend, is_hidden


def _hidden(
    batch: int, start: int, num_rows: int, low: int, high: int, rule: SourceRule, device: torch.device
) -> torch.Tensor | None:
    """[B or 1, 1, T, N]: pairs that do not see each other; None where all do."""
    is_hidden = None
    if rule.mask is not None:
        rows_T1 = torch.arange(start, start + num_rows, device=device)[:, None]
        is_hidden = ~rule.mask(0, 0, rows_T1, torch.arange(low, high, device=device)[None])[None, None]
    if rule.is_padding_BS is not None:
        is_padding = rule.is_padding_BS[:, None, None, low:high].expand(batch, 1, num_rows, -1)
        is_hidden = is_padding if is_hidden is None else is_hidden | is_padding
    return is_hidden


def _additive(is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill_(
        is_hidden, torch.finfo(dtype).min
    )
