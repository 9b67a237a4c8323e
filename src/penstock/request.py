"""What flows: the ask (Request), its progress (Sequence), a step's plan and outcome, and what users receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

from penstock.errors import InvalidSetting

FinishReason = Literal["stop", "length", "abort", "deadline"]
HitReason = Literal["running", "pinned", "recent", "disk"]
Pooling = Literal["mean", "last"]
LEAST_TEMPERATURE = 1e-4  # logits that are divided by less leave what a float holds
MAX_TOP_K = 2**31 - 1  # the device is told it in 32 bits, in one table for all rows of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # None: none; 0: the chosen token's; n: with n alternatives
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0  # before these are written, neither an end token nor a stop string ends the answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    grammar: str | None = None  # what the answer must match, as llguidance writes it
    pooling: Pooling | None = None  # None: no embedding is made
    shown_tokens: tuple[int, ...] = ()  # special tokens that the text of the answer shows

    @property
    def needs_every_token(self) -> bool:
        """Tells whether something is made from every prompt token, so that none may come from the prefix cache."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    @classmethod
    def of(cls, values: dict[str, Any]) -> SamplingParams:
        """Reads arguments as users give them; a name that does not exist is refused."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            names = ", ".join(sorted(known))
            raise InvalidSetting(f"There is no sampling setting {unknown[0]!r}; known ones are {names}.")
        stop, bias = values.get("stop"), values.get("logit_bias")
        if stop is not None or "stop" in values:
            values = values | {"stop": (stop,) if isinstance(stop, str) else tuple(stop or ())}
        if isinstance(bias, Mapping):
            values = values | {"logit_bias": tuple(bias.items())}
        return cls(**values)

    @property
    def is_penalized(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def is_likeliest(self) -> bool:
        """Whether each token is the likeliest one of the model itself: no history and no chance is needed for it."""
        is_free = not self.min_tokens and not self.logit_bias and self.grammar is None
        return self.temperature == 0 and not self.is_penalized and is_free

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        is_warm = LEAST_TEMPERATURE <= self.temperature <= 100
        _require("temperature", self.temperature, self.temperature == 0 or is_warm, "0 (greedy), or 0.0001 to 100")
        has_top = self.top_k is None or 1 <= self.top_k <= MAX_TOP_K
        _require("top_k", self.top_k, has_top, f"1 to {MAX_TOP_K}, or left out")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _require("repetition_penalty", self.repetition_penalty, 0.01 <= self.repetition_penalty <= 10, "0.01 to 10")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(name, value, -2 <= value <= 2, "-2 to 2")
        _require("seed", self.seed, self.seed is None or 0 <= self.seed < 2**63, "0 to 2**63 - 1")
        _require("stop", self.stop, all(self.stop), "strings that are not empty")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(name, value, value is None or 0 <= value <= 20, "0 to 20, or left out")
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens")
        for _, amount in self.logit_bias:
            _require("logit_bias", amount, -100 <= amount <= 100, "-100 to 100 for each token")


def _require(name: str, value: object, holds: bool, limit: str) -> None:
    if not holds:
        raise InvalidSetting(f"{name} is {value!r}; it must be {limit}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReading:
    """A source that an encoder reads: its request's first positions are passes over it, not tokens of a prompt."""

    num_tokens: int
    num_passes: int
    max_answer_tokens: int | None = None  # None: the model sets no limit

    @property
    def num_positions(self) -> int:
        return self.num_tokens * self.num_passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, end) that must be computed in one chunk."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaKey:
    """What tokens [start, end) depend on besides their ids: the content of a medium, as a hash."""

    start: int
    end: int
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The ask. `prompt` holds the tokens known at submission; a streamed prompt adds more through the scheduler."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrived_at: float
    prompt_is_complete: bool = True
    priority: int = 0  # lower is served first
    deadline_at: float | None = None  # on the clock of arrived_at; None: none
    rotary: str = "default"  # which of the model's length-dependent rotary tables; part of the prefix hash
    scope: str = ""  # requests of other scopes share no prefix with it; part of the prefix hash
    source: SourceReading | None = None  # None: the prompt is read by the decoder itself
    atomic_spans: tuple[Span, ...] = ()  # media that see themselves: no chunk ends inside one
    chunk_size: int | None = None  # None: the engine's; 0: the prompt is read whole
    num_announced: int = 0  # tokens that the prompt will have, where that is known before they are; 0: it is not
    forks: tuple[int, ...] = ()  # after so many of its tokens others are expected to go on in their own way

    @property
    def first_decoder_position(self) -> int:
        return 0 if self.source is None else self.source.num_positions

    def num_slots(self, num_positions: int) -> int:
        """Tokens whose memory is taken when that many positions are computed: a source's is from its first chunk."""
        if self.source is None:
            return num_positions
        return self.source.num_tokens + max(0, num_positions - self.source.num_positions)

    def num_reached(self, num_slots: int) -> int:
        """Positions that may be computed within that many slots."""
        if self.source is None:
            return num_slots
        num_answer = num_slots - self.source.num_tokens
        return self.source.num_positions + num_answer if num_answer >= 0 else 0

    def num_read(self, num_positions: int) -> int:
        """Tokens of prompt or source that so many positions amount to."""
        if self.source is None:
            return num_positions
        return min(num_positions, self.source.num_positions) // self.source.num_passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Counts tokens that the prefix cache held, by the reason why they were still there."""

    running: int = 0  # a request that ran had them too
    pinned: int = 0  # an answer before them ended with a call, whose result was awaited
    recent: int = 0  # nobody had needed their room since
    disk: int = 0  # they had left the memory, or were of another process, and came from the cache folder

    @property
    def num_tokens(self) -> int:
        return self.running + self.pinned + self.recent + self.disk

    def plus(self, reason: HitReason, num_tokens: int) -> Hits:
        return replace(self, **{reason: getattr(self, reason) + num_tokens})


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Holds the progress of one request. Only the room `schedule` changes it."""

    request: Request
    tokens: list[int]
    num_prompt_tokens: int  # grows while a streamed prompt is read
    prompt_is_complete: bool
    num_computed: int = 0
    num_scheduled: int = 0  # computed tokens and those of the steps in flight
    num_steps: int = 0  # in flight, with a chunk of it
    num_pending: int = 0  # tokens that the steps in flight will choose
    num_cached: int = 0  # prompt tokens taken from the prefix cache
    hits: Hits = Hits()  # the same, by reason, without what it had computed itself before it lost its place
    num_seen: int = 0  # tokens that it ever had the keys and values of
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    status: Status = Status.WAITING
    num_remembered: int = 0  # blocks that the prefix cache knows
    joined_at: int = 0  # prompt tokens that the engine had read when this one came
    num_read: int = 0  # prompt tokens read of this one, repeats after a preemption included
    is_paused: bool = False
    media_keys: tuple[MediaKey, ...] = ()  # part of the prefix hash
    is_leaving: bool = False  # it has ended or must end, and does so when nothing of it is in flight
    abort_reason: FinishReason | None = None  # why it must end before its last token
    state_slot: int | None = None  # None: not running, or the model has no recurrent state
    state_is_current: bool = False  # whether the slot holds the state after `num_computed` tokens
    state_source: int | None = None  # the checkpoint to start from; None: from nothing
    last_checkpoint: int = 0  # tokens before the last one saved, or started from
    kept_checkpoint: int = 0  # tokens before the last one that stays when another is saved
    forks: tuple[int, ...] = ()  # tokens, in whole blocks, after which a checkpoint is made and kept
    sought: range = range(0)  # tokens that were looked for on disk, and that it waited for
    awaited: frozenset[bytes] = frozenset()  # slabs that are read for it
    awaited_until: float = 0.0
    stored_state: int = 0  # tokens before the last state that went to disk
    cursor: Chunk | None = None  # that has gone through some layers and stands before the next

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def num_known(self) -> int:
        """Tokens that may be computed now: the last of an unfinished stream waits for what follows it."""
        return len(self.tokens) if self.prompt_is_complete else max(0, len(self.tokens) - 1)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_expected(self) -> int:
        """Tokens that will be known when the steps in flight are done."""
        return len(self.tokens) + self.num_pending

    @property
    def is_prefilling(self) -> bool:
        """More than one token is still to be scheduled, or the prompt's logits are."""
        num_scheduled = self.num_scheduled
        is_read = num_scheduled >= self.num_prompt_tokens and num_scheduled >= len(self.tokens) + self.num_pending - 1
        return not (is_read and self.prompt_is_complete)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUse:
    """Recurrent state of a chunk: it begins as what lies in `source`, advances in `slot`, and may be saved after."""

    slot: int
    source: int | None  # equal to `slot` where the state is already there; None: it begins as zeros
    save_to: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers [first, end) of all: those that a step takes a chunk through which stops between layers."""

    first: int
    end: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, end) of one sequence. A decode is a chunk of length 1."""

    sequence_id: int
    start: int
    end: int
    wants_logits: bool
    num_cached: int = 0  # tokens of the sequence that came from the prefix cache
    hits: Hits = Hits()  # by reason, those that the request never computed itself
    num_prompt_tokens: int | None = None  # None while a streamed prompt is being read
    state: StateUse | None = None  # None: the model has no recurrent state
    num_slots_before: int | None = None  # tokens that it attends to besides its own; None: those before `start`
    layers: LayerGroup | None = None  # None: all of them

    @property
    def is_through(self) -> bool:
        """Tells whether its tokens have passed all layers after this step."""
        return self.layers is None or self.layers.end == self.layers.num_layers

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_before(self) -> int:
        return self.start if self.num_slots_before is None else self.num_slots_before

    @property
    def is_prompt(self) -> bool:
        return self.num_prompt_tokens is None or self.start < self.num_prompt_tokens

    @property
    def is_prefill(self) -> bool:
        """Reads a prompt, or reads again what a preemption lost."""
        return self.is_prompt or self.num_tokens > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Names a run of whole blocks of one prefix. `key`: the chain's hash after its last block."""

    key: bytes
    previous: bytes  # the chain's hash before its first block; the root's where it is the first
    first: int  # the position of its first token
    tokens: tuple[int, ...]
    has_state: bool = False  # the recurrent state after the last token follows the keys and values

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    @property
    def name_key(self) -> bytes:
        """Tells a slab with state from one without that ends with the same token."""
        return self.key + bytes([self.has_state])


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A slab on its way between its blocks and the cache folder, while steps compute. It holds its blocks."""

    kind: Literal["store", "load"]
    slab: Slab
    block_ids: tuple[int, ...]
    state_slot: int | None = None  # None: the slab has no recurrent state
    rank: float = 0.0  # what the folder keeps it by: the least leaves first


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A move that has ended. A load that is not done is a miss, and what it read to is undefined."""

    move: Move
    is_done: bool
    num_bytes: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    step: int
    chunks: tuple[Chunk, ...]  # none: the step only begins moves, or waits for some
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    waiting: int
    token_budget: int
    predicted_s: float
    predicted_bytes: int
    reason: str
    moves: tuple[Move, ...] = ()  # that begin with it

    @property
    def num_tokens(self) -> int:
        """Counts the tokens that go through the last layer."""
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.is_through)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step: int
    token_by_sequence: dict[int, int]
    finished: dict[int, FinishReason]  # sequences that end with this step's token
    elapsed_s: float
    peak_bytes: int
    moved: tuple[Moved, ...] = ()  # moves of this step, or of earlier ones, that have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    request_id: int
    num_computed: int
    num_cached: int
    num_total: int | None  # None while a streamed prompt's length is unknown
    num_total_estimate: int
    chunk_start: int
    chunk_end: int
    elapsed_s: float
    tokens_per_s: float
    eta_s: float
    memory_bytes: int
    predicted_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    request_id: int
    token_id: int
    text: str  # may be empty while a character or a possible stop string is incomplete
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    start: int
    end: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int  # read so far, where a stream was cancelled
    num_computed_tokens: int
    hits: Hits
    chunks: tuple[ChunkRecord, ...]
    ttft_s: float | None  # None: ended before the first token
    prefill_s: float
    decode_s: float
    peak_bytes: int
    predicted_peak_bytes: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # the first token has none
    embedding: tuple[float, ...] | None = None  # of length 1

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.hits.num_tokens

    @property
    def num_prompt_chunks(self) -> int:
        """Those that the prompt was cut into; of a source, in its first pass."""
        return sum(chunk.start < self.num_prompt_tokens for chunk in self.chunks)

    @property
    def prefill_tokens_per_s(self) -> float:
        return (self.num_computed_tokens - self.num_cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        num_steps = len(self.token_ids) - 1
        return num_steps / self.decode_s if num_steps > 0 and self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request ended with an error: of its own prompt, mostly, so that others go on."""

    request_id: int
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    request_id: int
    output: Output


Event = PrefillProgress | Token | Failed | Finished
