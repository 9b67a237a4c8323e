"""What `GET /load` publishes is what a router needs to find a prompt again."""

import httpx
import pytest
from server_process import serving

from penstock.cache.prefix import root_hash
from penstock.route.news import Load, Wanted

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def server():
    with serving("smollm2", "--api-key", "secret", "--memory", "700MB", "--context", "1024") as started:
        yield started


def test_load_is_behind_the_key(server):
    assert httpx.get(f"{server.url}/load").status_code == 401


def test_a_prompt_is_found_by_its_hashes_once_it_was_read(server):
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer secret"}, timeout=600) as client:
        before = Load.model_validate_json(client.get("/load").text)
        tokens = client.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
        client.post("/v1/completions", json={"model": "smollm2", "prompt": TEXT, "max_tokens": 1}).raise_for_status()
        after = Load.model_validate_json(client.get("/load").text)
    wanted = Wanted.of(tokens, root_hash(after.identity, after.rotary), after.block_size)
    assert len(wanted.hashes) > 10
    assert not before.hashes & set(wanted.hashes)
    assert set(wanted.hashes) <= after.hashes
    assert after.num_waiting == after.num_running == 0
    assert after.backlog_s == 0
    assert after.reading_s(0, 1000) > after.reading_s(900, 1000) > 0
