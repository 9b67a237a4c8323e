"""Turns that a template would refuse or drop: every text reaches the model, in its order."""

import pytest
from test_render import CHATML, TURNS

from penstock.errors import InvalidPrompt
from penstock.prompt.render import ChatTemplate
from penstock.server.turns import TurnRules, fitted, turn_rules

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
FIRST_SYSTEM_ONLY = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "turns": TURNS, "no system": NO_SYSTEM, "first system only": FIRST_SYSTEM_ONLY}


def template(name):
    return ChatTemplate(TEMPLATES[name], special_tokens={"bos_token": "<s>"})


def turns(*roles):
    return [{"role": role, "content": f"text {index}"} for index, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("chatml", TurnRules(system=True, late_system=True, repeated_user=True)),
        ("turns", TurnRules(system=True, late_system=False, repeated_user=False)),
        ("no system", TurnRules(system=False, late_system=False, repeated_user=True)),
        ("first system only", TurnRules(system=True, late_system=False, repeated_user=True)),
    ],
)
def test_what_a_template_takes_is_found_by_what_it_prints(name, rules):
    assert turn_rules(template(name)) == rules


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "roles",
    [
        ("user", "user"),
        ("system", "system", "user"),
        ("system", "user", "system", "assistant", "user"),
        ("user", "system", "user", "assistant", "user", "user"),
    ],
)
def test_every_text_is_printed_in_its_order(name, roles):
    known = template(name)
    given = turns(*roles)
    text = known.render(fitted(given, turn_rules(known)))
    places = [text.index(turn["content"]) for turn in given]
    assert places == sorted(places)


def test_without_that_the_same_turns_are_refused_or_lost():
    given = turns("system", "user", "system", "assistant", "user")
    with pytest.raises(InvalidPrompt):
        template("turns").render(given)
    assert "text 2" not in template("first system only").render(given)


def test_what_a_template_takes_stays_as_it_came():
    given = turns("system", "system", "user", "user", "assistant", "tool", "system", "user")
    assert fitted(given, turn_rules(template("chatml"))) == given


def test_parts_of_joined_messages_stay_parts():
    image = {"type": "image", "image": b"pixels"}
    given = [{"role": "user", "content": [image]}, {"role": "user", "content": "and this?"}]
    (joined,) = fitted(given, turn_rules(template("turns")))
    assert joined["content"] == [image, {"type": "text", "text": "and this?"}]
