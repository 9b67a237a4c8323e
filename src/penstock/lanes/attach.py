"""`attach` and `detach`: a transformers model whose own `generate` reads its prompt in exact chunks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from penstock.config import EngineConfig, parse_bytes
from penstock.errors import InvalidSetting, PenstockError, UnsupportedModel
from penstock.lanes.attached_media import AttachedImages, media_prompt
from penstock.lanes.attached_prompt import Limits, OnProgress, PromptReading, Reading
from penstock.lanes.attached_source import SourceAttachment
from penstock.lanes.forward_call import ForwardPrompt, TextCall, num_tokens, read_in_chunks
from penstock.lanes.forward_check import CHUNK_SIZES, check_forward
from penstock.lanes.forward_memory import forward_memory, held_bytes
from penstock.lanes.media import MediaModel, media_model
from penstock.lanes.selfcheck import check_attached

DEFAULT_CHUNK_SIZE = 512
PADDING_TRIED = 5  # tokens of padding in the check of padded prompts
WRAPPED = ("forward", "generate")  # the model's methods that an attachment stands in front of


def attach(
    model: Any,
    *,
    chunk_size: int | None = None,
    memory: str | int | None = None,
    on_progress: OnProgress | None = None,
) -> Attachment | SourceAttachment:
    """From now on `model.generate(...)` reads prompts in chunks of at most `chunk_size`, within `memory`."""
    _require_model(model)
    if attached(model) is not None:
        raise InvalidSetting("The model is attached already; call penstock.detach(model) first.")
    largest = _largest_chunk_size(chunk_size, memory)
    budget = None if memory is None else parse_bytes(memory)
    if model.config.is_encoder_decoder:
        source = SourceAttachment(model, chunk_size=largest, budget_bytes=budget, on_progress=on_progress)
        model.generate = _Wrapped(source.generate, like=model.generate)
        model.forward = _Wrapped(source.forward, like=model.forward)
        source.encoder.forward = _Wrapped(source.encode, like=source.encoder.forward)
        return source
    _require_exact(model)
    attachment = Attachment(model, chunk_size=largest, budget_bytes=budget, on_progress=on_progress)
    model.generate = _Wrapped(attachment.generate, like=model.generate)
    model.forward = _Wrapped(attachment.forward, like=model.forward)
    return attachment


def detach(model: Any) -> None:
    """Undoes `attach`: the model's own methods are what they were."""
    attachment = attached(model)
    if attachment is None:
        raise InvalidSetting("The model is not attached; there is nothing to undo.")
    attachment.restore()


def attached(model: Any) -> Attachment | SourceAttachment | None:
    wrapped = vars(model).get("generate")
    return wrapped.call.__self__ if isinstance(wrapped, _Wrapped) else None


class Attachment:
    """What stands between a model's `generate` and its `forward`. As a context manager it detaches at the end."""

    def __init__(
        self,
        model: Any,
        *,
        chunk_size: int,
        budget_bytes: int | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.model = model
        self.limits = Limits(
            chunk_size=chunk_size, budget_bytes=budget_bytes, memory=forward_memory(model), device=model.device
        )
        self.on_progress = on_progress
        self.reading: Reading | None = None  # None: nothing has been read yet
        self._num_generates = 0
        self._depth = 0  # of generate calls that run now
        self._num_prompt_tokens = 0  # of the generate call that runs now; 0: not read yet
        self._wants_last_row_only = True
        self._is_padding_proven = False
        self._takes_logit_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._own = {name: vars(model).get(name) for name in WRAPPED}  # None: the class's
        self._generate, self._forward = model.generate, model.forward
        self.media: MediaModel | None = media_model(model)  # None: it takes text alone
        self._images: AttachedImages | None = None  # of the generate call that runs now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def restore(self) -> None:
        for name in self._own:
            if not isinstance(vars(self.model).get(name), _Wrapped):
                raise InvalidSetting(
                    f"Something else has replaced the model's {name} since it was attached. Undo that first."
                )
        for name, own in self._own.items():
            if own is None:
                delattr(self.model, name)
            else:
                setattr(self.model, name, own)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache_implementation") == "paged":
            raise InvalidSetting(
                "cache_implementation='paged' reads prompts in pieces of its own. Leave it out, or detach the model."
            )
        self._num_generates += self._depth == 0
        self._depth += 1
        self._num_prompt_tokens = 0
        self._wants_last_row_only = not _checks_candidates(self.model, kwargs)
        if self.media is not None and self._wants_last_row_only:
            self._images, kwargs = AttachedImages.taken_from(self.media, args, kwargs)
        try:
            return self._generate(*args, **kwargs)
        finally:
            self._depth -= 1
            self._images = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Inside `generate`, a call over more tokens than a chunk is read in chunks; all others are the model's."""
        is_candidates = num_tokens(kwargs) < self._num_prompt_tokens  # the prompt is read; an assistant's guess follows
        if self._depth == 0 or args or num_tokens(kwargs) <= 1 or is_candidates:
            return self._forward(*args, **kwargs)
        self._num_prompt_tokens = num_tokens(kwargs)
        is_short = num_tokens(kwargs) <= self.limits.chunk_size and self.limits.budget_bytes is None
        if is_short and self._images is None:
            self.reading = Reading.whole(num_tokens(kwargs), "the prompt fits one chunk")
            return self._forward(**kwargs)
        read = PromptReading(
            self._prompt(kwargs), kwargs, self.limits, request_id=self._num_generates, on_progress=self.on_progress
        )
        _refuse_outputs_of_all_tokens(kwargs)
        self._require_exact_padding(kwargs.get("attention_mask"))
        output = read_in_chunks(
            self._forward,
            read.prompt,
            model=self.model,
            cache=read.cache,
            chunk_limit=read.chunk_limit,
            num_logit_rows=self._num_logit_rows(kwargs),
            takes_logit_rows=self._takes_logit_rows,
            on_chunk=read.on_chunk,
        )
        self.reading = read.reading()
        return output

    def _prompt(self, inputs: Mapping[str, Any]) -> ForwardPrompt:
        if self.media is None:
            return TextCall.of(inputs)
        budget = self.limits.budget_bytes
        free = None if budget is None else max(1, budget - held_bytes(self.limits.device))
        return media_prompt(self.media, inputs, self._images, free_bytes=free)

    def _require_exact_padding(self, mask: Any) -> None:
        """Checked when the first padded prompt comes, because most prompts are not padded."""
        is_padded = isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool(mask.all())
        if is_padded and not self._is_padding_proven:
            depth, self._depth = self._depth, 0  # the check's own forwards are the model's
            try:
                _require_exact(self.model, self._padded_sizes(), num_padding=PADDING_TRIED)
            finally:
                self._depth = depth
            self._is_padding_proven = True

    def _padded_sizes(self) -> tuple[int, ...]:
        """Padding comes first, so only chunks of the largest size hold it; under a budget that may be any size."""
        smallest = 1 if self.limits.budget_bytes is not None else min(self.limits.chunk_size, *CHUNK_SIZES[:2])
        return tuple(size for size in {*CHUNK_SIZES, smallest} if smallest <= size <= self.limits.chunk_size)

    def _num_logit_rows(self, inputs: Mapping[str, Any]) -> int | None:
        rows = inputs.get("logits_to_keep")
        if isinstance(rows, torch.Tensor):
            raise InvalidSetting("logits_to_keep is a tensor; with an attached model it must be a number.")
        return rows or (1 if self._wants_last_row_only and "logits_to_keep" not in inputs else None)


class _Wrapped:
    """A method that stands in front of the model's own. An object, so that a copied model is attached to itself."""

    def __init__(self, call: Callable[..., Any], *, like: Callable[..., Any]) -> None:
        self.call = call
        self.__signature__ = inspect.signature(like)
        self.__doc__ = like.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _require_model(model: Any) -> None:
    from transformers import GenerationMixin, PreTrainedModel

    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise UnsupportedModel(f"attach takes a transformers model that can generate, not {kind}.")


def _require_exact(model: Any, chunk_sizes: tuple[int, ...] = CHUNK_SIZES, *, num_padding: int = 0) -> None:
    """The one place where a model must prove that chunks give what the whole prompt gives."""
    if num_padding:
        found = check_forward(model, chunk_sizes=chunk_sizes, num_padding=num_padding)
    else:
        found = check_attached(model)
    if not found.exact:
        padded = " when prompts are padded" if num_padding else ""
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be read in chunks{padded}: {found.reason}. Use it without attach."
        )


def _largest_chunk_size(chunk_size: int | None, memory: str | int | None) -> int:
    if chunk_size is None:
        return DEFAULT_CHUNK_SIZE if memory is None else EngineConfig().most_auto_tokens
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise InvalidSetting(f"chunk_size is {chunk_size!r}; it must be a whole number of at least 1.")
    return chunk_size


def _checks_candidates(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Assisted generation wants the logits of its candidates; a decoding loop of the caller may want any."""
    if kwargs.get("assistant_model") is not None or kwargs.get("custom_generate") is not None:
        return True
    config = kwargs.get("generation_config") or model.generation_config
    names = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    return any(kwargs.get(name) or getattr(config, name, None) for name in names)


def _refuse_outputs_of_all_tokens(inputs: Mapping[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states"):
        if inputs.get(name):
            raise PenstockError(
                f"{name}=True asks for every token of the prompt at once, which chunks never hold. Leave it out, or "
                f"detach the model."
            )
