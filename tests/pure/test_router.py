"""A prompt goes where its first token is predicted earliest."""

from array import array
from base64 import b64encode

import pytest

from penstock.route.news import Load, Wanted
from penstock.route.router import FRESH_S, Router

BLOCK = 16
NOW = 1000.0


def load(*hashes: int, backlog_s: float = 0.0, at_s: float = NOW, num_free: int = 1000, **others) -> Load:
    return Load(
        model="m",
        at_s=at_s,
        identity="i",
        rotary="",
        block_size=BLOCK,
        num_blocks=1000,
        num_free_blocks=num_free,
        num_running=0,
        num_waiting=0,
        num_decodes=0,
        decode_contexts=0,
        num_unread_tokens=0,
        step_tokens=512,
        step_cost=(0.0, 0.01, 0.0, 0.0, 0.0),
        backlog_s=backlog_s,
        cached=b64encode(array("I", hashes).tobytes()).decode(),
        **others,
    )


def prompt(num_blocks: int, *, first: int = 1) -> Wanted:
    return Wanted(num_tokens=num_blocks * BLOCK + 1, hashes=tuple(range(first, first + num_blocks)))


def router(**loads: Load) -> Router:
    made = Router(seed=1)
    for name, news in loads.items():
        made.take(name, news)
    return made


def test_a_prompt_goes_where_its_beginning_lies():
    assert router(a=load(), b=load(1, 2, 3)).order(prompt(10), ["a", "b"], NOW)[0] == "b"


def test_a_long_queue_outweighs_a_cached_prefix_and_a_short_one_does_not():
    saved_s = 3 * BLOCK * 0.01
    short = router(a=load(), b=load(1, 2, 3, backlog_s=saved_s / 2))
    long = router(a=load(), b=load(1, 2, 3, backlog_s=3 * saved_s))
    assert short.order(prompt(10), ["a", "b"], NOW)[0] == "b"
    assert long.order(prompt(10), ["a", "b"], NOW)[0] == "a"


def test_the_prediction_is_the_queue_and_what_is_not_cached():
    made = router(a=load(1, 2, backlog_s=0.5))
    assert made.predicted_s("a", prompt(10), NOW) == pytest.approx(0.5 + (8 * BLOCK + 1) * 0.01)


def test_a_queue_gets_shorter_while_the_news_age():
    made = router(a=load(backlog_s=2.0))
    assert made.predicted_s("a", prompt(0), NOW + 1.5) == pytest.approx(0.5 + 0.01)


def test_what_was_sent_since_the_news_counts_until_newer_ones_tell_of_it():
    made = router(a=load(), b=load())
    made.send("a", "first", prompt(10), NOW + 0.1)
    assert made.order(prompt(10, first=100), ["a", "b"], NOW + 0.1)[0] == "b"
    assert made.order(prompt(11), ["a", "b"], NOW + 3)[0] == "a"  # its blocks lie there, or will
    made.take("a", load(at_s=NOW + 2))
    assert made.predicted_s("a", prompt(10), NOW + 2) == pytest.approx((10 * BLOCK + 1) * 0.01)


def test_what_is_about_to_go_there_counts_and_waits_in_no_queue():
    made = router(a=load(), b=load())
    made.expect("a", "first", prompt(10), NOW)
    assert made.order(prompt(10, first=100), ["a", "b"], NOW)[0] == "b"
    made.send("b", "second", prompt(1), NOW)
    assert made.order(prompt(1), ["a", "b"], NOW + FRESH_S + 1)[0] == "a"


def test_what_has_ended_counts_no_more():
    made = router(a=load())
    made.send("a", "first", prompt(10), NOW)
    made.end("a", "first")
    assert made.predicted_s("a", prompt(0), NOW) == pytest.approx(0.01)


def test_old_news_leave_the_shorter_of_two_queues():
    made = router(a=load(1, 2, 3), b=load())
    late = NOW + FRESH_S + 1
    made.send("a", "first", prompt(1), late)
    assert made.order(prompt(10), ["a", "b"], late)[0] == "b"
    assert made.predicted_s("a", prompt(10), late) is None


def test_a_replica_that_fell_silent_is_left_out_while_most_tell_news():
    made = router(a=load(1, 2, 3, at_s=NOW - FRESH_S - 1), b=load(), c=load())
    assert "a" not in made.order(prompt(3), ["a", "b", "c"], NOW)


def test_news_that_came_late_do_not_replace_newer_ones():
    made = router(a=load(1, 2))
    made.take("a", load(at_s=NOW - 1))
    assert made.loads["a"].hashes == {1, 2}


def test_a_replica_without_free_pages_comes_last():
    made = router(a=load(1, 2, num_free=3), b=load(backlog_s=1.0))
    assert made.order(prompt(10), ["a", "b"], NOW) == ["b", "a"]
    assert made.order(prompt(4), ["a", "b"], NOW) == ["a", "b"]


def test_a_sample_of_the_hashes_tells_how_deep_a_prefix_lies():
    made = router(a=load(2, 4, 6, hash_divisor=2))
    assert made.predicted_s("a", prompt(10), NOW) == pytest.approx((4 * BLOCK + 1) * 0.01)


def test_replicas_that_are_gone_are_forgotten():
    made = router(a=load(), b=load())
    made.keep(["b", "c"])
    assert set(made.loads) == {"b"}
    assert made.predicted_s("a", prompt(1), NOW) is None
    assert made.order(prompt(1), ["b", "c"], NOW) == ["b"]
