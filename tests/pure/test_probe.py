"""The format of a model is found in what its template prints."""

import pytest

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
    assert forms.answer_format("", None).calls is None
    assert forms.answer_format("", {}).calls is not None
