"""What a grammar accepts is what the reader reads, and what a schema forbids is not accepted."""

import json

import llguidance
import pytest
from test_reader import answer_of, calls_of, form_of

from penstock.answer.formats import FORMATS, REASONINGS
from penstock.answer.grammar import GrammarWriter
from penstock.answer.notations import MarkedCall, PythonCall, XmlCall
from penstock.answer.reader import AnswerFormat
from penstock.config import DEFAULT_MODEL
from penstock.models.files import resolve
from penstock.prompt.load import tokenizer_from_gguf

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": SCHEMA, "clock": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.fixture(scope="module")
def vocabulary():
    backend = tokenizer_from_gguf(resolve(DEFAULT_MODEL).gguf.metadata).backend
    special = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
    return backend, special, llguidance.LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size())


def accepts(vocabulary, grammar, text):
    backend, _, tokenizer = vocabulary
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(name, called, arguments):
    """A call as the grammar of its family spells it."""
    row = FORMATS[name]
    if row.written is not None and not isinstance(row.notation, MarkedCall | PythonCall):
        before, between, after = row.written
        return before + called + between + json.dumps(arguments) + after
    return answer_of(name, [(called, arguments)], "").strip()


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_fits_its_schema_and_is_read_back(name, vocabulary):
    grammar = GrammarWriter({}).call(FORMATS[name], SCHEMAS)
    for called, arguments in [("weather", {"city": "Bonn", "days": 3}), ("clock", {})]:
        text = written(name, called, arguments)
        assert accepts(vocabulary, grammar, text), text
        assert calls_of(form_of(name), text)[2] == [(called, arguments)]
    for arguments in ({"days": 3}, {"city": "Bonn", "days": "three"}, {"city": "a", "unit": "miles"}, {"x": 1}):
        assert not accepts(vocabulary, grammar, written(name, "weather", arguments))
    assert not accepts(vocabulary, grammar, written(name, "rain", {"city": "Bonn"}))
    assert not accepts(vocabulary, grammar, "It rains.")


def test_markers_that_are_special_tokens_stand_as_tokens(vocabulary):
    _, special, _ = vocabulary
    grammar = GrammarWriter({"<think>": 7} | special).json({}, "<think><|im_start|>x")
    assert f'<[7]> <[{special["<|im_start|>"]}]> "x"' in grammar


def test_reasoning_that_is_open_comes_first(vocabulary):
    grammar = GrammarWriter({}, REASONINGS["think"]).json({"type": "integer"})
    assert accepts(vocabulary, grammar, "Hm, 2 < 3.</think>\n\n3")
    assert not accepts(vocabulary, grammar, "Hm.</think>\n\nthree")
    assert not accepts(vocabulary, grammar, "3")


def test_a_schema_may_refer_to_its_definitions(vocabulary):
    schema = {"properties": {"a": {"$ref": "#/$defs/kind"}}, "required": ["a"], "$defs": {"kind": {"type": "integer"}}}
    grammar = GrammarWriter({}).call(FORMATS["qwen-xml"], {"weather": schema})
    text = written("qwen-xml", "weather", {"a": 3})
    assert accepts(vocabulary, grammar, text)
    assert calls_of(AnswerFormat(calls=FORMATS["qwen-xml"], schemas={"weather": schema}), text)[2] == [
        ("weather", {"a": 3})
    ]
    assert not accepts(vocabulary, grammar, written("qwen-xml", "weather", {"a": "b"}))


UNIONS = {
    "properties": {
        "city": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"anyOf": [{"enum": ["celsius", "kelvin"]}, {"type": "null"}]},
        "days": {"enum": ["all", 3]},
        "fixed": {"const": "yes"},
    },
}
ELEMENTS = [name for name, row in FORMATS.items() if isinstance(row.notation, XmlCall)]


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Bonn", "unit": "kelvin", "days": "all", "fixed": "yes"},
        {"city": None, "unit": None, "days": 3},
        {"city": "a </b> c"},
    ],
)
def test_a_string_that_may_be_something_else_is_written_without_quotes(name, vocabulary, arguments):
    grammar = GrammarWriter({}).call(FORMATS[name], {"weather": UNIONS})
    text = written(name, "weather", arguments)
    assert accepts(vocabulary, grammar, text), text
    form = AnswerFormat(calls=FORMATS[name], schemas={"weather": UNIONS})
    assert calls_of(form, text)[2] == [("weather", arguments)]


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("arguments", [{"unit": "miles"}, {"unit": '"kelvin"'}, {"days": 4}, {"fixed": "no"}])
def test_choices_among_strings_and_others_are_held(name, vocabulary, arguments):
    grammar = GrammarWriter({}).call(FORMATS[name], {"weather": UNIONS})
    assert not accepts(vocabulary, grammar, written(name, "weather", arguments))


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_text_ends_where_the_reader_ends_it(name, vocabulary):
    grammar = GrammarWriter({}).call(FORMATS[name], SCHEMAS)
    end = FORMATS[name].notation.value[1]
    assert not accepts(vocabulary, grammar, written(name, "weather", {"city": f"a{end} b"}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_function_that_names_no_arguments_takes_any(name, vocabulary):
    grammar = GrammarWriter({}).call(FORMATS[name], {"weather": {"type": "object"}})
    for arguments in ({}, {"city": "Bonn"}, {"a": "b", "c_d": "e"}):
        assert accepts(vocabulary, grammar, written(name, "weather", arguments)), arguments
