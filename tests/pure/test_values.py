"""Values as models write them become JSON, piece by piece."""

import json

import pytest

from penstock.answer.python_values import python_arguments
from penstock.answer.scanner import Broken, Scanner, collected
from penstock.answer.values import marked_value, typed, types_of


def read(make, text):
    """What a generator reads of a text that arrives letter by letter."""
    scan = Scanner()
    letters, reading = iter(text), collected(make(scan))
    while True:
        try:
            next(reading)
        except StopIteration as stopped:
            return json.loads(stopped.value)
        letter = next(letters, None)
        scan.is_ended = letter is None
        scan.text += letter or ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1, b='x')", {"a": 1, "b": "x"}),
        (
            "a=[1, -2.5, True, None,], b={'k': (1, 2), 3: \"y\"})",
            {"a": [1, -2.5, True, None], "b": {"k": [1, 2], "3": "y"}},
        ),
        (r"a='it\'s\n\x41\u00e9 \d', b='')", {"a": "it's\nAé \\d", "b": ""}),
        ('a="""two\n"lines" """)', {"a": 'two\n"lines" '}),
        ("user-id=1, a.b='x')", {"user-id": 1, "a.b": "x"}),
        (")", {}),
    ],
)
def test_python_arguments(text, value):
    assert read(python_arguments, text) == value


@pytest.mark.parametrize(
    "text", ["a=f())", "1=2)", "a=", "a='x", "a=[[", "a=" + "[" * 200, "a='\\ud800')", "a 1)", "a=1 b=2)"]
)
def test_what_is_no_python_value_is_refused(text):
    with pytest.raises(Broken):
        read(python_arguments, text)


def test_marked_values():
    text = '{a:<|"|>x "y"\n<|"|>,b:[1,true,<|"|>z<|"|>],c:{d:null,<|"|>e f<|"|>:word}}'
    expected = {"a": 'x "y"\n', "b": [1, True, "z"], "c": {"d": None, "e f": "word"}}
    assert read(lambda scan: marked_value(scan, '<|"|>'), text) == expected


ROOT = {"$defs": {"thing": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": ["integer", "null"]}, 5),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"),
        ("{'a': 1}", {"type": "object"}, {"a": 1}),
        ('["a"]', {"type": "array"}, ["a"]),
        ("{'a'", {"type": "object"}, "{'a'"),
        ("NaN", {"type": "number"}, "NaN"),
        ('{"a": 1}', {"$ref": "#/$defs/thing"}, {"a": 1}),
        ("null", {"anyOf": [{"$ref": "#/$defs/thing"}, {"type": "null"}]}, None),
        ("5", {"$ref": "#/$defs/loop"}, "5"),
        ("5", {"$ref": "#/elsewhere/0"}, "5"),
        ("5", {"enum": [5, 6]}, 5),
        ("5", {"const": "5"}, "5"),
        ("5", {}, "5"),
        ("5", True, "5"),
        ("1e999", {"type": "number"}, "1e999"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)
def test_a_bare_value_has_the_type_that_its_schema_asks_for(text, schema, value):
    assert json.loads(typed(text, types_of(schema, ROOT))) == value


def test_types_of_definitions_that_name_each_other_are_found_once():
    names = [f"d{index}" for index in range(60)]
    following = [{"$ref": f"#/$defs/{name}"} for name in [*names[1:], "d0"]]
    root = {
        "$defs": {name: {"anyOf": [one, one, {"type": "null"}]} for name, one in zip(names, following, strict=True)}
    }
    assert types_of({"$ref": "#/$defs/d0"}, root) == {"null"}
