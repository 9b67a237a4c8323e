"""Grammars beside other requests: those that are given up, and those that take long to compile."""

import asyncio
import gc
import itertools
import json
import time

import pytest
from tiny_chat_model import save_tiny_chat_model

from penstock.engine.async_engine import AsyncEngine
from penstock.engine.engine import Engine
from penstock.errors import InvalidSetting

# Its states multiply with every letter, until llguidance gives up in the middle of an answer.
HARD = {"type": "string", "pattern": "(.*a.{400}|.*b.{401}|.*c.{402}){3}"}


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


def test_streams_go_on_while_a_large_schema_is_compiled(engine):
    grammar = grammar_of(large_schema(1000))
    engine.grammars.matcher(grammar_of({"type": "boolean"}))  # reads the vocabulary
    started_at = time.perf_counter()
    engine.grammars.matcher(grammar)
    alone_s = time.perf_counter() - started_at
    step_times = []
    engine.on_step = lambda plan, result: step_times.append(time.perf_counter())

    async def scenario():
        served = AsyncEngine(engine)
        other = asyncio.create_task(served.generate("hello", max_tokens=4000, ignore_eos=True))
        while not step_times:
            await asyncio.sleep(0.01)
        await served.generate("hello", grammar=grammar, max_tokens=2)
        assert not other.done()
        await served.close(drain=False)
        await other

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))
    gaps_s = [after - before for before, after in itertools.pairwise(step_times)]
    assert max(gaps_s) < alone_s / 2
