"""A step that the system refuses memory for is run again at half its size, and nothing is lost."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from ended import run_all
from lane_ids import GENERIC_TEXT
from tiny_generic import MUST_SHOW, TROUBLE, save_causal_model
from tiny_models import VOCABULARY, prompt, save_tiny_model, save_tokenizer
from tiny_seq2seq import save_tiny_seq2seq
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.config import load_config
from penstock.engine.engine import Engine
from penstock.engine.loading import load_model
from penstock.errors import MemoryTooSmall
from penstock.request import Failed, Finished

SETTINGS = {"dtype": "float32", "threads": 1, "prefix_cache": False, "memory": "4GiB", "chunk_size": 2048}
PROMPT = prompt(3000)

# The limit is the system's own, so it needs a process of its own; a short prompt first makes threads and loads code.
READER = """
import json, re, resource, sys
from pathlib import Path
from penstock.engine.engine import Engine
from penstock.errors import MemoryTooSmall
from penstock.errors import PenstockError

folder, settings, tokens, spare_mb = json.load(sys.stdin)
with Engine.load(folder, **settings) as engine:
    engine.generate(tokens[:40], max_tokens=2, ignore_eos=True)
    sizes = []
    engine.on_step = lambda plan, result: sizes.append(plan.num_tokens)
    held = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + spare_mb * 2**20, resource.RLIM_INFINITY))
    try:
        answer = engine.generate(tokens, max_tokens=8, ignore_eos=True).token_ids
    except PenstockError as error:
        answer = str(error)
    print(json.dumps({"answer": answer, "sizes": sizes, "adjustments": engine.adjustments}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=16_384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)
    return str(path)


def read_with(folder, spare_mb, **settings):
    given = json.dumps([folder, SETTINGS | settings, PROMPT, spare_mb])
    done = subprocess.run([sys.executable, "-c", READER], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_chunks_are_halved_until_they_fit_and_the_answer_is_the_same(folder):
    with Engine.load(folder, **SETTINGS) as engine:
        expected = engine.generate(PROMPT, max_tokens=8, ignore_eos=True).token_ids
    found = read_with(folder, 150)
    assert found["answer"] == list(expected)
    largest = max(found["sizes"])
    assert largest in (1024, 512, 256)
    assert sum(size for size in found["sizes"] if size > 1) == len(PROMPT)
    said = "at most {} prompt tokens in a step from now on: {} did not fit into the memory"
    assert found["adjustments"][0] == said.format(largest, 2 * largest)


def test_a_chunk_size_that_is_strictly_asked_for_is_refused_instead(folder):
    found = read_with(folder, 150, strict=True)
    assert found["answer"].startswith("--strict: a step with 2048 prompt tokens did not fit")
    assert found["adjustments"] == []


@pytest.fixture
def load_any(tmp_path, monkeypatch):
    """An engine for a tiny model of any lane; an own cache is forced where the name says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engines = []

    def make(name, **settings):
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            if name == "bart":
                save_tiny_seq2seq(name, folder)
            elif name.endswith("-own-cache"):
                save_causal_model((MUST_SHOW | TROUBLE)[name.removesuffix("-own-cache")](), folder)
            else:
                save_tiny_model(name, folder)
        lane = {"lane": GENERIC_TEXT} if name.endswith("-own-cache") else {}
        defaults = {"dtype": "float32", "memory": "4GiB", "threads": 1}
        engines.append(Engine.load(str(folder), **defaults | lane | settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


# --- the same failure in the middle of a step, wherever a lane may keep half of it ---


def failing(engine, when):
    """The lane computes a step and is then refused memory, as for its last layer; `when`: (call, tokens) -> bool."""
    lane, calls = engine._runner.lane, []
    run = lane.run

    def broken(inputs):
        calls.append(len(inputs.ids_T))
        logits = run(inputs)
        if when(len(calls), len(inputs.ids_T)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits

    lane.run = broken
    return calls


@pytest.mark.parametrize("name", ["llama", "qwen3-5", "bloom-own-cache", "bamba-own-cache", "bart"])
def test_every_lane_gives_the_same_answer_after_a_step_broke_in_the_middle(load_any, name):
    tokens = prompt(200)
    expected = load_any(name, chunk_size=64).generate(tokens, max_tokens=8, ignore_eos=True).token_ids
    engine = load_any(name, chunk_size=64)
    failing(engine, lambda call, _: call in (2, 5))
    assert engine.generate(tokens, max_tokens=8, ignore_eos=True).token_ids == expected
    assert engine.scheduler.budget.most in (16, 32)
    assert len(engine.adjustments) == len(engine.model.adjustments) + 2


def test_a_strict_refusal_of_a_step_that_did_not_fit_spares_the_answers_in_it(load_any):
    alone = load_any("llama", chunk_size=64).generate(prompt(20), max_tokens=12, ignore_eos=True).token_ids
    engine = load_any("llama", chunk_size=64, strict=True)
    answer = engine.submit(prompt(20), max_tokens=12, ignore_eos=True)
    engine.step()
    refused = engine.submit(prompt(200))
    failing(engine, lambda _, num_tokens: num_tokens > 64)
    events = []
    while engine.scheduler.has_work:
        events += engine.step()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.request_id == refused
    assert str(failed.error).startswith("--strict: a step with 64 prompt tokens did not fit")
    outputs = {event.request_id: event.output for event in events if isinstance(event, Finished)}
    assert outputs[answer].token_ids == alone


def test_a_step_that_never_fits_leaves_no_limit_behind(load):
    engine = load(chunk_size=64)
    sizes = failing(engine, lambda call, _: call <= 7)
    with pytest.raises(MemoryTooSmall, match="No memory was left"):
        engine.generate(prompt(100), max_tokens=4)
    assert sizes == [64, 32, 16, 8, 4, 2, 1]
    assert (engine.scheduler.budget.most, engine.adjustments) == (0, [])
    assert engine.generate(prompt(100), max_tokens=4, ignore_eos=True).chunks[0].end == 64


def test_prompts_get_their_share_beside_streams_after_a_step_did_not_fit(load):
    engine = load(chunk_size=64)
    for seed in range(8):
        engine.submit(prompt(4, seed=seed), max_tokens=400, ignore_eos=True)
    engine.step()
    failing(engine, lambda _, num_tokens: num_tokens > 16 + 8)
    request = engine.submit(prompt(160, seed=9), max_tokens=1)
    num_steps = 0
    while request in engine.scheduler.sequences:
        engine.step()
        num_steps += 1
    assert num_steps <= 160 // 16 + 1


def test_half_of_a_chunk_is_new_where_the_overlap_no_longer_fits(load):
    engine = load(chunk_size=64, overlap=32, prefix_cache=False)
    failing(engine, lambda _, num_tokens: num_tokens > 32)
    chunks = engine.generate(prompt(200), max_tokens=1).chunks
    assert [chunk.end for chunk in chunks][:5] == [32, 48, 64, 80, 96]


def test_the_plan_knows_of_a_step_that_did_not_fit(load):
    engine = load(chunk_size=64)
    failing(engine, lambda call, _: call == 1)
    engine.generate(prompt(100), max_tokens=1)
    plan = engine.plan(100)
    assert plan.chunk_size == 32
    assert "32 prompt tokens" in plan.adjustments[0]


def test_a_prompt_for_which_there_is_no_memory_at_all_ends_alone(load_any):
    engine = load_any("llama", chunk_size=64)
    expected = engine.generate(prompt(30), max_tokens=40, ignore_eos=True).token_ids
    writing = engine.submit(prompt(30), max_tokens=40, ignore_eos=True)
    for _ in range(5):
        engine.step()
    failing(engine, lambda _, num_tokens: num_tokens > 1)  # whatever comes beside the one that writes
    doomed = engine.submit(prompt(200, seed=5), max_tokens=4)
    failed, finished = run_all(engine)
    assert list(failed) == [doomed]
    assert "Raise --memory" in str(failed[doomed])
    assert finished[writing].token_ids == expected
    assert engine.scheduler.budget.most == 0  # what did not help is taken back


def test_an_answer_that_is_read_again_is_halved_too(tmp_path):
    """A preemption lost it, so its tokens are read like a prompt's, though most chunks hold none of the prompt."""
    save_tiny_model("llama", tmp_path)
    settings = {"dtype": "float32", "memory": "4GiB", "threads": 1, "prefix_cache": False, "chunk_size": 64}
    config = load_config(settings)
    loaded = load_model(str(tmp_path), config)
    requests = [(prompt(4, seed=seed), {"max_tokens": 150, "ignore_eos": True}) for seed in (1, 2)]
    with Engine(loaded) as engine:
        expected = [engine.generate(tokens, **sampling).token_ids for tokens, sampling in requests]
    with Engine(dataclasses.replace(load_model(str(tmp_path), config), num_blocks=16)) as engine:
        wide = []  # steps that read again: the first begins with the prompt, the second is behind it
        failing(engine, lambda call, num_tokens: num_tokens > 40 and (wide.append(call) or len(wide) == 2))
        ids = [engine.submit(tokens, **sampling) for tokens, sampling in requests]
        failed, finished = run_all(engine)
        assert not failed
        assert len(wide) >= 2, "too little was read again"
        assert [finished[request_id].token_ids for request_id in ids] == expected
