"""Chat templates: rendered as models expect, bounded whatever they say, and split only where that is proven."""

from __future__ import annotations

import random
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.apart import Bounds
from penstock.errors import InvalidModelFile, InvalidPrompt, PenstockError
from penstock.prompt.render import ChatTemplate
from penstock.prompt.render_apart import TemplateApart

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
INSPECTING = """{%- for message in messages %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
MACRO = """{% macro body(content) %}[{{ content ~ '' }}]{% endmacro %}
{% for m in messages if m.content is defined and m.content %}
{% set x %}{{ body(m.content) }}{% endset %}{{ m.role }}{{ x }}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "inspecting": INSPECTING, "turns": TURNS, "macro": MACRO}

CHAT = [
    {"role": "user", "content": "What is a penstock?"},
    {"role": "assistant", "content": "A gate."},
    {"role": "user", "content": "Thanks.\n"},
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})


def with_content(content: str) -> list[dict[str, str]]:
    return [*CHAT[:2], {"role": "user", "content": content}]


def test_chatml_is_rendered_as_models_expect_it():
    assert template(CHATML).render(CHAT[:1]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is a penstock?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generation_prompt_is_left_out_when_not_wanted():
    assert template(CHATML).render(CHAT, add_generation_prompt=False).endswith("Thanks.\n<|im_end|>\n")


def test_special_tokens_and_variables_reach_the_template():
    rendered = template("{{ bos_token }}{{ eos_token }}{{ mode }}{{ tools is none }}").render(CHAT, mode="fast")
    assert rendered == "<bos><eos>fastTrue"


def test_json_keeps_unicode_and_html():
    rendered = template("{{ tools | tojson }}|{{ tools | tojson(indent=2) }}").render(CHAT, tools=[{"é": "<&>"}])
    assert rendered == '[{"é": "<&>"}]|[\n  {\n    "é": "<&>"\n  }\n]'


def test_blocks_are_trimmed_and_loops_can_break():
    source = "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.role }}\n{% endfor %}"
    assert template(source).render(CHAT) == "user\n"


def test_generation_blocks_are_printed():
    assert template("{% generation %}{{ messages[1].content }}{% endgeneration %}").render(CHAT) == "A gate."


def test_the_date_of_today_is_known(monkeypatch):
    class FixedDate(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 12, 31, 23, 59)

    monkeypatch.setattr("penstock.prompt.sandbox.datetime", FixedDate)
    assert template("{{ strftime_now('%d %b %Y') }}").render(CHAT) == "31 Dec 2031"


def test_a_refusal_of_the_template_carries_its_message():
    with pytest.raises(InvalidPrompt, match="roles must alternate"):
        template(TURNS).render([CHAT[1]])


def test_constants_are_printed_as_they_are():
    assert template("{{ 1 }}{{ 'a' | upper }}{{ [1, 'b'] }}{{ none }}").render(CHAT) == "1A[1, 'b']None"


def test_a_refusal_that_quotes_the_content_is_still_a_refusal():
    with pytest.raises(InvalidPrompt, match="no:"):
        template("{{ raise_exception('no: ' + messages[0].content) }}").split(CHAT, 0)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ a", "{% if x %}", "{{ x | nosuchfilter }}", "{% include 'x' ", "{{ 1 +"]
)
def test_a_broken_template_is_an_invalid_model_file(source):
    with pytest.raises(InvalidModelFile, match="does not compile"):
        template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ undefined.a.b }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_fails_is_an_invalid_prompt(source):
    with pytest.raises(InvalidPrompt, match="refused these messages"):
        template(source).render(CHAT)


DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = DOUBLED %}{% endfor %}{{ n.x }}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
KEPT = "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = [n.x, 'y' * 99999] %}{% endfor %}"
SEARCHED = "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = SEARCHED %}{% endfor %}"
LISTED = (
    "{% set x = [1] * 99999 %}{% set y = dict.fromkeys(range(9999)) %}"
    "{% for i in range(99999) %}{% set z = LISTED %}{% endfor %}"
)
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a list": "{% set x = [1] * 99 %}" + "{% for a in x %}" * 9 + "{% endfor %}" * 9,
    "much output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "macros that call twice": TWICE,
    "a long text": "{{ 'x' * 999999999999 }}",
    "a long list": "{{ [1] * 999999999999 }}",
    "doubling by +": DOUBLING.replace("DOUBLED", "n.x + n.x"),
    "doubling by ~": DOUBLING.replace("DOUBLED", "n.x ~ n.x"),
    "doubling by join": DOUBLING.replace("DOUBLED", "[n.x, n.x] | join"),
    "doubling by join with a name": DOUBLING.replace("DOUBLED", "'abc' | join(d=n.x)"),
    "doubling by the method join": DOUBLING.replace("DOUBLED", "n.x.join([n.x, n.x])"),
    "doubling by replace": DOUBLING.replace("DOUBLED", "n.x.replace('a', n.x)"),
    "doubling by the filter replace": DOUBLING.replace("DOUBLED", "n.x | replace(new=n.x, old='a')"),
    "doubling by %": DOUBLING.replace("DOUBLED", "'%s%s' % (n.x, n.x)"),
    "doubling by format": DOUBLING.replace("DOUBLED", "'{}{}'.format(n.x, n.x)"),
    "doubling by the filter format": DOUBLING.replace("DOUBLED", "'%s%s' | format(n.x, n.x)"),
    "shared lists, printed": DOUBLING.replace("DOUBLED", "[n.x, n.x]"),
    "shared lists, as JSON": DOUBLING.replace("DOUBLED", "[n.x, n.x]").replace("n.x }}", "n.x | tojson }}"),
    "shared lists, compared": DOUBLING.replace("DOUBLED", "[n.x, n.x]").replace("n.x }}", "n.x == n.x }}"),
    "a wide field": "{{ '%999999999d' % 1 }}",
    "a wide field by format": "{{ '{:>999999999}'.format(1) }}",
    "a wide field by argument": "{{ '{:>{}}'.format(1, 999999999) }}",
    "padding": "{{ 'x'.ljust(999999999) }}",
    "tabs": "{{ '\t'.expandtabs(999999999) }}",
    "an indent": "{{ 'x' | indent(999999999, first=True) }}",
    "indented JSON": "{{ [1] | tojson(indent=999999999) }}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "squaring": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a wide date": "{{ strftime_now('%999999999d') }}",
    "kept texts": KEPT,
    "nested tuples as a key": DOUBLING.replace("DOUBLED", "(n.x, n.x)").replace("n.x }}", "{n.x: 1} }}"),
    "nested tuples, looked up": DOUBLING.replace("DOUBLED", "(n.x, n.x)").replace("n.x }}", "{'a': 1}[n.x] }}"),
    "nested tuples as a key of dict": DOUBLING.replace("DOUBLED", "(n.x, n.x)").replace(
        "n.x }}", "dict([[n.x, 1]]) }}"
    ),
    "nested tuples as a name": DOUBLING.replace("DOUBLED", "(n.x, n.x)").replace("n.x }}", "namespace([[n.x, 1]]) }}"),
    "nested tuples, unique": DOUBLING.replace("DOUBLED", "(n.x, n.x)").replace("n.x }}", "[n.x]|unique|list }}"),
    "searched by find": SEARCHED.replace("SEARCHED", "x.find('b')"),
    "searched by count": SEARCHED.replace("SEARCHED", "x.count('ab')"),
    "searched by isalpha": SEARCHED.replace("SEARCHED", "x.isalpha()"),
    "searched by in": SEARCHED.replace("SEARCHED", "'b' in x"),
    "searched by ==": SEARCHED.replace("SEARCHED", "x == x[:-1] + 'b'"),
    "searched by a test": SEARCHED.replace("SEARCHED", "x is upper"),
    "searched by a filter": SEARCHED.replace("SEARCHED", "x | wordcount"),
    "a list, counted": LISTED.replace("LISTED", "x.count(2)"),
    "a list, copied": LISTED.replace("LISTED", "x.copy()"),
    "a range, counted": LISTED.replace("LISTED", "range(99999).count(0.5)"),
    "a dict, copied": LISTED.replace("LISTED", "y.copy()"),
    "keys that hash alike": "{% set n = 2 ** 61 - 1 %}{{ {" + ", ".join(f"{i} * n: 0" for i in range(1, 800)) + "} }}",
    "numbers that hash alike": "{% set n = namespace(x=[]) %}{% for i in range(3000) %}"
    "{% set n.x = n.x + [i * (2 ** 61 - 1)] %}{% endfor %}{{ n.x | unique | list }}",
    "sums": "{{ ([[1] * 9999] * 9999) | sum(start=[]) }}",
}


# The limits of the sandbox, in its words: what is refused so has cost no more than they allow.
LIMITS = (
    r"takes more than [\d,]+ steps|builds or reads more than [\d,]+ characters|fields of 100 or more characters"
    r"|a number of 2\*\*61 - 1 or more|is not offered|is the most|a date with padding"
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_by_a_limit(name):
    with pytest.raises(InvalidPrompt, match=LIMITS):
        template(HOSTILE[name]).render(CHAT)


@pytest.mark.parametrize(
    ("call", "expected"),
    [("m.content.replace('a', 'b')", "b"), ("'-'.join([m.content, 'b'])", "a-b"), ("'{}b'.format(m.content)", "ab")],
)
def test_text_methods_can_be_called_beside_variables_of_a_loop(call, expected):
    source = "{% for m in messages %}{% set c = CALL %}{{ c }}{% endfor %}".replace("CALL", call)
    assert template(source).render([{"role": "user", "content": "a"}]) == expected


def test_long_conversations_and_long_contents_stay_within_the_bounds():
    assert len(template(CHATML).render(CHAT * 3_000)) > 300_000
    assert len(template(TRIMMING).render(with_content("word " * 1_000_000))) > 4_999_000


def test_a_long_content_may_be_looked_through_many_times():
    source = "{% for m in messages %}" + "{{ m.content.find('b') ~ m.content.isalpha() ~ ('b' in m.content) }}" * 20
    assert template(source + "{% endfor %}").render(with_content("a" * 3_000_000))


@pytest.mark.parametrize("name", ["chatml", "turns", "macro"])
@given(content=st.text(min_size=1))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_split_rendering_is_the_whole_rendering(name, content):
    chat = template(TEMPLATES[name])
    parts = chat.split(CHAT, 2)
    assert parts is not None
    assert parts[0] + content + parts[1] == chat.render(with_content(content))


@pytest.mark.parametrize("name", ["trimming", "inspecting"])
def test_a_template_that_changes_or_reads_the_content_is_not_split(name):
    assert template(TEMPLATES[name]).split(CHAT, 2) is None


def test_a_content_that_is_printed_twice_or_never_is_not_split():
    assert template("{{ messages[0].content }}{{ messages[0].content }}").split(CHAT, 0) is None
    assert template("{{ messages[1].content }}").split(CHAT, 0) is None


def test_splitting_leaves_the_messages_as_they_were():
    messages = [dict(message) for message in CHAT]
    template(CHATML).split(messages, 1)
    assert messages == CHAT


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


READS = lines("""
    content in 'abc'
    'a' in content
    content is in 'abc'
    content is eq 'a'
    content is lower
    content == 'a'
    content != 'a'
    'a' == content
    content < 'b'
    'b' > content
    content[0] == 'a'
    content[-1:]
    content.strip()
    content.startswith('a')
    'abc'.startswith(content)
    'abc'.replace(content, '')
    content.split('a')
    content.upper()
    {'a': 1}[content]
    {'a': 1}.get(content)
    messages[content]
    {content: 1}
    content is sameas 'a'
    'a%s' % content == 'ab'
    ('a%s' % (content,)).strip()
    '{}'.format(content) == 'a'
    (content ~ 'b').endswith('ab')
    ('b' + content).strip()
    [content].index('a')
    [content, 'b'] == ['a', 'b']
    content * 2 == 'aa'
    content.encode()
    content.isdigit()
    f(content).strip()
    loop.changed(content)
    'a' in [content]
    content in ['a']
    ''.join([content]) == 'a'
""")
FILTERS = lines("""
    trim
    upper
    lower
    length
    count
    list
    first
    last
    reverse
    int
    float
    tojson
    e
    escape
    safe
    title
    capitalize
    indent
    urlencode
    wordcount
    striptags
    replace('a','b')
    truncate(3)
    sort
    unique
    max
    min
    select('eq','a')
    join
    string|trim
    default('x')|trim
    attr('x')
    format('a')
    abs
    round
    sum
    dictsort
    groupby('a')
    map('upper')
    filesizeformat
""")
WRAPPED = lines("""
    messages|tojson
    messages|string
    messages|map(attribute='content')|join
    messages|map(attribute='content')|map('trim')|list
    messages|selectattr('content','eq','a')|list
    messages|groupby('content')|list
    messages|sort(attribute='content')
    messages|unique|list
    messages|rejectattr('content','in','abc')|list
    messages[0].values()|join
    messages[0].items()|list|tojson
    messages|sum(attribute='content',start='')
    messages|map(attribute='content')|max
    [content,'b']|join
    messages[0]|tojson
    messages[0]|dictsort(by='value')
    messages|map(attribute='content')|select('in','abc')|list
    messages[0].content|string|lower
""")


@pytest.mark.parametrize("expression", [*READS, *(f"content|{f}" for f in FILTERS), *WRAPPED])
def test_every_way_to_look_at_the_content_is_noticed(expression):
    macro = "{% macro f(x) %}{{ x }}{% endmacro %}"
    looking = "{% for _ in [1] %}{% set seen = (" + expression + ") %}{% endfor %}"
    source = macro + "{% set content = messages[0].content %}" + looking + "{{ content }}"
    try:
        parts = template(source).split(CHAT, 0)
    except InvalidPrompt:
        return
    assert parts is None


HARMLESS = lines("""
    content is string
    content is mapping
    content is none
    content is defined
    content is iterable
    content is number
    content
    not content
    content and 1
    content or 'x'
    content|default('x')
    content|string
    content ~ 'b'
    'b' + content
    [content]|length
    [content]|first
    {'a': content}
    namespace(a=content).a
    f(content)
    'a' in messages[0]
    messages|selectattr('role', 'eq', 'user')|list
    messages|map(attribute='role')|join
    messages[0].get('content')
    messages|length
""")


@pytest.mark.parametrize("expression", HARMLESS)
def test_looking_at_anything_else_leaves_the_split_proven(expression):
    source = "{% macro f(x) %}{{ x }}{% endmacro %}{% set content = messages[0].content %}{% set seen = ("
    assert template(source + expression + ") %}{{ content }}").split(CHAT, 0) == ("", "")


def _mutated(rng: random.Random, source: str) -> str:
    at = rng.randrange(len(source))
    kind = rng.randrange(4)
    if kind == 0:
        return source[:at]
    if kind == 1:
        return source[:at] + source[at + rng.randint(1, 12) :]
    if kind == 2:
        other = rng.choice(list(TEMPLATES.values()))
        start = rng.randrange(len(other))
        return source[:at] + other[start : start + rng.randint(1, 60)] + source[at:]
    return source[:at] + rng.choice("{}%|'\"()[].~+*-\\\n\x00é0 ") + source[at + 1 :]


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
def test_truncated_and_mutated_templates_raise_only_our_errors():
    rng = random.Random(11)
    outcomes = set()
    for _ in range(700):
        source = rng.choice(list(TEMPLATES.values()))
        for _ in range(rng.randint(1, 3)):
            source = _mutated(rng, source) or "x"
        try:
            chat = template(source)
            rendered, parts = chat.render(CHAT), chat.split(CHAT, 2)
            outcomes.add("rendered")
        except PenstockError as error:
            outcomes.add(type(error).__name__)
            continue
        if parts is not None:
            assert parts[0] + CHAT[2]["content"] + parts[1] == rendered
            outcomes.add("split")
    assert outcomes == {"rendered", "split", "InvalidModelFile", "InvalidPrompt"}


def test_a_template_has_the_knobs_that_it_reads_and_nobody_else_sets():
    source = (
        "{{ bos_token }}{% set own = 1 %}{% for m in messages %}{{ m.content }}{{ own }}{% endfor %}"
        "{{ strftime_now('%d') }}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ effort | default('low') }}{% endif %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert ChatTemplate(source, special_tokens={"bos_token": "<s>"}).knobs == {"enable_thinking", "effort"}


@pytest.fixture
def apart():
    made = []

    def make(source, **bounds):
        chat = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
        made.append(TemplateApart(chat, **bounds))
        return made[-1], chat

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("source", [CHATML, TRIMMING, INSPECTING, "{{ messages[9].content }}", "{{ known }}"])
def test_a_template_in_a_process_of_its_own_gives_the_same_and_refuses_alike(source, apart):
    there, here = apart(source)

    def outcome(give):
        try:
            return give()
        except PenstockError as error:
            return type(error), str(error)

    assert outcome(lambda: there.render(CHAT, known={"a": 1})) == outcome(lambda: here.render(CHAT, known={"a": 1}))
    assert outcome(lambda: there.split(CHAT, 2)) == outcome(lambda: here.split(CHAT, 2))
    assert (there.knobs, there.source) == (here.knobs, here.source)


def test_a_template_that_takes_too_long_is_ended_and_the_next_messages_are_rendered(apart):
    source = "{% if messages|length > 1 %}{% for i in range(90000) %}{{ i * i }}{% endfor %}{% endif %}fine"
    there, _ = apart(source, bounds=Bounds(cpu_s=0.02, max_bytes=1 << 30))
    with pytest.raises(InvalidPrompt, match=r"more than 0.02 s of processor time.*another template"):
        there.render(CHAT)
    assert there.render(CHAT[:1]) == "fine"
