"""A request that cannot go on ends alone: everyone else gets every token once, and the engine goes on."""

import dataclasses
import json

import pytest
from ended import run_all
from tiny_chat_model import save_tiny_chat_model
from tiny_models import prompt
from tiny_seq2seq import save_tiny_seq2seq

from penstock.config import load_config
from penstock.engine.engine import Engine
from penstock.engine.loading import load_model
from penstock.errors import InvalidSetting, PenstockError
from penstock.prompt.source import TextPart

SETTINGS = {"dtype": "float32", "memory": "4GiB", "threads": 1}
# Within a few letters the states of this pattern are more than llguidance is willing to follow.
ENDLESS = {"type": "string", "pattern": "(.*a.{400}|.*b.{401}|.*c.{402}){3}"}


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_chat_model(folder)
    return str(folder)


def words(tokens):
    return " ".join(f"w{token}" for token in tokens)


def test_a_grammar_that_gives_up_ends_its_own_request(chat_folder):
    grammar = json.dumps({"grammars": [{"json_schema": ENDLESS}]})
    sampled = {"temperature": 1.0, "seed": 1, "logit_bias": dict.fromkeys(range(60, 90), 8)}
    with Engine.load(chat_folder, **SETTINGS) as engine:
        alone = engine.generate("hello there", max_tokens=120, ignore_eos=True).token_ids
        before = engine.submit("hello there", max_tokens=120, ignore_eos=True)
        doomed = engine.submit("hello", max_tokens=150, grammar=grammar, **sampled)
        after = engine.submit("hello there", max_tokens=120, ignore_eos=True)
        failed, finished = run_all(engine)
        assert set(failed) == {doomed}
        assert isinstance(failed[doomed], PenstockError)
        assert finished[before].token_ids == finished[after].token_ids == alone
        assert finished[doomed].finish_reason == "abort"


def test_an_answer_to_a_source_ends_where_the_memory_does(tmp_path):
    save_tiny_seq2seq("bart", tmp_path)
    config = load_config(SETTINGS | {"chunk_size": 16})
    loaded = dataclasses.replace(load_model(str(tmp_path), config), num_blocks=5)
    with Engine(loaded) as engine:
        output = engine.generate(prompt(70), max_tokens=60, ignore_eos=True)
        assert output.finish_reason == "length"
        assert 0 < len(output.token_ids) < 60
        assert len(engine.generate(prompt(10), max_tokens=4, ignore_eos=True).token_ids) == 4


def test_events_of_a_request_that_ended_are_refused(load):
    engine = load()
    first = engine.submit(prompt(5), max_tokens=1, ignore_eos=True)
    engine.generate(prompt(9), max_tokens=4, ignore_eos=True)
    with pytest.raises(InvalidSetting, match="has ended"):
        next(engine.events(first))


@pytest.mark.parametrize("settings", [{}, {"chunk_size": 40}, {"chunk_size": 40, "overlap": 8}])
def test_a_streamed_prompt_that_comes_again_is_taken_from_the_cache(load, settings):
    engine = load(context=4000, **settings)
    tokens = prompt(1500)

    def answer():
        feed = engine.chat_feed([TextPart.of_text(words(tokens))])
        return engine.generate(feed, max_tokens=3, ignore_eos=True)

    first, again = answer(), answer()
    assert again.token_ids == first.token_ids
    assert first.num_cached_tokens == 0
    assert 1400 < again.num_cached_tokens < 1500
    assert again.num_prompt_tokens == 1500
