"""Joined steps of a transformers model over our pages, through the library's attention interface.

The model hands every layer's queries, keys and values to the registered function, already rotated.
"""

# T tokens of the step, H heads, K key-value heads, D head size

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from penstock.attention.backend import AttentionBackend, AttentionRule, ForwardInputs
from penstock.cache.storage import KvStorage
from penstock.errors import first_line
from penstock.foreign.forward import CachedForward
from penstock.foreign.signature import ForwardSignature
from penstock.lanes.graphs import DecodeGraphs

if TYPE_CHECKING:
    from penstock.attention.cuda import DecodeAttention

ATTENTION_NAME = "penstock"


class CannotJoin(Exception):
    """The model asks of attention what our backends do not do; it is run in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """The sizes of one attention call of a forward; the n-th call of every step has the n-th layer's pages."""

    num_heads: int
    num_kv_heads: int
    head_size: int  # keys or values that are shorter are filled up with zeros


@dataclass(slots=True)
class _JoinedStep:
    """What the registered function needs while a model runs: where keys go, and which call this is."""

    attention: AttentionBackend | None  # None: nothing attends, the sizes of the calls are wanted
    calls: list[CallSizes] = field(default_factory=list)


_current: ContextVar[_JoinedStep | None] = ContextVar("penstock_attention", default=None)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Has the form of transformers' attention functions: [1, H, T, D] in, [1, T, H, D] out."""
    _refuse_unknown(module, attention_mask, is_causal, others)
    current = _current.get()
    if current is None:
        raise CannotJoin("attention was called outside of a step")
    attention, layer = current.attention, len(current.calls)
    current.calls.append(_sizes(query, key, value))
    if attention is None:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None  # some models view it
    width = max(key.shape[-1], value.shape[-1])
    q_THD, k_TKD, v_TKD = (
        torch.nn.functional.pad(x[0], (0, width - x.shape[-1])).transpose(0, 1) for x in (query, key, value)
    )
    rule = AttentionRule(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap,
    )
    sinks_H = None if s_aux is None else s_aux.float()
    q_THD = attention.store(layer, q_THD, k_TKD, v_TKD, None)
    return attention.attend(layer, q_THD, rule, sinks_H)[None, ..., : value.shape[-1]], None


def _sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> CallSizes:
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise CannotJoin("attention is called with other keys than the step's own")
    return CallSizes(num_heads=query.shape[1], num_kv_heads=key.shape[1], head_size=max(key.shape[-1], value.shape[-1]))


def _refuse_unknown(module: Any, mask: object, is_causal: bool | None, others: dict[str, Any]) -> None:
    """A mask or a bias that the model makes itself would be lost here."""
    if mask is not None:
        raise CannotJoin("the model makes an attention mask of its own")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise CannotJoin("a layer's attention is not causal")
    for name, value in others.items():
        if isinstance(value, torch.Tensor) and name not in ("position_ids", "cache_position"):
            raise CannotJoin(f"attention is given {name!r}, which our backends do not know")


def use_paged_attention(model: Any) -> None:
    """Makes the model call our attention; raises where its class does not use the interface."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    if not model._can_set_attn_implementation():
        raise CannotJoin(f"{type(model).__name__} does not use the library's attention interface")
    set_attention(model, ATTENTION_NAME)
    if model.config.get_text_config()._attn_implementation != ATTENTION_NAME:
        raise CannotJoin(f"{type(model).__name__} does not take another attention")


def set_attention(model: Any, name: str) -> None:
    """Sets the attention of the decoder alone: images are encoded as they were."""
    text = model.config.get_text_config()
    parts = [part for part in model.config.sub_configs if getattr(model.config, part, None) is text]
    model.set_attn_implementation({"": name, parts[0]: name} if parts else name)


@torch.inference_mode()
def attention_calls(model: Any, signature: ForwardSignature) -> tuple[CallSizes, ...]:
    """The sizes of every attention call of a forward, from one token; raises where our pages cannot hold them."""
    if not signature.accepts("position_ids"):
        raise CannotJoin("its forward takes no position_ids")
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise CannotJoin("its own cache holds compressed keys, which are many times smaller than pages of whole ones")
    probe = _JoinedStep(None)
    token = _current.set(probe)
    try:
        zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        CachedForward(model, signature).logits({"input_ids": zero, "position_ids": zero}, zero[0])
    except CannotJoin:
        raise
    except Exception as error:  # some models read the mask that our attention does without
        raise CannotJoin(f"its forward fails with our attention ({first_line(error)})") from error
    finally:
        _current.reset(token)
    sizes = {(call.num_kv_heads, call.head_size) for call in probe.calls}
    if not sizes:
        raise CannotJoin("no layer called the library's attention interface")
    if len(sizes) > 1:
        raise CannotJoin("its layers have keys of different sizes")
    return tuple(probe.calls)


def pages_of(model: Any, calls: Sequence[CallSizes], num_slots: int) -> KvStorage:
    """Makes the pages of a model that calls our attention in these sizes."""
    return KvStorage(
        num_layers=len(calls),
        num_slots=num_slots,
        num_kv_heads=calls[0].num_kv_heads,
        head_size=calls[0].head_size,
        dtype=model.dtype,
        device=model.device,
    )


@contextmanager
def attending(attention: AttentionBackend, num_calls: int) -> Generator[None]:
    """Lets the attention calls of one forward have the pages of their layers."""
    step = _JoinedStep(attention)
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)
    assert len(step.calls) == num_calls, f"{len(step.calls)} attention calls, {num_calls} expected"


class JoinedForward:
    """The model's forward over the joined tokens of a step, whose keys and values lie in our pages."""

    def __init__(self, model: Any, signature: ForwardSignature, num_calls: int) -> None:
        self.model = model
        self.calls = CachedForward(model, signature)
        self._num_calls = num_calls

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def forward(self, inputs: ForwardInputs, attention: AttentionBackend) -> torch.Tensor:
        """Logits of every token of the step, which `attention` has begun."""
        return self.logits(inputs, attention, torch.arange(len(inputs.ids_T), device=self.device))

    def logits(self, inputs: ForwardInputs, attention: AttentionBackend, rows: torch.Tensor) -> torch.Tensor:
        joined = {"input_ids": inputs.ids_T[None], "position_ids": inputs.positions_T[None]}
        with attending(attention, self._num_calls):
            return self.calls.logits(joined, rows)


class JoinedModel:
    """Runs ForwardInputs through a model that calls our attention; `joins` sequences into one call, or one by one."""

    def __init__(
        self,
        model: Any,
        signature: ForwardSignature,
        attention: AttentionBackend,
        *,
        num_calls: int,
        joins: bool = True,
    ) -> None:
        self.attention = attention
        self.joined = JoinedForward(model, signature, num_calls)
        self._joins = joins
        self.graphs: DecodeGraphs | None = None  # None: every decode is launched kernel by kernel

    def capture_decodes(self, attention: DecodeAttention) -> None:
        """Captures decodes from now on, where the model's forward can be captured."""
        if self.joined.calls.depends_on_length:
            return  # padding would count as a position
        graphs = DecodeGraphs(self.joined, attention)
        self.graphs = graphs if graphs.can_capture() else None

    def capture(self) -> None:
        """Captures decodes ahead of time, so that no request waits for it."""
        if self.graphs is not None:
            self.graphs.capture_all()

    @torch.inference_mode()
    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        if self._joins or inputs.num_chunks == 1:
            return self._run(inputs)
        return torch.cat([self._run(alone) for alone in one_by_one(inputs)])

    def _run(self, inputs: ForwardInputs) -> torch.Tensor:
        if self.graphs is not None and self.graphs.fits(inputs):
            return self.graphs.forward(inputs)[inputs.logit_rows]
        self.attention.begin_step(inputs)
        return self.joined.logits(inputs, self.attention, inputs.logit_rows)


def one_by_one(inputs: ForwardInputs) -> list[ForwardInputs]:
    """The step as steps of one chunk each, in its order."""
    return [inputs.cut([(index, *rows)]) for index, rows in enumerate(pairwise(inputs.query_starts))]
