"""Grammars beside other requests: those that are given up, and those that take long to compile."""

import asyncio
import gc
import json
import random

import llguidance
import pytest
from hang_bound import finished, until
from tiny_chat_model import save_tiny_chat_model

from penstock.apart import Bounds
from penstock.engine.async_engine import AsyncEngine
from penstock.engine.engine import Engine
from penstock.engine.grammar_proof import GrammarProof
from penstock.errors import InvalidSetting

# Its states multiply with every letter, until llguidance gives up in the middle of an answer.
HARD = {"type": "string", "pattern": "(.*a.{400}|.*b.{401}|.*c.{402}){3}"}
# So does what these can match, at once.
STALLING = ["^(a{1000}){1000}$", "^a{1000000}$", "^b(a{1000}){1000}$"]


def grammar_of(schema):
    return json.dumps({"grammars": [{"json_schema": schema}]})


def large_schema(num_objects):
    """Alternatives that share nothing."""
    names = [[f"k{index}_{name}" for name in range(6)] for index in range(num_objects)]
    objects = [
        {"properties": {name: {"type": "string", "pattern": f"a{{{index}}}.*b"} for name in own}, "required": own}
        for index, own in enumerate(names)
    ]
    return {"anyOf": [{"type": "object"} | properties for properties in objects]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_chat_model(folder)
    return folder


@pytest.fixture
def engine(folder):
    with Engine.load(str(folder), dtype="float32", memory="4GiB", threads=1) as engine:
        yield engine


def test_a_grammar_that_is_given_up_in_the_middle_of_an_answer_is_an_error_of_the_request(engine):
    letters = dict.fromkeys(range(60, 90), 8)
    with pytest.raises(InvalidSetting, match=r"schema any further: .*[Ss]implify"):
        engine.generate("hello", grammar=grammar_of(HARD), max_tokens=150, temperature=1.0, seed=1, logit_bias=letters)


@pytest.mark.parametrize("pattern", STALLING)
def test_a_grammar_whose_first_step_would_be_long_is_refused_before_it_has_one(engine, pattern):
    with pytest.raises(InvalidSetting, match=r"schema any further: .*[Ss]implify"):
        engine.submit("hello", grammar=grammar_of({"type": "string", "pattern": pattern}), max_tokens=4)
    assert not engine.has_work


def test_a_grammar_is_given_up_before_it_has_taken_much_memory(engine):
    """With every letter it may have begun to match once more, and remembers which."""
    matcher = engine.grammars.matcher(grammar_of({"type": "string", "pattern": ".*a.{50}"}))
    letters = [engine.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefgh"]
    matcher.accept(engine.tokenizer.encode('"', add_special_tokens=False)[0])
    chosen = random.Random(1)

    def write():
        for _ in range(250):
            matcher.mask_words()
            matcher.accept(chosen.choice(letters))

    with pytest.raises(InvalidSetting, match="too many states"):
        write()


def test_a_grammar_that_is_given_up_leaves_the_others_alone(engine):
    async def scenario():
        served = AsyncEngine(engine)
        others = [asyncio.create_task(served.generate(text, max_tokens=60, ignore_eos=True)) for text in ("a", "b")]
        grammars = [grammar_of({"type": "string", "pattern": f"^({letter}{{1000}}){{1000}}$"}) for letter in "abcdef"]
        asked = [served.generate("hello", grammar=grammar, max_tokens=8) for grammar in grammars]
        refused = await asyncio.gather(*asked, return_exceptions=True)
        outputs = await asyncio.gather(*others)
        await served.close()
        return refused, outputs

    refused, outputs = finished(scenario())
    assert [type(error) for error in refused] == [InvalidSetting] * 6
    assert [len(output.token_ids) for output in outputs] == [60, 60]


# What the limits of the compiler do not reach: it walks through as many states as the number is large.
ENDLESS = [{"multipleOf": 2**31 - 1}, {"type": "array", "items": {"type": "integer", "multipleOf": 10**8 + 7}}]


def test_a_grammar_that_would_compile_for_ever_is_refused_and_others_are_compiled(engine):
    engine.grammars.proof = GrammarProof(engine.grammars.described, Bounds(cpu_s=0.5, max_bytes=1 << 30))

    async def scenario():
        served = AsyncEngine(engine)
        asked = [served.generate("hello", grammar=grammar_of(schema), max_tokens=4) for schema in ENDLESS]
        fair = served.generate("hello", grammar=grammar_of({"enum": ["Rome"]}), max_tokens=20)
        refused = await asyncio.gather(*asked, fair, return_exceptions=True)
        await served.close()
        return refused

    *refused, output = finished(scenario())
    assert [type(error) for error in refused] == [InvalidSetting] * 2
    assert all("more than 0.5 s of processor time" in str(error) for error in refused)
    assert json.loads(output.text) == "Rome"


def test_answers_to_one_grammar_do_not_disturb_each_other(engine):
    grammar = grammar_of({"enum": ["Rome", "Paris"]})
    outputs = engine.generate_batch(["one", "two"], grammar=grammar, max_tokens=20)
    assert all(json.loads(output.text) in ("Rome", "Paris") for output in outputs)


def test_a_compiled_grammar_is_shared_while_it_is_used_and_not_kept_afterwards(engine):
    grammar = grammar_of({"type": "boolean"})
    matcher = engine.grammars.matcher(grammar)
    assert engine.grammars.compiled(grammar) is engine.grammars.compiled(grammar)
    del matcher
    gc.collect()
    assert grammar not in engine.grammars._compiled


def test_streams_go_on_while_a_large_schema_is_compiled(engine, monkeypatch):
    grammar = grammar_of(large_schema(500))
    num_steps, steps_in_between = [0], []

    def count_step(plan, result):
        num_steps[0] += 1

    def compile_and_count(guide, text, compiled=llguidance.LLMatcher, **options):
        before = num_steps[0]
        matcher = compiled(guide, text, **options)
        steps_in_between.append(num_steps[0] - before)
        return matcher

    async def scenario():
        served = AsyncEngine(engine)
        other = asyncio.create_task(served.generate("hello", max_tokens=4000, ignore_eos=True))
        await until(lambda: num_steps[0])
        await served.generate("hello", grammar=grammar, max_tokens=2)
        assert not other.done()
        await served.close(drain=False)
        await other

    engine.on_step = count_step
    monkeypatch.setattr(llguidance, "LLMatcher", compile_and_count)
    finished(scenario())
    assert len(steps_in_between) == 1
    assert steps_in_between[0] > 10, "the compiler kept the stream from going on"
