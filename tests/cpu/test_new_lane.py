"""A lane that was written from docs/development/adding-a-lane.md alone goes wherever a lane goes."""

import asyncio
import inspect
import json

import bigram_lane
import bigram_lane_kind
import httpx
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.lanes.table import LANES
from penstock.server.app import make_app
from penstock.server.settings import ServerSettings

WORDS = ["one", "two", "three", "four"]
TEXT = "one two three one two"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A table in which each word is followed by the next one, and the one row that makes the lane known."""
    monkeypatch.setitem(LANES, bigram_lane_kind.BIGRAM.id, bigram_lane_kind.BIGRAM)
    config = {
        "model_type": "bigram",
        "architectures": ["BigramTable"],
        "vocab_size": 4,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(WORDS, range(4))), unk_token="one"))  # noqa: B905
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    save_file({"table": torch.eye(4).roll(1, dims=1)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_lane_is_two_small_files_and_a_row():
    sources = [inspect.getsource(module) for module in (bigram_lane, bigram_lane_kind)]
    assert sum(source.count("\n") for source in sources) <= 100
    assert "import torch" in sources[0]
    assert "import torch" not in sources[1]


def test_it_is_planned_and_run_in_chunks(folder):
    plan = command("plan", folder, "--prompt-tokens", 5, "--chunk-size", 2, "--json")
    run = command("run", folder, "-p", TEXT, "--chunk-size", 2, "--max-tokens", 3, "--json")
    assert plan["lane"]["id"] == run["lane"]["id"] == "test-bigram"
    assert (plan["num_chunks"], run["plan"]["num_chunks"], run["lane"]["applied"]) == (3, 3, True)
    assert plan["weight_bytes"] == 16 * 4
    assert run["token_ids"] == [2, 3, 0]


def test_the_doctor_examines_and_times_it(folder):
    document = command("doctor", folder, "--json")
    assert document["lane"]["id"] == "test-bigram"
    assert [claim["eligible"] for claim in document["lanes"]] == [False] * 5 + [True]
    assert document["verdict"] is None
    assert document["speed"] is not None or "not timed" in json.dumps(document)


def test_a_server_answers_with_it(folder):
    async def asking():
        served = make_app(ServerSettings(model=folder), EngineConfig(memory=4 << 30, threads=1))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=served), base_url="http://localhost")
        async with served.router.lifespan_context(served), client:
            await served.state.loading
            asked = {"model": folder, "prompt": TEXT, "max_tokens": 3, "temperature": 0}
            return await client.post("/v1/completions", json=asked)

    answer = asyncio.run(asking())
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].split() == ["three", "four", "one"]


def test_images_are_refused_and_attach_has_nothing_to_attach_to(folder):
    with penstock.Engine.load(folder, memory="4GiB", threads=1) as engine:
        with pytest.raises(PenstockError, match="test-bigram, which reads text only"):
            engine.generate(TEXT, images=["a.png"], max_tokens=1)
        with pytest.raises(PenstockError, match="transformers"):
            penstock.attach(engine.model.lane)
