"""One forward of a transformers model: its cache from call to call, and what it is given for tokens [start, end)."""

# B batch, T tokens, P tokens before them, D head size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from penstock.errors import InvalidSetting
from penstock.foreign.signature import CACHE_NAMES, ForwardSignature
from penstock.plan.chunks import Span, Stops, chunk_end, merge_spans

if TYPE_CHECKING:
    from penstock.foreign.images import MediaPrompt

TOKEN_NAMES = ("decoder_input_ids", "input_ids", "inputs_embeds")
TYPE_NAMES = ("token_type_ids", "mm_token_type_ids")
BY_TOKEN_ON_LAST_AXIS = ("position_ids", "decoder_position_ids", "cache_position", *TYPE_NAMES)
MASK_NAMES = ("attention_mask", "decoder_attention_mask")
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary tables that are chosen by the largest position of a call

# (start, end) of the chunk that was computed, and why it ends there
OnChunk = Callable[[int, int, str], None]


def num_tokens(inputs: Mapping[str, Any]) -> int:
    tokens = next((inputs[name] for name in TOKEN_NAMES if inputs.get(name) is not None), None)
    return tokens.shape[1] if tokens is not None else 0


def cache_in(inputs: Mapping[str, Any]) -> Any:
    """The cache object among a call's inputs; None: the model makes one in its first chunk."""
    return next((inputs[name] for name in CACHE_NAMES if inputs.get(name) is not None), None)


def num_cached_tokens(inputs: Mapping[str, Any]) -> int:
    """Counts the tokens before those of the call, by its mask or by its cache."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask.shape[1] - num_tokens(inputs)
    try:
        return int(cache.get_seq_length()) if (cache := cache_in(inputs)) is not None else 0
    except ValueError:  # a cache of states alone does not count tokens
        return 0


# --- calls with a cache -------------------------------------------------------------------------------------


# A prompt whose forward can be cut anywhere but inside its atomic spans.
ForwardPrompt: TypeAlias = "TextCall | MediaPrompt"


@dataclass(slots=True, kw_only=True)
class Cached:
    """What the calls of one sequence leave for the next."""

    cache: Any = None  # None: the model makes one
    num_read: int = 0  # tokens that the cache holds; 0 while a call runs, so that a broken one is not believed


class CachedForward:
    """Calls a model's forward for tokens [start, end) of a sequence, with the cache of the calls before.

    `forward`: what is called in place of the model, where something stands in front of the model's own.
    """

    def __init__(
        self, model: Any, signature: ForwardSignature | None = None, *, forward: Callable[..., Any] | None = None
    ) -> None:
        self.model = model
        self.signature = ForwardSignature.of(model.forward) if signature is None else signature
        self.cache_name = self.signature.cache_name or CACHE_NAMES[0]
        self._takes_use_cache = self.signature.accepts_use_cache
        self.takes_logit_rows = self.signature.accepts("logits_to_keep")
        self._forward = model if forward is None else forward
        self._rotaries = [module for module in model.modules() if _depends_on_length(module)]

    @property
    def depends_on_length(self) -> bool:
        return bool(self._rotaries)

    def call(self, inputs: Mapping[str, Any], cached: Cached | None = None) -> Any:
        """Gives the model's output; its cache goes into `cached`. None: the call stands alone and makes no cache."""
        given = dict(inputs)
        if self._takes_use_cache:
            given["use_cache"] = cached is not None
        if cached is None:
            return self._forward(**given)
        if cached.cache is not None:
            given[self.cache_name] = cached.cache
        num_read, cached.num_read = cached.num_read, 0
        output = self._forward(**given)
        returned = getattr(output, self.cache_name, None)
        cached.cache = cached.cache if returned is None else returned
        cached.num_read = num_read + num_tokens(inputs)
        return output

    def logits(self, inputs: Mapping[str, Any], rows: torch.Tensor, cached: Cached | None = None) -> torch.Tensor:
        """Computes float32 logits [rows, V] of one sequence, or of several joined, with the head run for these rows
        only. A forward without `logits_to_keep` is served by a hook that cuts the head's input, so that what the class
        does to logits still happens."""
        if self.takes_logit_rows:
            output = self.call({**inputs, "logits_to_keep": rows}, cached)
        else:
            with self._head_cut_to(rows):
                output = self.call(inputs, cached)
        logits = output.logits[0]
        if len(logits) != len(rows):
            logits = logits[rows]  # the head is called in a way of its own: all rows were computed
        return logits.float()

    @contextmanager
    def reading(self, prompt: ForwardPrompt) -> Generator[None]:
        """Puts in place what chunks of the prompt need: what it says itself, and rotary tables of its whole length."""
        positions = prompt.position_ids
        is_fixed = self._rotaries and positions is not None
        with prompt.while_reading(), _rotary_fixed_at(self._rotaries, positions) if is_fixed else nullcontext():
            yield

    def _head_cut_to(self, rows: torch.Tensor) -> AbstractContextManager[object]:
        def cut(head: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not arguments or arguments[0].ndim != 3:
                return None
            return (arguments[0][:, rows], *arguments[1:])

        try:
            head = self.model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return nullcontext()
        return head.register_forward_pre_hook(cut) if isinstance(head, torch.nn.Linear) else nullcontext()


def read_in_chunks(
    forward: CachedForward,
    prompt: ForwardPrompt,
    cached: Cached,
    *,
    chunk_limit: Callable[[int], int],
    num_logit_rows: int | None,
    on_chunk: OnChunk | None = None,
) -> Any:
    """The output of the last chunk, with the logits of the last `num_logit_rows` tokens; None: of all tokens."""
    first_row = 0 if num_logit_rows is None else max(0, prompt.num_tokens - num_logit_rows)
    stops = Stops(end=prompt.num_tokens, atomic=_with_last_rows_whole(prompt, first_row, num_logit_rows))
    takes_logit_rows = num_logit_rows is not None and forward.takes_logit_rows
    logits_BTV: list[torch.Tensor] = []
    start = 0
    output: Any = None
    with forward.reading(prompt):
        while start < prompt.num_tokens:
            stop = chunk_end(start, chunk_limit(start), stops)
            end = stop.position
            num_rows = max(0, end - max(start, first_row))
            inputs = prompt.chunk(start, end) | {"return_dict": True}
            if takes_logit_rows:
                inputs["logits_to_keep"] = max(1, num_rows)  # 0 would mean all
            output = None  # logits that nobody wants must not live beside the next chunk
            output = forward.call(inputs, cached)
            if cached.cache is None:
                raise InvalidSetting(f"The model returned no {forward.cache_name}, and chunks need a cache.")
            if num_rows:
                logits_BTV.append(output.logits[:, -num_rows:].clone())
            if end < prompt.num_tokens:
                _forget_recorded_past(cached.cache)
            if on_chunk is not None:
                on_chunk(start, end, stop.reason)
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


def _depends_on_length(module: torch.nn.Module) -> bool:
    rope_type = getattr(module, "rope_type", None)  # a name, or a name for each type of layer
    names = rope_type.values() if isinstance(rope_type, Mapping) else [rope_type]
    return any(kind in str(name) for name in names for kind in LENGTH_DEPENDENT)


@contextmanager
def _rotary_fixed_at(modules: list[torch.nn.Module], positions: torch.Tensor) -> Generator[None]:
    """A table is chosen by the largest position of a call: every chunk's call gets the prompt's last one, unseen."""

    def add_last_position(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.cat([position_ids, positions[..., -1:].expand(*position_ids.shape[:-1], 1)], dim=-1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def drop_last_position(module: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> Any:
        return tuple(table_BTD[..., :-1, :] for table_BTD in output)

    handles = [module.register_forward_pre_hook(add_last_position, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(drop_last_position) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- the prompt of text -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """The keyword arguments of a forward over text tokens or their embeddings, as `generate` prepares them; of an
    encoder-decoder model those over the tokens of its decoder."""

    inputs: Mapping[str, Any]
    num_tokens: int
    has_static_cache: bool = False
    atomic: tuple[Span, ...] = ()

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> TextCall:
        call = cls(
            inputs={name: value for name, value in inputs.items() if name not in CACHE_NAMES},
            num_tokens=num_tokens(inputs),
            has_static_cache=bool(getattr(cache_in(inputs), "is_compileable", False)),
        )
        call._refuse_what_cannot_be_cut()
        return call

    def with_first_whole(self, num_padding: int) -> TextCall:
        """Keeps that many tokens and the one after them in one chunk."""
        first = Span(start=0, end=min(num_padding + 1, self.num_tokens))
        return replace(self, atomic=merge_spans([*self.atomic, first]))

    @property
    def position_ids(self) -> torch.Tensor | None:
        """The positions of all tokens, on the last axis; None: the model counts them."""
        return self.inputs.get("position_ids")

    def chunk(self, start: int, end: int) -> dict[str, Any]:
        """The inputs of tokens [start, end), without the cache and the number of logits."""
        return {name: self._cut(name, value, start, end) for name, value in self.inputs.items()}

    def while_reading(self) -> AbstractContextManager[object]:
        """What must be in place on the model while chunks run."""
        return nullcontext()

    @property
    def _mask_name(self) -> str:
        """A decoder has a mask of its own beside that of its source."""
        return "decoder_attention_mask" if "decoder_input_ids" in self.inputs else "attention_mask"

    def _cut(self, name: str, value: Any, start: int, end: int) -> Any:
        if value is None:
            return None
        if name in TOKEN_NAMES:
            return value[:, start:end]
        if name in BY_TOKEN_ON_LAST_AXIS:
            return value[..., start:end]
        return self._cut_mask(value, start, end) if name == self._mask_name else value

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
        known = {*TOKEN_NAMES, *BY_TOKEN_ON_LAST_AXIS, *MASK_NAMES, "logits_to_keep"}
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor) and name not in known and self.num_tokens in value.shape[1:]:
                raise InvalidSetting(
                    f"The input {name!r} has the shape {tuple(value.shape)} for {self.num_tokens} tokens, and how "
                    f"it would be cut is not known. Leave it out, or detach the model."
                )
