"""Arguments that are not JSON are held to their schema: what a grammar lets through fits, and what fits passes."""

import json
import random
from functools import cache
from math import inf

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grammar import accepts
from test_reader import read
from tokenizers import AddedToken

from penstock.answer.formats import FORMATS
from penstock.answer.grammar import GrammarWriter
from penstock.answer.python_values import KEY
from penstock.answer.reader import AnswerFormat
from penstock.answer.rules import Rules
from penstock.config import DEFAULT_MODEL
from penstock.engine.grammar_proof import compile_grammar
from penstock.models.files import resolve
from penstock.prompt.load import tokenizer_from_gguf

FAMILIES = [
    ("pythonic", ()),
    ("gemma4", ()),
    ("gemma4", ('<|"|>', "<|tool_call>", "<tool_call|>")),
    ("functiongemma", ("<escape>", "<start_function_call>", "<end_function_call>")),
    ("deepseek-dsml", ()),
    ("deepseek-dsml", ("｜DSML｜",)),
]
TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "under": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["name"],
    "additionalProperties": False,
}


@cache
def vocabulary_with(markers):
    """A tokenizer whose special tokens they are."""
    backend = tokenizer_from_gguf(resolve(DEFAULT_MODEL).gguf.metadata).backend
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    special = {marker: backend.token_to_id(marker) for marker in markers}
    return backend, special, llguidance.LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size())


def fits(value, schema, root):
    """Whether a value matches a schema, of the keywords that are used here."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema and not any(fits(value, one, root) for one in schema["anyOf"]):
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    named = schema.get("type", list(TYPES))
    types = [named] if isinstance(named, str) else named
    if not any(isinstance(value, TYPES[one]) and (not isinstance(value, bool) or one == "boolean") for one in types):
        return False
    if not any(type(value) is type(one) and value == one for one in schema.get("enum", [value])):
        return False
    if is_number and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return False
    if is_number and value <= schema.get("exclusiveMinimum", -inf):
        return False
    if isinstance(value, list):
        num = len(value)
        return schema.get("minItems", 0) <= num <= schema.get("maxItems", num) and all(
            fits(one, schema.get("items", {}), root) for one in value
        )
    if isinstance(value, dict):
        given, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        return all(name in value for name in schema.get("required", ())) and all(
            fits(one, given[name], root) if name in given else others is not False and fits(one, others, root)
            for name, one in value.items()
        )
    return True


def objects(inner):
    def made(properties, given):
        required = [name for name, is_required in zip(properties, given, strict=False) if is_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    names = st.sampled_from(["a", "ab", "B", "user-id", "class", "été", "x.y", "a b", 'c"', "d'e"])
    return st.builds(made, st.dictionaries(names, inner, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))


BOUNDS = st.fixed_dictionaries(
    {}, optional={"minimum": st.integers(-20, 20), "maximum": st.integers(21, 300), "exclusiveMinimum": st.just(-3.5)}
)
CHOICES = st.lists(
    st.sampled_from(["", "a", "ab", 'x "y"', "it's", "\\", "é\n", "true", "3", 3, -1.5, True, False, None]), min_size=1
)
LEAVES = st.one_of(
    st.sampled_from([{"type": "string"}, {"type": "boolean"}, {"type": "null"}, {}, {"$ref": "#/$defs/tree"}]),
    st.builds(lambda bounds: {"type": "integer", **bounds}, BOUNDS),
    st.builds(lambda bounds: {"type": "number", **bounds}, BOUNDS),
    st.builds(lambda choices: {"enum": choices}, CHOICES),
    st.builds(lambda choice: {"const": choice, "enum": [choice]}, st.sampled_from(["b c", 7, None])),
    st.lists(st.sampled_from(sorted(TYPES)), min_size=1, unique=True).map(lambda types: {"type": types}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        inner.map(lambda one: {"type": "object", "additionalProperties": one}),
        st.builds(lambda one, low: {"type": "array", "items": one, "minItems": low}, inner, st.integers(0, 3)),
        st.builds(lambda one, low: {"type": "array", "items": one, "maxItems": low}, inner, st.integers(0, 3)),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=6,
)
ROOTS = objects(SCHEMAS).map(lambda one: one | {"$defs": {"tree": TREE}})


def test_a_text_before_a_token_ends_with_it_and_is_not_cut_by_its_letters():
    vocabulary = vocabulary_with(("｜DSML｜",))
    rules = Rules(vocabulary[1])
    grammar = rules.written(rules.up_to("</｜DSML｜a>"))
    assert accepts(vocabulary, grammar, "x</y></｜DSML｜a>")
    assert not accepts(vocabulary, grammar, "x｜DSML｜a>")
    spelled = Rules({}).up_to("</｜DSML｜a>")
    assert spelled == "part_0"


LOOPS = {
    "itself": {"$ref": "#/$defs/itself"},
    "one": {"anyOf": [{"$ref": "#/$defs/one"}, {"type": "integer"}, {"$ref": "#/$defs/one"}]},
    "all": {"allOf": [{"$ref": "#/$defs/all"}, {"$ref": "#/$defs/all"}]},
    "many": {"properties": {"a": {"oneOf": [{"$ref": "#/$defs/many", "title": str(n)} for n in range(9)]}}},
}
BEYOND = [
    *(True, False, None, 3, [], {"type": "weird"}, {"type": 3}, {"type": []}, {"items": [{}]}, {"properties": []}),
    *({"$ref": one} for one in (*(f"#/$defs/{name}" for name in LOOPS), "#", "#/nowhere", "else", 3)),
    *({"anyOf": one} for one in ([], {}, [False], [{}], [{"type": "null"}, 3])),
    *({"enum": one} for one in ([], 3, [[1], {"a": 2}], [1, [2]])),
    *({"type": "integer", "enum": ["a"]}, {"const": {"a": [1, None]}}, {"required": "a"}, {"required": [1, "a"]}),
    *(
        {"type": "string", **one}
        for one in ({"pattern": "(?=a)b"}, {"pattern": "(a{1000}){1000}"}, {"format": "weird"})
    ),
    *({"type": "string", "maxLength": 10**9}, {"not": {"type": "null"}}, {"if": {}, "then": {}}),
    *({"type": "integer", "minimum": one, "maximum": 3} for one in (5, 3, 1e400, "a", True, -(10**400))),
    *({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "number", "exclusiveMinimum": True}),
    *({"type": "number", "minimum": 0, "maximum": one} for one in (0, 1e-7, 0.1)),
    *({"type": "number", "multipleOf": 0.1}, {"type": "integer", "multipleOf": 1_000_003}),
    *({"type": "array", "minItems": low, "maxItems": high} for low in (-5, 0, 2, 10**6) for high in (-3, 0, 1, 2.5)),
    *({"type": "array", "uniqueItems": True}, {"prefixItems": [{"type": "integer"}], "items": False}),
    *({"type": "object", **one} for one in ({"minProperties": 1}, {"patternProperties": {"^a": {}}})),
    {"type": "object", "properties": {"a": False, 'b"\n': {}, "": {}, "x" * 300: {}}, "required": ["a", ""]},
]


@pytest.mark.parametrize("name", ["pythonic", "gemma4", "functiongemma", "deepseek-dsml"])
def test_no_schema_is_refused_for_what_cannot_be_held(name):
    guide = vocabulary_with(())[2]
    for schema in BEYOND:
        properties = {"x": schema, "y": {"type": "array", "items": schema}}
        root = {"type": "object", "properties": properties, "required": ["x"], "$defs": LOOPS}
        compile_grammar(guide, GrammarWriter({}).call(FORMATS[name], {"f": root}))


def test_what_is_said_in_several_places_is_joined():
    parts = [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema = {"properties": {"x": {"allOf": parts}}, "required": ["x"], "$defs": {"base": base}}
    grammar = GrammarWriter({}).call(FORMATS["pythonic"], {"f": schema})
    assert accepts(vocabulary_with(()), grammar, "[f(x={'a': 1, 'b': None})]")
    for wrong in ("{'a': 1}", "{'b': None}", "{'a': None, 'b': None}"):
        assert not accepts(vocabulary_with(()), grammar, f"[f(x={wrong})]")


def test_a_schema_that_holds_itself_ends_where_no_rule_is_left():
    deep = {"type": "string"}
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    for name in ("pythonic", "gemma4", "deepseek-dsml"):
        schemas = {"f": {"properties": {"a": deep}}, "g": {"properties": {f"p{n}": {"const": n} for n in range(5000)}}}
        compile_grammar(vocabulary_with(())[2], GrammarWriter({}).call(FORMATS[name], schemas))


# --- what is let through ---

QUOTE = '<|"|>'
ENDS = {"gemma4": QUOTE, "functiongemma": "<escape>", "deepseek-dsml": "</｜DSML｜parameter>", "pythonic": "'"}
CLOSING = ['"', "}", "]", ")", "0", "null", "\n"]
OPENING = [", ", ": ", ",", "[", "{", "a", "b c", "true", "False", "-1", ".5", "e3", "\\", "é", "</", "<", "name"]
PIECES = [*ENDS.values(), *CLOSING, *OPENING]
MAX_STEPS = 300


def walked(name, vocabulary, grammar, seed):
    """A text of allowed tokens, chosen by chance; from some place on by what they end. None: it took too long."""
    backend, _, tokenizer = vocabulary
    chance, written = random.Random(seed), []
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    encoded = {piece: backend.encode(piece, add_special_tokens=False).ids for piece in PIECES}
    for step in range(MAX_STEPS):
        if matcher.is_accepting():
            return backend.decode(written, skip_special_tokens=False)
        some = chance.sample(PIECES, 8) if step < 40 else chance.sample([ENDS[name], *CLOSING], 1 + len(CLOSING))
        pieces = [encoded[piece] for piece in some]
        ids = next((ids for ids in pieces if ids and matcher.validate_tokens(ids) == len(ids)), None)
        if ids is None:
            mask = matcher.compute_bitmask()
            some = [at for at, byte in enumerate(mask) if byte]
            assert some, (grammar, backend.decode(written, skip_special_tokens=False))
            chosen = chance.choice(some)
            allowed = [8 * chosen + bit for bit in range(8) if mask[chosen] >> bit & 1]
            ids = [chance.choice(allowed)]
        assert matcher.consume_tokens(ids)
        written += ids
    return None


@pytest.mark.parametrize(("name", "markers"), FAMILIES)
@settings(max_examples=40)
@given(schema=ROOTS, seed=st.integers(0, 2**32))
def test_what_a_grammar_lets_through_fits_the_schema(name, markers, schema, seed):
    _, special, _ = vocabulary_with(markers)
    grammar = GrammarWriter(special).call(FORMATS[name], {"f": schema})
    for each in range(3):
        text = walked(name, vocabulary_with(markers), grammar, seed + each)
        if text is None:
            continue
        form = AnswerFormat(calls=FORMATS[name], schemas={"f": schema})
        written, _, num_unread = read(form, text)
        assert num_unread == 0, text
        (call,) = written.calls
        arguments = json.loads(call.arguments)
        held = nameable(schema, name)
        assert fits(arguments, held, schema), (text, arguments)


def nameable(schema, name):
    """A schema without the arguments that no call in Python can name."""
    if name != "pythonic":
        return schema
    kept = {key: one for key, one in schema["properties"].items() if KEY.fullmatch(key)}
    return schema | {"properties": kept, "required": [key for key in schema["required"] if key in kept]}


# --- what fits passes ---

WRITTEN = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.sampled_from("\n\t \\'\""), max_size=9
)


MARKS = [*(marker for _, markers in FAMILIES for marker in markers), *ENDS.values()]
WRITTEN = WRITTEN.filter(lambda text: not any(mark in text for mark in MARKS if len(mark) > 1))


def values(schema, root, depth=0):
    """Values that match a schema, as long as it names what may be."""
    if "$ref" in schema:
        return values(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, depth)
    if "anyOf" in schema:
        return st.one_of([values(one, root, depth) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low, high = schema.get("minimum", -9), schema.get("maximum", 400)
    bounds = {"min_value": max(low, -3), "max_value": high}
    others = schema.get("additionalProperties", {})
    kinds = {
        "string": WRITTEN,
        "integer": st.integers(**bounds),
        "number": st.integers(**bounds) | st.decimals(**bounds, places=2).map(float),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    properties, required = schema.get("properties", {}), schema.get("required", ())
    fewest = schema.get("minItems", 0)
    most = max(fewest, min(2, schema.get("maxItems", 2))) if depth < 5 else fewest
    inner = values(schema.get("items", {}), root, depth + 1) if most else st.none()
    kinds["array"] = st.lists(inner, min_size=fewest, max_size=most)
    further = values(others, root, depth + 1) if others is not False and depth < 5 else st.none()
    given = {name: values(one, root, depth + 1) for name, one in properties.items() if name in required or depth < 5}
    asked = {name: given.pop(name) for name in required}
    kinds["object"] = (
        st.fixed_dictionaries(asked, optional=given).map(
            lambda found: {name: found[name] for name in properties if name in found}
        )
        if properties or others is False
        else st.dictionaries(st.sampled_from(["k", "l_1"]), further, max_size=2 if depth < 5 else 0)
    )
    named = schema.get("type", list(kinds))
    return st.one_of([kinds[one] for one in ([named] if isinstance(named, str) else named) if one in kinds])


def by_gemma(value, quote):
    """As the templates of Gemma print it."""
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, list):
        return f"[{','.join(by_gemma(one, quote) for one in value)}]"
    if not isinstance(value, dict):
        return json.dumps(value)
    bare = {name if KEY.fullmatch(name) else quote + name + quote: name for name in sorted(value, key=str.lower)}
    return "{" + ",".join(f"{key}:{by_gemma(value[name], quote)}" for key, name in bare.items()) + "}"


def by_deepseek(key, value):
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    mark = "true" if isinstance(value, str) else "false"
    return f'<｜DSML｜parameter name="{key}" string="{mark}">{written}</｜DSML｜parameter>\n'


def printed(name, arguments):
    match name:
        case "pythonic":
            return f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
        case "gemma4":
            return f"<|tool_call>call:f{by_gemma(arguments, QUOTE)}<tool_call|>"
        case "functiongemma":
            return f"<start_function_call>call:f{by_gemma(arguments, '<escape>')}<end_function_call>"
    elements = "".join(by_deepseek(key, value) for key, value in arguments.items())
    calls = f'<｜DSML｜invoke name="f">\n{elements}</｜DSML｜invoke>\n'
    return f"<｜DSML｜function_calls>\n{calls}</｜DSML｜function_calls>"


@pytest.mark.parametrize(("name", "markers"), FAMILIES)
@settings(max_examples=40)
@given(schema=ROOTS, data=st.data())
def test_a_call_that_fits_its_schema_is_accepted_and_read_back(name, markers, schema, data):
    held = nameable(schema, name)
    arguments = data.draw(values(held, schema))
    assert fits(arguments, held, schema)
    vocabulary, text = vocabulary_with(markers), printed(name, arguments)
    grammar = GrammarWriter(vocabulary[1]).call(FORMATS[name], {"f": schema})
    assert accepts(vocabulary, grammar, text), (text, grammar)
    (call,) = read(AnswerFormat(calls=FORMATS[name], schemas={"f": schema}), text)[0].calls
    assert json.loads(call.arguments) == arguments
