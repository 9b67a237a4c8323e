"""Prompts that break while they are read: their own request fails, and nothing answers the part that came."""

import io

import pytest
from tiny_models import prompt

from penstock.engine.feed import TokenFeed
from penstock.errors import InvalidPrompt, PromptTooLong
from penstock.prompt.source import TextPart
from penstock.request import Failed, Finished


class BrokenPipe:
    """Words, and then an error, once; afterwards it looks as if it had ended."""

    def __init__(self, error):
        self.parts = [b"w5 " * 100, error]

    def read(self, size=-1):
        part = self.parts.pop(0) if self.parts else b""
        if isinstance(part, BaseException):
            raise part
        return part


def ends_of_all(engine):
    events = []
    while engine.scheduler.has_work:
        events += engine.step()
    failures = {event.request_id: event.error for event in events if isinstance(event, Failed)}
    return failures, {event.request_id: event.output for event in events if isinstance(event, Finished)}


def test_a_pipe_that_breaks_fails_its_own_request_alone(load):
    engine = load(chunk_size=16)
    other = engine.submit(prompt(60), max_tokens=20, ignore_eos=True)
    pipe = BrokenPipe(OSError(5, "Input/output error"))
    broken = engine.submit(engine.chat_feed([TextPart(stream=pipe)]), max_tokens=5, ignore_eos=True)
    failures, outputs = ends_of_all(engine)
    assert isinstance(failures.pop(broken), InvalidPrompt)
    assert not failures
    assert outputs[broken].finish_reason == "abort"
    assert not outputs[broken].token_ids
    assert len(outputs[other].token_ids) == 20


def test_a_prompt_whose_reading_was_interrupted_is_not_answered_in_part(load):
    engine = load(chunk_size=16)
    feed = engine.chat_feed([TextPart(stream=BrokenPipe(KeyboardInterrupt()))])
    broken = engine.submit(feed, max_tokens=5, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        ends_of_all(engine)
    failures, outputs = ends_of_all(engine)
    assert "KeyboardInterrupt" in str(failures[broken])
    assert not outputs[broken].token_ids


def test_a_broken_feed_is_refused_whenever_it_is_given_again(load):
    engine = load(chunk_size=16)
    feed = engine.chat_feed([TextPart(stream=BrokenPipe(OSError(5, "Input/output error")))])
    for _ in range(2):
        with pytest.raises(InvalidPrompt, match="Input/output error"):
            engine.generate(feed)


def test_a_feed_that_is_read_whole_is_refused_where_it_breaks():
    def batches():
        yield [1, 2, 3]
        raise OSError(5, "Input/output error")

    feed = TokenFeed(batches=batches())
    for _ in range(2):
        with pytest.raises(InvalidPrompt, match="Input/output error"):
            feed.take_all(lambda num_tokens, *, is_all: None)


def test_a_text_that_is_far_too_long_is_refused_before_all_of_it_is_encoded(load):
    reader = load().prompts
    text = "w5 " * 1_000_000
    asked = [lambda: reader.text_tokens(text), lambda: reader.ask(text, (), ())]
    for ask in asked:
        with pytest.raises(
            PromptTooLong, match=f"more than {4 * reader.capacity} tokens, 4 times the {reader.capacity} that fit"
        ):
            ask()


def test_a_long_text_that_fits_has_the_tokens_of_the_whole(load):
    reader = load().prompts
    text = "w5 w7" + " " * 70_000 + "w9"
    assert reader.text_tokens(text) == reader.tokenizer.encode(text, add_special_tokens=True)


@pytest.mark.parametrize("settings", [{}, {"strict": True}])
def test_a_stream_that_is_too_long_is_counted_to_its_end_for_the_value_that_would_do(load, settings):
    engine = load(chunk_size=16, context=512, **settings)
    parts = [TextPart(stream=io.BytesIO(b"w5 " * 1000))]
    with pytest.raises(PromptTooLong, match=r"has 100\d tokens; the context holds 512 .* raise --context to 12\d\d\."):
        engine.generate(engine.chat_feed(parts), max_tokens=1)


def test_a_stream_without_an_end_is_refused_without_it(load):
    engine = load(chunk_size=16, context=512)
    endless = TextPart(stream=io.BufferedReader(Endless()))
    with pytest.raises(PromptTooLong, match="tokens or more; the context holds 512"):
        engine.generate(engine.chat_feed([endless]), max_tokens=1)


class Endless(io.RawIOBase):
    """Words for ever."""

    def readable(self):
        return True

    def readinto(self, buffer):
        buffer[:] = (b"w5 " * (len(buffer) // 3 + 1))[: len(buffer)]
        return len(buffer)
