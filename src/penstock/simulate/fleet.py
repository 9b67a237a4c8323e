"""Many replicas in virtual time, and who sends which prompt to which of them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from penstock.document import Document
from penstock.route.news import Load, Wanted, packed, reading_s
from penstock.route.router import Router
from penstock.schedule.budget import StepLoad
from penstock.simulate.costs import MACHINES, Machine
from penstock.simulate.simulate import BLOCK_SIZE
from penstock.trace.percentile import percentile

BLOCK = 256  # tokens: a fleet is simulated in coarse blocks
NEWS_S, NEWS_DELAY_S = 1.0, 0.3  # how often a replica tells of itself, and how long that is on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Agents at work: each session begins with the long instructions of its kind, and grows with every turn."""

    sessions_per_s: float  # of the whole fleet
    num_kinds: int = 500
    zipf: float = 1.1  # the second kind is asked 2 ** -1.1 times as often as the first
    instructions: tuple[int, int] = (2_000, 8_000)  # tokens, at least and at most
    question: tuple[int, int] = (100, 2_000)
    result: tuple[int, int] = (100, 1_500)  # of a call, at each turn
    answer: tuple[int, int] = (50, 400)
    mean_turns: float = 10.0
    mean_pause_s: float = 4.0  # from an answer to the next turn
    longest: int = 32_000


@dataclass(slots=True, kw_only=True)
class Session:
    num_tokens: int
    num_left: int  # turns
    blocks: list[int]  # hashes of the whole blocks of its prompt

    def grow(self, num_tokens: int, rng: Random) -> None:
        self.num_tokens += num_tokens
        while len(self.blocks) < self.num_tokens // BLOCK:
            self.blocks.append(rng.getrandbits(32))

    @property
    def wanted(self) -> Wanted:
        return Wanted(num_tokens=self.num_tokens + 1, hashes=tuple(self.blocks))


@dataclass(slots=True, kw_only=True)
class FleetReplica:
    """Reads prompts one after the other beside its decodes, and forgets the prefixes that were used longest ago."""

    name: str
    machine: Machine
    free_at: float = 0.0
    busy_s: float = 0.0
    num_open: int = 0
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    @property
    def num_blocks(self) -> int:
        return self.machine.num_blocks * BLOCK_SIZE // BLOCK

    def _beside(self, context: int) -> StepLoad:
        return StepLoad(num_tokens=self.num_open, decode_contexts=self.num_open * context)

    def serve(self, wanted: Wanted, num_generated: int, now: float) -> tuple[int, float, float]:
        """Answers a prompt; returns (tokens that were cached, when its first token came, when its last)."""
        cached, depth = self.cached, 0
        for one in wanted.hashes:
            if one not in cached:
                break
            depth += 1
        for one in reversed(wanted.hashes):  # the beginning of a prefix is evicted last
            cached[one] = None
            cached.move_to_end(one)
        while len(cached) > self.num_blocks:
            cached.popitem(last=False)
        beside, cost = self._beside(wanted.num_tokens), self.machine.coefficients
        read_s = reading_s(cost, self.machine.ceiling, beside, depth * BLOCK, wanted.num_tokens)
        self.busy_s += read_s
        self.free_at = first_at = max(now, self.free_at) + read_s
        self.num_open += 1
        step_s = sum(c * x for c, x in zip(cost, beside.with_decode(wanted.num_tokens).features, strict=True))
        return depth * BLOCK, first_at, first_at + num_generated * step_s

    def load(self, now: float) -> Load:
        divisor, cached = packed(self.cached)
        return Load(
            model=self.machine.name,
            at_s=now,
            identity="",
            rotary="",
            block_size=BLOCK,
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_blocks,
            num_running=self.num_open,
            num_waiting=0,
            num_decodes=self.num_open,
            decode_contexts=0,
            num_unread_tokens=0,
            step_tokens=self.machine.ceiling,
            step_cost=(*self.machine.coefficients[:4], 0.0),
            backlog_s=max(0.0, self.free_at - now),
            hash_divisor=divisor,
            cached=cached,
        )


class TwoChoices:
    """Sends a prompt to the shorter of two queues, whose lengths it knows at once."""

    def __init__(self, replicas: list[FleetReplica], rng: Random) -> None:
        self.replicas, self._rng = replicas, rng

    def choose(self, wanted: Wanted, key: int, now: float) -> FleetReplica:
        return min(self._rng.sample(self.replicas, min(2, len(self.replicas))), key=lambda one: one.num_open)

    def end(self, replica: FleetReplica, key: int) -> None:
        """Takes note that an answer has ended."""


class PrefixAffinity(TwoChoices):
    """Sends a prompt where most of it was sent before, unless queues differ much; it sees no eviction."""

    MAX_DIFFERENCE = 10  # of the longest and the shortest queue, as in Ray's router of that name
    LEAST_SHARE = 0.1  # of a prompt that counts as known

    def __init__(self, replicas: list[FleetReplica], rng: Random) -> None:
        super().__init__(replicas, rng)
        self._holders: dict[int, list[FleetReplica]] = {}
        self._num_sent = {replica.name: 0 for replica in replicas}

    def choose(self, wanted: Wanted, key: int, now: float) -> FleetReplica:
        queues = [replica.num_open for replica in self.replicas]
        if max(queues) - min(queues) > self.MAX_DIFFERENCE:
            chosen = super().choose(wanted, key, now)
        else:
            least = int(self.LEAST_SHARE * len(wanted.hashes))
            known = (self._holders[one] for one in reversed(wanted.hashes[least:]) if one in self._holders)
            holders = next(known, None)
            if holders is None:
                chosen = min(self.replicas, key=lambda one: self._num_sent[one.name])
            else:
                chosen = min(holders, key=lambda one: one.num_open)
        self._num_sent[chosen.name] += len(wanted.hashes)
        for one in wanted.hashes:
            holders = self._holders.setdefault(one, [])
            if chosen not in holders:
                holders.append(chosen)
        return chosen


class PredictedFirstToken(TwoChoices):
    """Sends a prompt as `Router` does, by news that are as old as they are between machines."""

    def __init__(self, replicas: list[FleetReplica], rng: Random) -> None:
        super().__init__(replicas, rng)
        self._router = Router(seed=rng.getrandbits(32))
        self._by_name = {replica.name: replica for replica in replicas}
        self._names = list(self._by_name)
        self._told: deque[tuple[float, str, Load]] = deque()  # news on their way
        self._num_told = 0

    def choose(self, wanted: Wanted, key: int, now: float) -> FleetReplica:
        self._listen(now)
        name = self._router.order(wanted, self._names, now)[0]
        self._router.send(name, key, wanted, now)
        return self._by_name[name]

    def end(self, replica: FleetReplica, key: int) -> None:
        self._router.end(replica.name, key)

    def _listen(self, now: float) -> None:
        """Replicas tell their news one after the other, each once in a period."""
        num_due = int(now / NEWS_S * len(self.replicas)) + 1
        for number in range(max(self._num_told, num_due - len(self.replicas)), num_due):
            replica = self.replicas[number % len(self.replicas)]
            self._told.append((now + NEWS_DELAY_S, replica.name, replica.load(now)))
        self._num_told = num_due
        while self._told and self._told[0][0] <= now:
            _, name, load = self._told.popleft()
            self._router.take(name, load)


ROUTERS: dict[str, Callable[[list[FleetReplica], Random], TwoChoices]] = {
    "two choices": TwoChoices,
    "prefix affinity": PrefixAffinity,
    "first token": PredictedFirstToken,
}


class FleetSummary(Document):
    """One router before a fleet, in numbers."""

    router: str
    machine: str
    num_replicas: int
    num_requests: int
    sessions_per_s: float
    prompt_tokens: int
    hit_tokens: int
    ttft_p50_s: float
    ttft_p99_s: float
    busy_share: float  # of the time of all replicas, in which prompts were read
    simulated_s: float

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


def _sessions(traffic: Traffic, rng: Random) -> Iterator[tuple[float, Session]]:
    """Yields who comes when, for ever."""
    kinds: list[tuple[int, list[int]]] = []
    for _ in range(traffic.num_kinds):
        num_tokens = rng.randint(*traffic.instructions)
        kinds.append((num_tokens, [rng.getrandbits(32) for _ in range(num_tokens // BLOCK)]))
    weights, total = [], 0.0
    for rank in range(1, traffic.num_kinds + 1):
        total += rank**-traffic.zipf
        weights.append(total)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(traffic.sessions_per_s)
        num_tokens, blocks = rng.choices(kinds, cum_weights=weights)[0]
        num_turns = 1 + int(rng.expovariate(1 / max(1e-9, traffic.mean_turns - 1)))
        session = Session(num_tokens=num_tokens, num_left=num_turns, blocks=[*blocks])
        session.grow(rng.randint(*traffic.question), rng)
        yield at_s, session


def simulate_fleet(
    router: str, *, num_replicas: int, num_requests: int, traffic: Traffic, machine: str = "h200", seed: int = 1
) -> FleetSummary:
    """Runs that many requests through a fleet. Each router gets the same sessions; a turn follows an answer."""
    rng, arriving = Random(seed), _sessions(traffic, Random(seed + 1))
    replicas = [FleetReplica(name=str(number), machine=MACHINES[machine]) for number in range(num_replicas)]
    policy = ROUTERS[router](replicas, Random(seed + 2))
    turns: list[tuple[float, int, Session]] = []
    ends: list[tuple[float, int, FleetReplica]] = []
    next_at, newcomer = next(arriving)
    ttfts: list[float] = []
    num_prompt = num_hit = 0
    now = 0.0
    for number in range(num_requests):
        if turns and turns[0][0] < next_at:
            now, _, session = heappop(turns)
        else:
            now, session = next_at, newcomer
            next_at, newcomer = next(arriving)
        while ends and ends[0][0] <= now:
            _, key, replica = heappop(ends)
            replica.num_open -= 1
            policy.end(replica, key)
        wanted, num_generated = session.wanted, rng.randint(*traffic.answer)
        replica = policy.choose(wanted, number, now)
        num_cached, first_at, end_at = replica.serve(wanted, num_generated, now)
        heappush(ends, (end_at, number, replica))
        ttfts.append(first_at - now)
        num_prompt += wanted.num_tokens
        num_hit += num_cached
        session.num_left -= 1
        session.grow(num_generated + rng.randint(*traffic.result), rng)
        if session.num_left and session.num_tokens < traffic.longest:
            heappush(turns, (end_at + rng.expovariate(1 / traffic.mean_pause_s), number, session))
    return FleetSummary(
        router=router,
        machine=machine,
        num_replicas=num_replicas,
        num_requests=num_requests,
        sessions_per_s=traffic.sessions_per_s,
        prompt_tokens=num_prompt,
        hit_tokens=num_hit,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        busy_share=sum(replica.busy_s for replica in replicas) / (num_replicas * max(now, 1e-9)),
        simulated_s=now,
    )
