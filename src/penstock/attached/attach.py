"""`attach` and `detach`: a transformers model whose own `generate` reads its prompt in exact chunks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self

from penstock.attached.reading import ChunkBounds, OnProgress, Reading, TextReader
from penstock.attached.source import SourceReader
from penstock.config import EngineConfig, parse_bytes
from penstock.errors import InvalidSetting, UnsupportedModel

DEFAULT_CHUNK_SIZE = 512


def attach(
    model: Any, *, chunk_size: int | None = None, memory: str | int | None = None, on_progress: OnProgress | None = None
) -> Attachment:
    """Makes `model.generate(...)` read prompts in chunks of at most `chunk_size`, within `memory`, from now on."""
    _require_model(model)
    if attached(model) is not None:
        raise InvalidSetting("The model is attached already; call penstock.detach(model) first.")
    bounds = ChunkBounds(
        chunk_size=_largest_chunk_size(chunk_size, memory),
        budget_bytes=None if memory is None else parse_bytes(memory),
        on_progress=on_progress,
    )
    return Attachment(model, (SourceReader if model.config.is_encoder_decoder else TextReader)(model, bounds))


def detach(model: Any) -> None:
    """Undoes `attach`: the model's own methods are what they were."""
    attachment = attached(model)
    if attachment is None:
        raise InvalidSetting("The model is not attached; there is nothing to undo.")
    attachment.restore()


def attached(model: Any) -> Attachment | None:
    wrapped = vars(model).get("generate")
    return wrapped.call.__self__ if isinstance(wrapped, _Wrapped) else None


class Attachment:
    """What stands in front of a model's `generate` and `forward`, and of its encoder's, with what reads behind it.

    Instances are given back what they had by `restore`; as a context manager it detaches at the end.
    """

    def __init__(self, model: Any, reader: TextReader | SourceReader) -> None:
        self.model = model
        self._reader = reader
        self._num_generates = 0
        self._depth = 0  # of generate calls that run now
        self._replaced: list[tuple[Any, str, Any]] = []  # instance, name, what was its own; None: its class's
        self._generate, self._forward = model.generate, model.forward
        self._put_before(model, "generate", self.generate)
        self._put_before(model, "forward", self.forward)
        if isinstance(reader, SourceReader):
            self._encode, self._read_source = reader.encoder.forward, reader.read_source
            self._put_before(reader.encoder, "forward", self.encode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    @property
    def reading(self) -> Reading | None:
        """How the last prompt was read; None: nothing has been read yet."""
        return self._reader.reading

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self._num_generates += self._depth == 0
        kwargs = self._reader.begin(self._num_generates, args, kwargs)
        self._depth += 1
        try:
            return self._generate(*args, **kwargs)
        finally:
            self._depth -= 1
            self._reader.end()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Reads a call over more tokens than a chunk in chunks, inside `generate`; all others are the model's."""
        if self._depth == 0 or args or not self._reader.takes(kwargs):
            return self._forward(*args, **kwargs)
        return self._aside(self._reader.read, kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the encoder's forward: a source is read in tiles."""
        if self._depth == 0:
            return self._encode(*args, **kwargs)
        return self._aside(self._read_source, *args, **kwargs)

    def restore(self) -> None:
        for instance, name, _ in self._replaced:
            if not isinstance(vars(instance).get(name), _Wrapped):
                raise InvalidSetting(
                    f"Something else has replaced the model's {name} since it was attached. Undo that first."
                )
        for instance, name, own in self._replaced:
            if own is None:
                delattr(instance, name)
            else:
                setattr(instance, name, own)

    def _put_before(self, instance: Any, name: str, call: Callable[..., Any]) -> None:
        self._replaced.append((instance, name, vars(instance).get(name)))
        setattr(instance, name, _Wrapped(call, like=getattr(instance, name)))

    def _aside(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """While something is read or checked, calls of the model are its own."""
        depth, self._depth = self._depth, 0
        try:
            return call(*args, **kwargs)
        finally:
            self._depth = depth


class _Wrapped:
    """A method that stands in front of another. An object, so that a copied model is attached to itself."""

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


def _largest_chunk_size(chunk_size: int | None, memory: str | int | None) -> int:
    if chunk_size is None:
        return DEFAULT_CHUNK_SIZE if memory is None else EngineConfig().most_auto_tokens
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise InvalidSetting(f"chunk_size is {chunk_size!r}; it must be a whole number of at least 1.")
    return chunk_size
