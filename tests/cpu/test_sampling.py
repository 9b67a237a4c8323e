"""What a request may ask of its answer: biased tokens, a least length, a grammar."""

import json

import pytest
from tiny_models import prompt

from penstock.engine.active import Active
from penstock.engine.engine import Engine
from penstock.engine.sampler import Sampler
from penstock.engine.stopping import StopText
from penstock.errors import InvalidSetting, UnsupportedModel
from penstock.lanes.lane import TextPrompt
from penstock.plan.pace import Pace
from penstock.prompt.detokenizer import Detokenizer
from penstock.request import Request, SamplingParams


def test_a_bias_makes_a_token_certain_or_impossible(load):
    engine = load()
    usual = engine.generate(prompt(20), max_tokens=4, ignore_eos=True).token_ids
    assert 7 not in usual
    assert engine.generate(prompt(20), max_tokens=4, ignore_eos=True, logit_bias={7: 100}).token_ids == (7, 7, 7, 7)
    banned = engine.generate(prompt(20), max_tokens=4, ignore_eos=True, logit_bias={usual[0]: -100}).token_ids
    assert usual[0] not in banned


def test_a_bias_of_a_token_that_does_not_exist_is_refused(load):
    with pytest.raises(InvalidSetting, match="999"):
        load().generate(prompt(5), logit_bias={999: 1.0})


def test_the_least_length_holds_back_the_end_and_stop_strings(load):
    engine = load()
    ends_at_once = {"logit_bias": {2: 100}, "max_tokens": 10}
    assert len(engine.generate(prompt(20), **ends_at_once).token_ids) == 1
    late = engine.generate(prompt(20), **ends_at_once, min_tokens=6)
    assert len(late.token_ids) == 7
    assert late.finish_reason == "stop"
    stopped = engine.generate(prompt(20), max_tokens=10, ignore_eos=True, logit_bias={7: 100}, stop="w7", min_tokens=3)
    assert len(stopped.token_ids) == 4


def test_the_least_length_is_at_most_the_largest(load):
    with pytest.raises(InvalidSetting, match="min_tokens"):
        load().generate(prompt(5), max_tokens=3, min_tokens=4)


def test_a_tokenizer_without_bytes_cannot_be_held_to_a_grammar(load):
    with pytest.raises(UnsupportedModel, match="grammar"):
        load().generate(prompt(5), grammar='start: "w7"')


def test_an_answer_matches_its_schema_and_a_bad_schema_is_refused():
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
    grammar = json.dumps({"grammars": [{"json_schema": schema | {"additionalProperties": False}}]})
    messages = [{"role": "user", "content": "Where is the Louvre? Answer in JSON."}]
    with Engine.load("smollm2", memory="2GiB", threads=1) as engine:
        output = engine.generate(messages, grammar=grammar, max_tokens=40)
        assert json.loads(output.text)["city"] in ("Rome", "Paris")
        assert output.finish_reason == "stop"
        with pytest.raises(InvalidSetting, match="schema"):
            engine.generate(messages, grammar=json.dumps({"grammars": [{"json_schema": {"type": "nonsense"}}]}))


def test_extreme_settings_are_refused_or_draw_the_likeliest(load):
    engine = load()
    likeliest = engine.generate(prompt(20), max_tokens=6, ignore_eos=True).token_ids
    for extreme in ({"temperature": 1e-4}, {"temperature": 1.0, "top_p": 1e-46}):
        assert engine.generate(prompt(20), max_tokens=6, ignore_eos=True, seed=1, **extreme).token_ids == likeliest
    for wrong in ({"temperature": 1e-40}, {"temperature": float("nan")}, {"repetition_penalty": 1e-40}):
        with pytest.raises(InvalidSetting, match=next(iter(wrong))):
            engine.generate(prompt(20), **wrong)


def test_a_stop_string_that_comes_with_the_last_text_is_a_stop(load):
    """A letter of two bytes is known to be whole when the answer ends, if the tokenizer cannot say so before."""
    bytes_of = {1: b"a", 2: b"\xc3", 3: b"\xa9"}
    params = SamplingParams(max_tokens=3, stop=("\u00e9",))
    active = Active(
        request=Request(id=0, prompt=(1,), sampling=params, arrived_at=0),
        prompt=TextPrompt(positions=(1,)),
        feed=None,
        sampler=Sampler(params),
        detokenizer=Detokenizer(
            decode=lambda ids: b"".join(bytes_of[token] for token in ids).decode(errors="replace"),
            token={1: "a", 2: "<0xC3>", 3: "<0xA9>"}.get,
            by_token=True,
        ),
        stop=StopText(params.stop),
        held=load().held,
        final_peak=lambda chunk, num_tokens: 0,
        pace=Pace(),
    )
    choices = [active.choose(token, None, is_end=False, is_full=False) for token in (1, 2, 3)]
    assert "".join(active.text) == "a"
    assert [choice.finish for choice in choices] == [None, None, "stop"]
