"""Errors users can meet. Each says what, the value, the limit and the way out, and knows its HTTP status."""


def first_line(error: BaseException | str, most_letters: int | None = 160) -> str:
    """Returns what an error says first, without its stop, to be put into a sentence; its class if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:most_letters].rstrip(". ")


def brief(value: object) -> str:
    """Writes a value from a file short enough to stand in a sentence."""
    text = repr(value[:60] if isinstance(value, (str, list, tuple)) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def counted(num_tokens: int, *, is_all: bool) -> str:
    """Writes the number of tokens of a prompt that may not have been read to its end."""
    return f"{num_tokens} tokens" if is_all else f"{num_tokens} tokens or more"


class PenstockError(Exception):
    """Base of every error that is the caller's to mend; the command line prints it and exits with 2."""

    status = 400


class InvalidSetting(PenstockError):
    """A flag, environment variable, TOML key or argument has a value outside its range."""


class InvalidPrompt(PenstockError):
    """The prompt is empty, not text, or cannot be rendered."""


class PromptTooLong(PenstockError):
    """The prompt does not fit the model's context or the memory budget."""

    status = 413


class MemoryTooSmall(PenstockError):
    """The byte budget cannot hold the weights and the smallest chunk."""


class ModelNotFound(PenstockError):
    """No such folder, file or hub id, or the network that would fetch it is not there."""

    status = 404


class InvalidModelFile(PenstockError):
    """A weight, config or tokenizer file is missing, truncated or corrupt."""


class UnsupportedModel(PenstockError):
    """The architecture, or something in its config, is not one that we run."""


class QueueFull(PenstockError):
    """Too many requests or prompt tokens wait already."""

    status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineClosed(PenstockError):
    """The engine is shutting down or was closed."""

    status = 503


class UnknownLane(PenstockError):
    """The lane that was asked for does not exist or cannot run this model."""


class InvalidMedia(PenstockError):
    """An image cannot be read, is too large, or does not fit the placeholders of the prompt."""


class InvalidTrace(PenstockError):
    """A file is no trace, or one of a version that is not read."""


def reads_text_only(num_images: int, lane: str, why: str = "") -> InvalidMedia:
    """`why`: what keeps an image-text model to its text part; empty for a text model."""
    if why:
        return InvalidMedia(
            f"{num_images} image(s) given; of this model only the text part is read: {why}. Leave them out."
        )
    return InvalidMedia(
        f"{num_images} image(s) given; this model runs on {lane}, which reads text only. Leave them out or take an "
        "image-text model."
    )
