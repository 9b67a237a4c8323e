"""Replicas come with the backlog and go, drained, when fewer are enough."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import httpx
import pytest
from hang_bound import HANG_S, within
from server_process import serving

pytestmark = [
    pytest.mark.evidence,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 50
SMALL = ("--memory", "700MB", "--context", "2048")


def test_a_backlog_brings_a_replica_and_its_end_takes_one_away():
    fleet = ("--ray", "--replicas", "1-2", "--backlog-s", "1", "--patience-s", "3")
    with (
        serving("smollm2", *fleet, *SMALL) as server,
        httpx.Client(base_url=server.url, timeout=HANG_S) as client,
        ThreadPoolExecutor(12) as pool,
    ):

        def ask(number):
            body = {"model": "smollm2", "prompt": f"{number} {TEXT}", "max_tokens": 4, "ignore_eos": True}
            return client.post("/v1/completions", json=body)

        def num_replicas():
            return len(client.get("/load").json()["smollm2"])

        assert num_replicas() == 1
        asked = [pool.submit(ask, number) for number in range(12)]
        assert within(HANG_S, lambda: num_replicas() == 2)
        while num_replicas() == 2:  # somebody asks while the second one is drained
            asked.append(pool.submit(ask, len(asked)))
            assert asked[-1].result().status_code == 200
            if len(asked) > 16:
                break
        assert within(HANG_S, lambda: num_replicas() == 1)
        answers = [one.result() for one in asked]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {4}
