"""The format of a model is found in what its template prints."""

import re
from pathlib import Path

import pytest
from call_templates import CALLS, template

from penstock.answer.formats import FORMATS, REASONINGS
from penstock.answer.notations import MarkedCall, PythonCall, XmlCall
from penstock.answer.probe import TemplateForms, probe
from penstock.errors import InvalidPrompt
from penstock.prompt.render import ChatTemplate

HEAD = """{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}"""
TURNS = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}</>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
HERMES = """
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""


def probed(call, head=HEAD, turns=TURNS):
    template = ChatTemplate(head + turns.replace("CALL", call), special_tokens={})
    return probe(template.render, template.source)


def named(forms):
    return forms.calls and forms.calls.name


def test_the_call_that_a_template_prints_is_read_back():
    forms = probed(HERMES)
    assert (forms.shows_tools, named(forms), forms.takes_arguments_as_text) == (True, "hermes", False)
    bare = '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    assert named(probed(bare)) == "llama-json"


def test_every_format_has_a_template_here():
    assert sorted(CALLS) == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_of_a_family_is_known_by_what_it_prints(name):
    printed = template(CALLS[name])
    assert named(probe(printed.render, printed.source)) == name


def test_a_call_that_is_printed_and_cannot_be_read_is_of_no_format():
    assert named(probed("<tool_call>!{{ call.function.name }}</tool_call>")) is None


def test_arguments_that_a_template_joins_as_text():
    forms = probed(HERMES.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"))
    assert (named(forms), forms.takes_arguments_as_text) == ("hermes", True)


def test_a_template_that_only_announces_its_calls():
    assert named(probed("", head=HEAD + "Write <tool_call>{...}</tool_call>.")) == "hermes"


def test_a_template_without_calls_or_without_tools():
    assert named(probed("")) is None
    assert not probed("", head="").shows_tools


def test_a_template_that_refuses_everything():
    def refuse(*_, **__):
        raise InvalidPrompt("no")

    assert probe(refuse) == TemplateForms()


@pytest.mark.parametrize("turns", [TURNS.replace("<assistant>{%", "<assistant><think>\n{%"), "{# </think> #}" + TURNS])
def test_reasoning_is_found_in_the_prompt_or_in_the_template(turns):
    forms = probed(HERMES, turns=turns)
    assert forms.reasoning is not None
    assert forms.reasoning.name == "think"
    assert forms.answer_format("...<think>\n", None).is_reasoning_open
    assert not forms.answer_format("...<think>\n\n</think>\n\n", None).is_reasoning_open
    assert forms.answer_format(forms.prompt, None).is_reasoning_open == ("<think>" in turns)
    assert forms.answer_format("", None).calls is None
    assert forms.answer_format("", {}).calls is not None


def test_the_reference_has_a_row_for_every_format_and_names_every_reasoning():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "server.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \|.*\| its schema( in part)? \|$", page, flags=re.MULTILINE)
    in_part = XmlCall | MarkedCall | PythonCall
    assert rows == [(name, " in part" if isinstance(row.notation, in_part) else "") for name, row in FORMATS.items()]
    assert all(f"`{name}`" in page for name in [*REASONINGS, "none"])
