"""Our router where Ray asks for one: news come with Ray's list of replicas, prompts with the calls."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from penstock.route.news import Load, Wanted
from penstock.route.router import Router

MAX_EXPECTED = 10_000


class FirstTokenRouter(RequestRouter):
    """Sends a call to the replica it names, a prompt where its first token is predicted earliest."""

    def initialize_state(self, **settings: Any) -> None:
        # Ray sends this file by value: what it imports above is a copy, and a dict would be another one.
        from penstock.ray.replica import ROUTERS

        self.router = Router()
        self._lock = Lock()  # calls are routed in a thread of Ray's, and loads read in others
        self._expected: OrderedDict[str, str] = OrderedDict()  # where calls are about to go
        ROUTERS[self._deployment_id.name] = self

    @property
    def names(self) -> list[str]:
        return [replica_id.unique_id for replica_id in self.curr_replicas]

    @property
    def loads(self) -> dict[str, Load]:
        """The last news of the replicas that there are."""
        with self._lock:
            self._listen(self.curr_replicas.values())
            return self.router.loads

    def _listen(self, replicas: Iterable[RunningReplica]) -> None:
        names = []
        for replica in replicas:
            names.append(name := replica.replica_id.unique_id)
            if news := replica.routing_stats:
                known = self.router.loads.get(name)
                if known is None or news["at_s"] > known.at_s:
                    self.router.take(name, Load.model_validate(news))
        self.router.keep(names)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        given = {} if pending_request is None else pending_request.kwargs
        if (named := given.get("replica")) is not None:
            if named not in self.names:  # it is gone, and another one cannot answer
                return [candidate_replicas]
            return [[by_name[named]]] if named in by_name else []
        wanted, now = given.get("wanted") or Wanted(num_tokens=1), time.time()
        with self._lock:
            self._listen(self.curr_replicas.values())
            order = self.router.order(wanted, list(by_name), now)
            if order and pending_request is not None:  # those that come at the same moment know of each other
                self._expect(order[0], pending_request.metadata.internal_request_id, wanted, now)
        return [[by_name[name]] for name in order]

    def _expect(self, name: str, key: str, wanted: Wanted, now: float) -> None:
        self.router.end(self._expected.pop(key, name), key)
        self.router.expect(name, key, wanted, now)
        self._expected[key] = name
        if len(self._expected) > MAX_EXPECTED:  # of calls that were given up before they went anywhere
            self._expected.popitem(last=False)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        key, wanted = pending_request.metadata.internal_request_id, pending_request.kwargs.get("wanted")
        with self._lock:
            if (expected := self._expected.pop(key, None)) is not None:
                self.router.end(expected, key)
            if wanted is not None:
                self.router.send(replica_id.unique_id, key, wanted, time.time())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        with self._lock:
            self.router.end(replica_id.unique_id, internal_request_id)
