"""How a step is shared: three priorities as one table, and a token budget sized by a latency target."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.config import TILE_TOKENS, PrefillPriority
from penstock.plan.waves import Waves
from penstock.request import Chunk, LayerGroup

# Steps in a row that prompts may go without a chunk while decodes take the whole target. Below 1 in 100, so that
# the chunk that ends such a row does not show in the 99th percentile of the gaps.
LONGEST_PREFILL_WAIT = 128

# How late steps are held to be before any was seen, and at most, relative to what was predicted; and how much of what
# lies between a late step and a timely one is forgotten with each timely one.
FIRST_LATENESS, MAX_LATENESS, LATENESS_FORGOTTEN = 1.2, 1.5, 0.03

# A step that carries no decode may last this many targets: nobody has a gap, but a question may arrive.
STRETCH_WITHOUT_DECODES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a priority means. The two bounds say how long each side may be kept waiting by the other, in steps."""

    decodes_beside_prompts: bool  # a step that carries prompt chunks carries the decodes too
    has_floor: bool  # prompts get the floor in every step that carries them, and all there is without a latency target
    most_steps_without_decode: int = 0
    most_steps_without_prefill: int = 0

    @property
    def decode_turns_between_chunks(self) -> int:
        """Counts decode steps between chunks of one prompt, which take turns with decodes instead of sharing steps."""
        if not self.decodes_beside_prompts:
            return 0
        return 1 if self.has_floor else self.most_steps_without_prefill


POLICIES = {
    PrefillPriority.PREFILL_FIRST: Policy(decodes_beside_prompts=False, has_floor=True, most_steps_without_decode=256),
    PrefillPriority.INTERLEAVED: Policy(decodes_beside_prompts=True, has_floor=True),
    PrefillPriority.DECODE_PRIORITY: Policy(
        decodes_beside_prompts=True, has_floor=False, most_steps_without_prefill=LONGEST_PREFILL_WAIT
    ),
}


@dataclass(slots=True, kw_only=True)
class StepLoad:
    """What a step's time depends on. It is counted up while a step is put together, and then left as it is."""

    num_tokens: int = 0
    num_prompt_tokens: int = 0  # of these
    token_contexts: int = 0  # over prompt chunks: tokens x tokens before them, on average over the chunk
    decode_contexts: int = 0  # over decodes: tokens before them
    chunk_contexts: int = 0  # over prompt chunks: tokens before them, which a chunk fetches however short it is
    num_whole: int = 0  # chunks that go through all layers
    layer_share: float = 0.0  # of all layers, that a chunk goes through by itself, whose weights are read for it alone

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> StepLoad:
        return cls().with_chunks(*chunks)

    @property
    def num_decodes(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def count(self, chunk: Chunk, sign: int = 1) -> None:
        """Adds a chunk, or with -1 takes it away again."""
        num_tokens, before = sign * chunk.num_tokens, chunk.num_before
        if chunk.layers is not None:
            self._count_layers(chunk, chunk.layers, sign)
            return
        self.num_whole += sign
        self.num_tokens += num_tokens
        if chunk.is_prefill:
            self.num_prompt_tokens += num_tokens
            self.token_contexts += num_tokens * before + sign * (num_tokens * num_tokens // 2)
            self.chunk_contexts += sign * before
        else:
            self.decode_contexts += sign * (before + 1)

    def _count_layers(self, chunk: Chunk, layers: LayerGroup, sign: int) -> None:
        """Adds the part of a chunk's load that falls to some layers, where it is cut into tiles."""
        count, before, num_tiles = chunk.num_tokens, chunk.num_before, -(-chunk.num_tokens // TILE_TOKENS)
        fetched = num_tiles * before + TILE_TOKENS * num_tiles * (num_tiles - 1) // 2
        all_of_it = (count, count * before + count * count // 2, fetched)
        num_passed = layers.end - layers.first
        num_tokens, contexts, fetched = (value * num_passed // layers.num_layers for value in all_of_it)
        num_tokens = max(1, num_tokens)
        self.num_tokens += sign * num_tokens
        self.num_prompt_tokens += sign * num_tokens
        self.token_contexts += sign * contexts
        self.chunk_contexts += sign * fetched
        self.layer_share += sign * num_passed / layers.num_layers

    def with_chunks(self, *chunks: Chunk) -> StepLoad:
        load = replace(self)
        for chunk in chunks:
            load.count(chunk)
        return load

    def with_chunk(self, start: int, num_tokens: int) -> StepLoad:
        return StepLoad(
            num_tokens=self.num_tokens + num_tokens,
            num_prompt_tokens=self.num_prompt_tokens + num_tokens,
            token_contexts=self.token_contexts + num_tokens * start + num_tokens * num_tokens // 2,
            decode_contexts=self.decode_contexts,
            chunk_contexts=self.chunk_contexts + start,
            num_whole=self.num_whole + 1,
            layer_share=self.layer_share,
        )

    def with_decode(self, context: int) -> StepLoad:
        num_tokens, num_whole = self.num_tokens + 1, self.num_whole + 1
        return replace(self, num_tokens=num_tokens, num_whole=num_whole, decode_contexts=self.decode_contexts + context)

    @property
    def num_passes(self) -> float:
        """Counts how often the layers' weights are read: once for all that goes through all of them."""
        return self.layer_share + (1.0 if self.num_whole or not self.layer_share else 0.0)

    @property
    def features(self) -> tuple[float, ...]:
        return (self.num_passes, self.num_tokens, self.token_contexts, self.decode_contexts, self.chunk_contexts)

    def features_in(self, waves: Waves | None) -> tuple[float, ...]:
        """None: attention takes the time of its tokens."""
        if waves is None or not self.num_prompt_tokens:
            return self.features
        filled = waves.tokens_charged(self.num_prompt_tokens) / self.num_prompt_tokens
        num_passes, num_tokens, token_contexts, *others = self.features
        return (num_passes, num_tokens, filled * token_contexts, *others)


NUM_FEATURES = 5
LEAST_SQUARES_PASSES = 2000


class StepCost:
    """Seconds of a step, linear in its load; fitted while steps run, by recursive least squares within bounds.

    Errors count relative to the step's time: a step of 5 ms and one of 500 ms teach alike. What the last steps took
    beside the fit, the pace, is known at once; the fit follows slowly.
    """

    # Recent steps count more: a machine's speed changes with its heat and its neighbours.
    MEMORY = 0.98
    # Variances relative to an ordinary step: before anything was seen, and the most that forgetting brings back.
    # More, and after hours of steps that hardly touch a direction their noise would decide it.
    FIRST_UNCERTAINTY, MAX_UNCERTAINTY = 10.0, 0.05
    # One step moves the model by at most this share of what was predicted: a hiccup is not a trend.
    LARGEST_SURPRISE = 1.0
    # A step that seems faster than this counts as this much faster than predicted: clocks have hiccups too.
    FASTEST = 2.0
    # How much of a step's pace is believed, and the least and the most of it.
    BELIEVED_PACE, LEAST_PACE, MAX_PACE = 0.2, 0.5, 2.0

    def __init__(
        self,
        coefficients: Sequence[float],
        scales: Sequence[float] = (1.0, 512.0, 2.0**22, 65_536.0, 8_192.0),
        *,
        waves: Waves | None = None,
    ) -> None:
        self.waves = waves
        self.coefficients = [max(0.0, value) for value in coefficients]
        self.pace = 1.0  # of recent steps: their time over that of the fit
        self._scales = tuple(scales)  # how large each feature is in an ordinary step
        self._unit_s: float | None = None  # how long an ordinary step takes: the first one seen
        self._covariance = [
            [self.FIRST_UNCERTAINTY if i == j else 0.0 for j in range(NUM_FEATURES)] for i in range(NUM_FEATURES)
        ]

    @classmethod
    def fitted(cls, observations: Sequence[tuple[StepLoad, float]], *, waves: Waves | None = None) -> StepCost:
        """Fits the cost to a handful of steps: parts of their time, none negative, whose relative errors are least."""
        seen = [(load.features_in(waves), elapsed_s) for load, elapsed_s in observations if elapsed_s > 0]
        cost = cls(fit_coefficients(seen), _largest_features(seen), waves=waves)
        cost._unit_s = sorted(elapsed_s for _, elapsed_s in seen)[len(seen) // 2]
        cost._covariance = [
            [cls.MAX_UNCERTAINTY if i == j else 0.0 for j in range(NUM_FEATURES)] for i in range(NUM_FEATURES)
        ]
        return cost

    def predict(self, load: StepLoad) -> float:
        return self.pace * self._fit(load)

    def _fit(self, load: StepLoad) -> float:
        return sum(c * x for c, x in zip(self.coefficients, load.features_in(self.waves), strict=True))

    def largest_chunk(self, load: StepLoad, start: int, upper: int, limit_s: float) -> int:
        """Tokens after `start`, up to `upper`, with which a step of that load is predicted to stay within the limit."""
        sizes = range(1, upper + 1)
        return bisect_right(sizes, limit_s, key=lambda num_tokens: self.predict(load.with_chunk(start, num_tokens)))

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        if elapsed_s <= 0:
            return
        self._unit_s = self._unit_s or elapsed_s
        predicted = self._fit(load)
        if predicted > 0:
            pace = max(self.LEAST_PACE, min(self.MAX_PACE, elapsed_s / predicted))
            self.pace += self.BELIEVED_PACE * (pace - self.pace)
        elapsed_s = max(elapsed_s, predicted / self.FASTEST)
        surprise = (elapsed_s - predicted) / elapsed_s
        if predicted > 0:
            limit = self.LARGEST_SURPRISE * predicted / elapsed_s
            surprise = max(-limit, min(limit, surprise))
        weight = self._unit_s / elapsed_s
        x = [weight * value / scale for value, scale in zip(load.features_in(self.waves), self._scales, strict=True)]
        gain = self._free_gain(x, surprise)
        for i, scale in enumerate(self._scales):
            # No part of a step takes negative time.
            self.coefficients[i] = max(0.0, self.coefficients[i] + gain[i] * surprise * self._unit_s / scale)
        self._update_covariance(x)

    def _free_gain(self, x: list[float], surprise: float) -> list[float]:
        """How far each coefficient moves. One that is 0 and would go below stays out of it, and out of `x`.

        Else the others would make up for a fall that does not come, and the sum would move the wrong way.
        """
        is_free = [True] * NUM_FEATURES
        while True:
            px, denominator = self._seen_from(x)
            gain = [value / denominator if free else 0.0 for value, free in zip(px, is_free, strict=True)]
            bound = [i for i, value in enumerate(gain) if not self.coefficients[i] and value * surprise < 0]
            if not bound:
                return gain
            for i in bound:
                x[i], is_free[i] = 0.0, False

    def _seen_from(self, x: list[float]) -> tuple[list[float], float]:
        px = [sum(row[j] * x[j] for j in range(NUM_FEATURES)) for row in self._covariance]
        return px, 1.0 + sum(x[i] * px[i] for i in range(NUM_FEATURES))

    def _update_covariance(self, x: list[float]) -> None:
        """What this step taught, and then a little forgetting in each direction that is not uncertain already."""
        p = self._covariance
        px, denominator = self._seen_from(x)
        for i in range(NUM_FEATURES):
            for j in range(i, NUM_FEATURES):
                p[i][j] = p[j][i] = p[i][j] - px[i] * px[j] / denominator
        for i in range(NUM_FEATURES):
            growth = max(1.0, min(1 / self.MEMORY, self.MAX_UNCERTAINTY / max(p[i][i], 1e-12))) ** 0.5
            for j in range(NUM_FEATURES):
                p[i][j] *= growth
                p[j][i] *= growth


Seen = Sequence[tuple[Sequence[float], float]]  # the features of steps, and what they took in seconds


def fit_coefficients(seen: Seen) -> list[float]:
    """Fits seconds per feature, none negative, whose relative errors are least: one after the other, many times."""
    largest = _largest_features(seen)
    columns = [[features[i] / scale / elapsed_s for features, elapsed_s in seen] for i, scale in enumerate(largest)]
    squares = [sum(value * value for value in column) for column in columns]
    found, rest = [0.0] * len(columns), [1.0] * len(seen)
    for _ in range(LEAST_SQUARES_PASSES):
        for i, column in enumerate(columns):
            if not squares[i]:
                continue
            change = max(-found[i], sum(value * left for value, left in zip(column, rest, strict=True)) / squares[i])
            found[i] += change
            rest = [left - change * value for value, left in zip(column, rest, strict=True)]
    return [share / scale for share, scale in zip(found, largest, strict=True)]


def _largest_features(seen: Seen) -> list[float]:
    return [max(1.0, *values) for values in zip(*(features for features, _ in seen), strict=True)]


@dataclass(slots=True, kw_only=True)
class TokenBudget:
    """The prompt tokens of a step: the most that fit, or the most whose predicted step stays under the target."""

    ceiling: int  # 0: no limit but the prompt
    floor: int = 1
    target_s: float | None = None
    cost: StepCost | None = None
    most: int = 0  # prompt tokens of a step, since one with more did not fit into the memory; 0: none failed so
    sizes: Sequence[int] = ()  # tokens of a step that a target cuts, where some sizes run better than others
    lateness: float = FIRST_LATENESS  # of the latest among recent steps: measured over predicted time

    @property
    def overdue(self) -> int:
        """The chunk that ends a prompt's longest wait: large enough that a long prompt still gets through."""
        return max(self.floor, self.ceiling // 4 if self.ceiling else 256)

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        if self.cost is None:
            return
        if self.target_s is not None and elapsed_s > 0:
            self._note_lateness(self.cost.predict(load), elapsed_s, self.target_s)
        self.cost.observe(load, elapsed_s)

    def _note_lateness(self, predicted_s: float, elapsed_s: float, target_s: float) -> None:
        """Up at once and down slowly: a machine that others use is slow for some steps at a time."""
        # What a step far below the target is late by would be late by as much in one that fills it, not more.
        late = 1 + (elapsed_s - predicted_s) / max(predicted_s, target_s / self.lateness)
        if late < self.lateness:
            late = self.lateness + LATENESS_FORGOTTEN * (late - self.lateness)
        self.lateness = min(MAX_LATENESS, max(1.0, late))

    def predict(self, load: StepLoad) -> float:
        return self.cost.predict(load) if self.cost is not None else 0.0

    def ceiling_of(self, chunk_size: int | None) -> int:
        """Bounds a step that carries a prompt with a chunk size of its own; 0 means no limit."""
        ceiling = self.ceiling
        if chunk_size is not None:
            ceiling = max(ceiling, chunk_size) if ceiling and chunk_size else 0
        return min(ceiling, self.most) if ceiling and self.most else ceiling or self.most

    def aim_s(self, stretch: float) -> float:
        """Seconds to plan a step for: the latest steps, not the average ones, are to stay within the target."""
        return (self.target_s or 0.0) * stretch / self.lateness

    def allowance(
        self, load: StepLoad, start: int, wanted: int, stretch: float = 1.0, *, chunk_size: int | None = None
    ) -> int:
        """Tokens after `start` that may join a step of that load and `stretch` times the target; may be 0."""
        ceiling = self.ceiling_of(chunk_size)
        upper = min(wanted, ceiling) if ceiling else wanted
        if self.target_s is None or self.cost is None:
            return upper
        aim_s = self.aim_s(stretch)
        allowed = self.cost.largest_chunk(load, start, upper, aim_s)
        even = self._even(load, start, allowed, upper, aim_s) if self.sizes else allowed
        return even if even == upper or self.cost.waves is None else self._fastest(load, start, even, allowed)

    def _even(self, load: StepLoad, start: int, allowed: int, upper: int, aim_s: float) -> int:
        """So many that the step has one of the sizes, or all that are there where the next size is not too much."""
        assert self.cost is not None
        index = bisect_right(self.sizes, load.num_tokens + allowed)
        if allowed == upper:
            is_size = index > 0 and self.sizes[index - 1] == load.num_tokens + allowed
            next_size = self.sizes[index] if index < len(self.sizes) else 0
            if is_size or self.cost.predict(load.with_chunk(start, next_size - load.num_tokens)) <= aim_s:
                return allowed
        even = self.sizes[index - 1] - load.num_tokens if index else 0
        return even if even >= self.floor else allowed

    def _fastest(self, load: StepLoad, start: int, even: int, allowed: int) -> int:
        """The even size, or fewer tokens that leave no wave half empty: whichever reads more tokens in a second."""
        cost = self.cost
        assert cost is not None
        assert cost.waves is not None
        full = cost.waves.tokens_within(load.num_prompt_tokens + allowed) - load.num_prompt_tokens

        def tokens_per_s(count: int) -> float:
            step = load.with_chunk(start, count)
            index = bisect_left(self.sizes, step.num_tokens)
            padded = self.sizes[index] if index < len(self.sizes) else step.num_tokens
            return count / cost.predict(replace(step, num_tokens=padded))

        return even if full < self.floor else max((even, full), key=tokens_per_s)
