"""What `submit` returns: a number that knows its plan and its events."""

import pytest
from tiny_models import prompt
from tiny_seq2seq import save_tiny_seq2seq

from penstock.engine.engine import Engine
from penstock.prompt.source import TextPart
from penstock.request import Finished


def test_a_handle_is_the_number_of_its_request(load):
    engine = load("llama")
    handle = engine.submit(prompt(20), max_tokens=2)
    assert handle in engine.scheduler.sequences
    events = list(handle.events())
    assert {event.request_id for event in events} == {int(handle)}
    assert isinstance(events[-1], Finished)
    engine.abort(handle)  # of a request that has ended: nothing happens


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_its_plan_is_the_one_that_runs(load, chunk_size):
    engine = load("llama", chunk_size=16)
    handle = engine.submit(prompt(40), max_tokens=1, chunk_size=chunk_size)
    plan = handle.plan
    assert plan == engine.plan(40, chunk_size=chunk_size)
    output = next(event.output for event in handle.events() if isinstance(event, Finished))
    assert (len(output.chunks), plan.prompt_tokens) == (plan.num_chunks, output.num_prompt_tokens)


def test_what_had_to_be_done_to_a_streamed_prompt_is_said_before_it_is_read(load):
    engine = load("llama")
    handle = engine.submit(engine.chat_feed([TextPart.of_text("w5 w6 w7 w8")]), max_tokens=1)
    assert handle.notes
    assert handle.plan.adjustments[: len(handle.notes)] == handle.notes
    estimated = handle.plan.prompt_tokens
    output = next(event.output for event in handle.events() if isinstance(event, Finished))
    assert handle.plan.prompt_tokens == output.num_prompt_tokens >= estimated > 0


def test_a_prompt_that_is_made_whole_first_keeps_what_was_said_of_it(tmp_path, own_verdicts):
    save_tiny_seq2seq("t5", tmp_path)
    with Engine.load(str(tmp_path), dtype="float32", memory="3GiB", threads=1) as engine:
        handle = engine.submit(engine.chat_feed([TextPart.of_text("w5 w6 w7 w8")]), max_tokens=1)
        assert "no chat template" in handle.notes[0]
        assert handle.plan.adjustments[0] == handle.notes[0]
