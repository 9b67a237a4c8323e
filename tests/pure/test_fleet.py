"""A fleet in virtual time: its routers get the same sessions, and the one that knows more does better."""

import pytest

from penstock.simulate.costs import MACHINES
from penstock.simulate.fleet import ROUTERS, FleetReplica, Session, Traffic, Wanted, simulate_fleet

BUSY = Traffic(sessions_per_s=8.0, num_kinds=40)


@pytest.fixture(scope="module")
def runs():
    return {
        router: simulate_fleet(router, num_replicas=6, num_requests=1500, traffic=BUSY, seed=3) for router in ROUTERS
    }


def test_the_prediction_finds_most_and_waits_least(runs):
    best = runs["first token"]
    for other in ("two choices", "prefix affinity"):
        assert best.hit_tokens > runs[other].hit_tokens
        assert best.ttft_p99_s < runs[other].ttft_p99_s


def test_equal_seeds_give_equal_runs(runs):
    again = simulate_fleet("first token", num_replicas=6, num_requests=1500, traffic=BUSY, seed=3)
    assert again == runs["first token"]


def test_with_one_replica_the_routers_are_one():
    traffic = Traffic(sessions_per_s=0.5)
    one, *others = (
        simulate_fleet(router, num_replicas=1, num_requests=200, traffic=traffic).model_copy(update={"router": ""})
        for router in ROUTERS
    )
    assert others == [one, one]


def test_a_replica_reads_what_it_does_not_hold_and_forgets_what_was_used_longest_ago():
    replica = FleetReplica(name="a", machine=MACHINES["cpu"])
    first = Wanted(num_tokens=513, hashes=(1, 2))
    assert replica.serve(first, 1, 0.0)[0] == 0
    assert replica.serve(first, 1, 100.0)[0] == 512
    many = tuple(range(10, 10 + replica.num_blocks))
    replica.serve(Wanted(num_tokens=len(many) * 256 + 1, hashes=many), 1, 200.0)
    assert replica.serve(first, 1, 10_000.0)[0] == 0


def test_a_session_keeps_the_blocks_that_it_has(runs):
    from random import Random

    session = Session(num_tokens=300, num_left=2, blocks=[7])
    session.grow(500, Random(1))
    assert session.wanted.num_tokens == 801
    assert session.wanted.hashes[0] == 7
    assert len(session.wanted.hashes) == 3
