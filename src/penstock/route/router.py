"""`Router`: where a prompt is predicted to have its first token earliest, by the news of the replicas."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from penstock.route.news import Load, Wanted

FRESH_S = 5.0  # news that are older say nothing
# What was sent so shortly before the news were made may have been on its way still.
ON_THE_WAY_S = 0.25
# How much it counts what others will wait for a prompt, beside what it waits for itself.
OTHERS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    at_s: float
    reading_s: float
    wanted: Wanted


@dataclass(slots=True)
class _Replica:
    """Keeps the last news of a replica, and what was sent there."""

    load: Load | None = None
    hashes: frozenset[int] = frozenset()
    open: set[object] = field(default_factory=set[object])  # keys of what was sent, until it ends
    untold: dict[object, _Sent] = field(default_factory=dict[object, _Sent])  # what was sent after the news
    coming: set[int] = field(default_factory=set[int])  # hashes of that
    coming_s: float = 0.0  # how long it takes

    def take(self, load: Load) -> None:
        self.load, self.hashes = load, load.hashes
        sent_after = load.at_s - ON_THE_WAY_S
        self.untold = {key: sent for key, sent in self.untold.items() if sent.at_s > sent_after}
        self.coming = {one for sent in self.untold.values() for one in sent.wanted.hashes}
        self.coming_s = sum(sent.reading_s for sent in self.untold.values())

    def expect(self, key: object, sent: _Sent) -> None:
        self.untold[key] = sent
        self.coming.update(sent.wanted.hashes)
        self.coming_s += sent.reading_s

    def end(self, key: object) -> None:
        self.open.discard(key)
        if (sent := self.untold.pop(key, None)) is not None:
            self.coming_s -= sent.reading_s

    def is_fresh(self, now: float) -> bool:
        return self.load is not None and now - self.load.at_s <= FRESH_S

    def num_cached(self, wanted: Wanted) -> int:
        """Counts the tokens that it will not have to read. Whoever holds a block holds all before it."""
        load = self.load
        assert load is not None
        told = wanted.hashes
        if load.hash_divisor > 1:  # of the others nothing is known: what is found covers those before it
            told = [one for one in told if one % load.hash_divisor == 0]
        known, coming = self.hashes, self.coming
        if not told or (told[0] not in known and told[0] not in coming):
            return 0
        found = bisect_left(told, True, key=lambda one: one not in known and one not in coming)
        depth = found if load.hash_divisor == 1 else wanted.hashes.index(told[found - 1]) + 1
        return depth * load.block_size

    def backlog_s(self, now: float) -> float:
        """Predicts how long it reads what is there already: by the news, and what was sent since then."""
        load = self.load
        assert load is not None
        return max(0.0, load.backlog_s + self.coming_s - max(0.0, now - load.at_s))


class Router:
    """Chooses by predicted first token, and by the shorter of two queues while most news are old."""

    def __init__(self, seed: int | None = None) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._random = Random(seed)

    def take(self, name: str, load: Load) -> None:
        """Notes the news of a replica; those that came before are forgotten."""
        known = self._replicas.setdefault(name, _Replica())
        if known.load is None or load.at_s > known.load.at_s:
            known.take(load)

    def keep(self, names: Collection[str]) -> None:
        """Forgets every replica but these."""
        self._replicas = {name: self._replicas.get(name) or _Replica() for name in names}

    @property
    def loads(self) -> dict[str, Load]:
        return {name: replica.load for name, replica in self._replicas.items() if replica.load is not None}

    def order(self, wanted: Wanted, names: Sequence[str], now: float) -> list[str]:
        """Orders replicas: the best for this prompt comes first."""
        replicas = [(name, self._replicas.setdefault(name, _Replica())) for name in names]
        fresh = [(name, replica) for name, replica in replicas if replica.is_fresh(now)]
        if 2 * len(fresh) < len(replicas) or not fresh:
            pair = self._random.sample(replicas, min(2, len(replicas)))
            return [name for name, _ in sorted(pair, key=lambda one: len(one[1].open))]
        ranked = [(self._rank(replica, wanted, now), name) for name, replica in fresh]
        return [name for _, name in sorted(ranked)]

    def _rank(self, replica: _Replica, wanted: Wanted, now: float) -> tuple[bool, float, int, float]:
        load = replica.load
        assert load is not None
        num_cached = replica.num_cached(wanted)
        has_room = wanted.num_tokens - num_cached <= load.num_free_blocks * load.block_size
        reading_s = load.reading_s(num_cached, wanted.num_tokens)
        predicted_s = replica.backlog_s(now) + (1 + OTHERS) * reading_s
        return not has_room, round(predicted_s, 3), len(replica.open), self._random.random()

    def predicted_s(self, name: str, wanted: Wanted, now: float) -> float | None:
        """Predicts when the prompt would have its first token there; None where the news are old."""
        replica = self._replicas.get(name)
        if replica is None or replica.load is None or not replica.is_fresh(now):
            return None
        read_s = replica.load.reading_s(replica.num_cached(wanted), wanted.num_tokens)
        return replica.backlog_s(now) + read_s

    def send(self, name: str, key: object, wanted: Wanted, now: float) -> None:
        """Notes that the prompt went there: it is in the queue until `end`."""
        self.expect(name, key, wanted, now)
        self._replicas[name].open.add(key)

    def expect(self, name: str, key: object, wanted: Wanted, now: float) -> None:
        """Notes that the prompt is about to go there: it counts until news tell of it, or `end`."""
        replica = self._replicas.setdefault(name, _Replica())
        load, reading_s = replica.load, 0.0
        if load is not None:
            reading_s = load.reading_s(replica.num_cached(wanted), wanted.num_tokens)
        replica.end(key)
        replica.expect(key, _Sent(at_s=now, reading_s=reading_s, wanted=wanted))

    def end(self, name: str, key: object) -> None:
        """Notes that a prompt was answered, or left."""
        if name in self._replicas:
            self._replicas[name].end(key)
