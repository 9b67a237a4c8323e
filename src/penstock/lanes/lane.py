"""What a lane is: its kind in the table, its facts in documents, and what the engine asks of it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import InvalidSetting, reads_text_only
from penstock.request import MediaKey, SourceReading, Span

if TYPE_CHECKING:
    import torch

    from penstock.attention.backend import ForwardInputs
    from penstock.lanes.place import Place
    from penstock.models.layer_stream import LayerStream
    from penstock.plan.memory import MemoryModel, ModelShape
    from penstock.plan.waves import Waves
    from penstock.proof.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """`boundary` and `mask_mode` are empty while no chunking is active."""

    id: str  # the lane
    eligible: bool = True  # the lane can read this model in chunks
    applied: bool = False  # this prompt was, or would be, read in more than one chunk
    reason: str = ""  # why this lane, or why no chunking was active
    boundary: str = ""  # where chunks may end; empty if there was one chunk
    mask_mode: str = ""  # how attention is masked; empty if there was one chunk
    # What the lane does with this model; not part of the documents.
    reads_whole: bool = False  # chunks are not exact here: prompts are read in one piece
    reads_images: bool = False
    why_text_only: str = ""  # why of an image-text model only the text part is read; empty: it is not so
    reads_source: bool = False  # an encoder reads the prompt, in passes over it, and a decoder answers
    shares_prefixes: bool = True
    gives_hidden: bool = False  # hidden states can be had, for embeddings
    keeps_codes: bool = False  # weights may stay in few bits
    gains_from_width: bool = False  # wide chunks read the weights of experts less often
    chunk_boundary: str = "any token"
    chunk_mask_mode: str = "offset-causal"

    @property
    def reads_more_than_tokens(self) -> bool:
        """Tells whether a prompt is made whole before it is read, so that it is neither streamed nor planned ahead."""
        return self.reads_images or self.reads_source

    def after_reading(self, num_chunks: int) -> LaneFacts:
        """The facts of a prompt that was read in that many chunks."""
        if not self.eligible:
            return self
        if num_chunks > 1:
            return replace(self, applied=True, boundary=self.chunk_boundary, mask_mode=self.chunk_mask_mode)
        if self.reads_whole:
            return replace(self, applied=False)
        fits = "the whole prompt fits in one chunk: nothing had to be split"
        return replace(self, applied=False, reason=fits if num_chunks else "the prompt was not read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Whether a lane can run a model, and why or why not."""

    eligible: bool
    reason: str
    gains_from_width: bool = False  # the model has experts, and the lane runs them in few kernels
    runs_in_c: bool = False  # in bfloat16 on a processor, where the C kernels can run


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneKind:
    """One row of the table: what a lane says of a model before anything is loaded, and the class that loads it.

    A loader is made with the model's files before the weights are loaded: what it imports and builds counts as part of
    the runtime. Its `load` takes a Loading and gives a LoadedLane. That of a lane that is proven model by model has
    `library_class`, which finds the class to prove.
    """

    facts: LaneFacts  # those that hold for every model
    claim: Callable[[Mapping[str, Any]], Claim]  # from a model's config
    price: Callable[[Place, Verdict | None], MemoryModel]  # what a model costs; the plan and the loader both ask
    loader: str  # module:class, imported when a model is loaded
    needs_transformers: bool = True  # it is imported, and takes its share of memory
    is_checked: bool = False  # foreign code runs the model, so that each has to be proven
    is_own_kind: bool = False  # a model of it is of a kind that no lane before it reads, which needs no excuse

    @property
    def id(self) -> str:
        return self.facts.id

    def loader_class(self) -> type[Any]:
        """Imports what runs the lane: torch, and with some lanes transformers."""
        return resolve_name(self.loader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a lane is to read: token ids, or a text with placeholders and the images that belong there."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    images: tuple[Any, ...] = ()
    adds_special_tokens: bool = True  # to the text
    answer_start: tuple[int, ...] = ()
    scope: str = ""  # what is kept of its images serves prompts of this scope alone
    processed: Mapping[str, Any] | None = None  # what the processor made of text and images; None: it is still to run


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What a prompt is held to before work goes into it."""

    refuse_too_long: Callable[[int], None]  # given its number of tokens
    free_bytes: int  # that an encoder may take besides its own


class LanePrompt(Protocol):
    """A prompt as its lane reads it. Scheduler and engine carry it and do not look inside."""

    @property
    def positions(self) -> tuple[int, ...]:
        """The token ids that are scheduled; a source's passes are more of them than it has tokens."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def atomic(self) -> tuple[Span, ...]:
        """Spans that no chunk may end in."""

    @property
    def keys(self) -> tuple[MediaKey, ...]:
        """What tokens depend on besides their ids."""

    @property
    def source(self) -> SourceReading | None: ...

    @property
    def why_no_logprobs(self) -> str:
        """Empty where the prompt's tokens have log-probabilities."""

    @property
    def is_encoding(self) -> bool:
        """Tells whether `encode_next` must be called before the prompt can be read."""

    def encode_next(self) -> None:
        """Encodes one more part, such as an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A prompt of tokens alone, or a source and the start of its answer."""

    positions: tuple[int, ...]
    source: SourceReading | None = None
    why_no_logprobs: str = ""
    atomic: tuple[Span, ...] = ()
    keys: tuple[MediaKey, ...] = ()
    is_encoding: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.positions) if self.source is None else self.source.num_tokens

    def encode_next(self) -> None:
        """Does nothing: tokens are ready to be read."""


class Lane:
    """What the engine asks of a lane. As most have it: prompts of tokens, nothing kept of a sequence, nothing made
    ahead of time."""

    facts: LaneFacts
    shape: ModelShape
    max_prompt: int | None = None  # tokens of a prompt, where that is less than the context; None: it is not
    placeholder: int | None = None  # the token that stands for an image; None: there is none
    stream: LayerStream | None = None  # that reads layers from disk; None: all of them stay
    num_stops: int = 0  # layers, after each of which a chunk may stop; 0: it goes through all

    @property
    def captures_steps(self) -> bool:
        """Tells whether `capture` makes something for steps with prompt chunks."""
        return False

    @property
    def recorded_bytes(self) -> int:
        """Counts what captures keep of a card, beside what tensors hold."""
        return 0

    @property
    def waves(self) -> Waves | None:
        """The waves in which a GPU attends; None where they are not known."""
        return None

    def read(self, ask: Asked) -> Asked:
        """Does what of `prompt` takes long and may be done in any thread: opens images and scales them."""
        return ask

    def prompt(self, ask: Asked, limits: PromptLimits) -> LanePrompt:
        """Makes what is asked into a prompt of this lane, or refuses it."""
        if ask.images:
            raise reads_text_only(len(ask.images), self.facts.id, self.facts.why_text_only)
        if ask.answer_start:
            raise InvalidSetting("answer_start is for encoder-decoder models. Give it as part of the prompt.")
        return TextPrompt(positions=ask.tokens)

    def refuse_too_long(self, num_tokens: int, *, is_all: bool = True) -> None:
        """Refuses nothing unless a lane says more: the context says how long a prompt may be."""

    def begin(self, sequence_id: int, prompt: Any) -> None:
        """Takes a prompt of this lane, which a sequence will read from its start; tokens come with the steps."""

    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        """Float32 logits of `inputs.logit_rows`."""
        raise NotImplementedError

    def release(self, sequence_id: int) -> None:
        """Frees what the lane itself keeps of a sequence that ended or must begin again; blocks are the scheduler's."""

    def capture(self) -> None:
        """Makes ahead of time what would be made in the middle of requests."""

    def use_products(self, num_tokens: int) -> None:
        """Uses the matrix kernels of a step of that size, so that no request waits until they are loaded."""
