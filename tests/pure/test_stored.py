"""Responses are kept within a number of bytes, and apart by scope."""

import pytest

from penstock.server.openai.stored import StoredResponses
from penstock.server.problems import Refused

ANSWER = {"id": "a", "text": "x" * 100}


def named(name):
    return ANSWER | {"id": name}


def test_those_that_nobody_asked_for_the_longest_go_first():
    stored = StoredResponses(max_bytes=400)
    for name in "abc":
        stored.keep("", named(name), [])
    assert stored.answer("", "a") == named("a")
    stored.keep("", named("d"), [])
    assert stored.answer("", "a") == named("a")
    with pytest.raises(Refused, match="no response 'b'"):
        stored.answer("", "b")


def test_what_is_larger_than_all_of_it_is_not_kept():
    stored = StoredResponses(max_bytes=400)
    stored.keep("", named("a"), [{"content": "z"}])
    stored.keep("", named("big"), [{"content": "y" * 1000}])
    with pytest.raises(Refused):
        stored.messages("", "big")
    assert stored.messages("", "a") == [{"content": "z"}]


def test_scopes_do_not_see_each_other_and_a_deleted_one_is_gone():
    stored = StoredResponses(max_bytes=1000)
    stored.keep("mine", named("a"), [])
    with pytest.raises(Refused):
        stored.delete("yours", "a")
    stored.delete("mine", "a")
    with pytest.raises(Refused):
        stored.answer("mine", "a")


def test_keeping_one_again_takes_no_more_room():
    stored = StoredResponses(max_bytes=300)
    stored.keep("", named("b"), [])
    for _ in range(5):
        stored.keep("", named("a"), [])
    assert stored.answer("", "b") == named("b")
