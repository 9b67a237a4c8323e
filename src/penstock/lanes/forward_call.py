"""One forward of a transformers model over a prompt, cut: what it is given for tokens [start, end)."""

# B batch, T tokens, P tokens before them, V vocabulary

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.errors import InvalidSetting
from penstock.lanes.fixed_rotary import rotary_fixed_at
from penstock.plan.chunks import Span, Stops, chunk_end, merge_spans

CACHE_NAMES = ("past_key_values", "cache_params")
BY_TOKEN_ON_AXIS_1 = ("input_ids", "inputs_embeds")
BY_TOKEN_ON_LAST_AXIS = ("position_ids", "token_type_ids", "mm_token_type_ids", "cache_position")

# (start, end) of the chunk that was computed, and why it ends there
OnChunk = Callable[[int, int, str], None]


class ForwardPrompt(Protocol):
    """A prompt whose forward can be cut anywhere but inside its atomic spans."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def atomic(self) -> tuple[Span, ...]: ...

    def chunk(self, start: int, end: int) -> dict[str, Any]:
        """The inputs of tokens [start, end), without the cache and the number of logits."""
        ...

    def while_reading(self) -> AbstractContextManager[object]:
        """What must be in place on the model while chunks run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """The keyword arguments of a forward over text tokens or their embeddings, as `generate` prepares them."""

    inputs: Mapping[str, Any]
    num_tokens: int
    has_static_cache: bool = False
    atomic: tuple[Span, ...] = ()

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> TextCall:
        cache = next((inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None), None)
        call = cls(
            inputs={name: value for name, value in inputs.items() if name not in CACHE_NAMES},
            num_tokens=num_tokens(inputs),
            has_static_cache=bool(getattr(cache, "is_compileable", False)),
        )
        call._refuse_what_cannot_be_cut()
        return call

    def chunk(self, start: int, end: int) -> dict[str, Any]:
        return {name: self._cut(name, value, start, end) for name, value in self.inputs.items()}

    def while_reading(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _cut(self, name: str, value: Any, start: int, end: int) -> Any:
        if value is None:
            return None
        if name in BY_TOKEN_ON_AXIS_1:
            return value[:, start:end]
        if name in BY_TOKEN_ON_LAST_AXIS:
            return value[..., start:end]
        if name == "attention_mask":
            return self._cut_mask(value, start, end)
        return value

    def _cut_mask(self, mask: Any, start: int, end: int) -> Any:
        """[B, P + T] loses the keys after the chunk; [B, 1, T, keys] keeps the chunk's queries."""
        if isinstance(mask, Mapping):
            return {kind: None if one is None else self._cut_mask(one, start, end) for kind, one in mask.items()}
        if mask.ndim == 2:
            return mask[:, : mask.shape[1] - self.num_tokens + end]
        rows = mask[:, :, start:end]
        if self.has_static_cache:  # it always gives all of its keys
            return rows
        return rows[..., : mask.shape[-1] - self.num_tokens + end]

    def _refuse_what_cannot_be_cut(self) -> None:
        mask = self.inputs.get("attention_mask")
        if isinstance(mask, Mapping) and any("sliding" in kind or "chunked" in kind for kind in mask):
            raise InvalidSetting(
                "The cache is static and the model has sliding windows, whose masks are made for the whole prompt. "
                "Leave out cache_implementation='static', or detach the model."
            )
        known = {*BY_TOKEN_ON_AXIS_1, *BY_TOKEN_ON_LAST_AXIS, "attention_mask", "logits_to_keep"}
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor) and name not in known and self.num_tokens in value.shape[1:]:
                raise InvalidSetting(
                    f"The input {name!r} has the shape {tuple(value.shape)} for {self.num_tokens} tokens, and how "
                    f"it would be cut is not known. Leave it out, or detach the model."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderCall:
    """The arguments of an encoder-decoder model's forward over the tokens of its decoder; its source is read."""

    inputs: Mapping[str, Any]
    num_tokens: int
    atomic: tuple[Span, ...] = ()

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> DecoderCall | None:
        """None where there are no decoder tokens to cut, or the source comes with them and is not read yet."""
        ids_BT = inputs.get("decoder_input_ids")
        if ids_BT is None or inputs.get("encoder_outputs") is None:
            return None
        return cls(
            inputs={name: value for name, value in inputs.items() if name not in CACHE_NAMES},
            num_tokens=ids_BT.shape[1],
        )

    def chunk(self, start: int, end: int) -> dict[str, Any]:
        cut = {name: self.inputs[name] for name in self.inputs}
        for name in ("decoder_input_ids", "decoder_position_ids", "cache_position"):
            if cut.get(name) is not None:
                cut[name] = cut[name][..., start:end]
        if (mask_BT := cut.get("decoder_attention_mask")) is not None:
            cut["decoder_attention_mask"] = mask_BT[:, : mask_BT.shape[1] - self.num_tokens + end]
        return cut

    def while_reading(self) -> AbstractContextManager[object]:
        return nullcontext()


def num_tokens(inputs: Mapping[str, Any]) -> int:
    tokens = inputs.get("input_ids")
    tokens = tokens if tokens is not None else inputs.get("inputs_embeds")
    return tokens.shape[1] if tokens is not None else 0


def cache_name(forward: Callable[..., Any]) -> str:
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


def read_in_chunks(
    forward: Callable[..., Any],
    prompt: ForwardPrompt,
    *,
    model: torch.nn.Module,
    cache: tuple[str, Any],
    chunk_limit: Callable[[int], int],
    num_logit_rows: int | None,
    takes_logit_rows: bool,
    on_chunk: OnChunk,
) -> Any:
    """The output of the last chunk, with the logits of the last `num_logit_rows` tokens; None: of all tokens."""
    cache_name, cache_object = cache
    first_row = 0 if num_logit_rows is None else max(0, prompt.num_tokens - num_logit_rows)
    stops = Stops(end=prompt.num_tokens, atomic=_with_last_rows_whole(prompt, first_row, num_logit_rows))
    logits_BTV: list[torch.Tensor] = []
    start = 0
    output: Any = None
    with prompt.while_reading(), rotary_fixed_at(model, prompt.chunk(prompt.num_tokens - 1, prompt.num_tokens)):
        while start < prompt.num_tokens:
            end, reason = _end_of(start, chunk_limit(start), stops)
            num_rows = max(0, end - max(start, first_row))
            inputs = prompt.chunk(start, end) | {cache_name: cache_object, "use_cache": True, "return_dict": True}
            if takes_logit_rows:
                inputs["logits_to_keep"] = max(1, num_rows)  # 0 would mean all
            output = None  # logits that nobody wants must not live beside the next chunk
            output = forward(**inputs)
            cache_object = _cache_after(output, cache_name, cache_object)
            if num_rows:
                logits_BTV.append(output.logits[:, -num_rows:].clone())
            if end < prompt.num_tokens:
                _forget_recorded_past(cache_object)
            on_chunk(start, end, reason)
            start = end
    output.logits = logits_BTV[0] if len(logits_BTV) == 1 else torch.cat(logits_BTV, dim=1)
    return output


def _with_last_rows_whole(prompt: ForwardPrompt, first_row: int, num_rows: int | None) -> tuple[Span, ...]:
    """Candidates whose logits are wanted may be taken back; a cache can only take back tokens of its last call."""
    if num_rows is None or num_rows < 2:
        return prompt.atomic
    return merge_spans([*prompt.atomic, Span(start=first_row, end=prompt.num_tokens)])


def _forget_recorded_past(cache: Any) -> None:
    """Layers that record what a caller may take back keep every token until they are cropped, if only by 0."""
    if any(getattr(layer, "record_past", False) for layer in getattr(cache, "layers", ())):
        cache.crop(0)


def _end_of(start: int, limit: int, stops: Stops) -> tuple[int, str]:
    end = chunk_end(start, limit, stops)
    return end.position, end.reason


def _cache_after(output: Any, name: str, given: Any) -> Any:
    cache = getattr(output, name, None)
    if cache is None and given is None:
        raise InvalidSetting(f"The model returned no {name}, so a prompt cannot be read in chunks. Detach the model.")
    return cache if cache is not None else given
