"""A chat template of our own for every format of calls, which prints them as models of that family write them."""

from penstock.prompt.render import ChatTemplate

TURNS = """{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}

{% endif %}{% for message in messages %}<|turn|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{% set calls = message.tool_calls %}CALLS{% endif %}<|over|>
{% endfor %}{% if add_generation_prompt %}<|turn|>assistant
{% endif %}"""
EACH = "{% for call in calls %}{% set f = call.function %}"
ARGUMENTS = "{% for key, value in f.arguments.items() %}"
BARE = "{{ value if value is string else value | tojson }}"


def listed(before: str, after: str, name: str = "name", arguments: str = "arguments") -> str:
    call = '{"' + name + '": "{{ f.name }}", "' + arguments + '": {{ f.arguments | tojson }}}'
    return f"{before}[{EACH}{call}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]{after}"


def marked(before: str, quote: str, after: str) -> str:
    value = "{{ quote + value + quote if value is string else value | tojson }}{{ ',' if not loop.last }}"
    values = "{{ '{' }}" + ARGUMENTS + "{{ key }}:" + value + "{% endfor %}{{ '}' }}"
    return f"{{% set quote = '{quote}' %}}{EACH}{before}call:{{{{ f.name }}}}{values}{after}{{% endfor %}}"


def dsml(name: str) -> str:
    return f"｜DSML｜{name}"


# By the name of the format, what a template prints of the calls of a turn.
CALLS = {
    "hermes": EACH
    + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "qwen-xml": f"{EACH}\n<tool_call>\n<function={{{{ f.name }}}}>\n{ARGUMENTS}<parameter={{{{ key }}}}>\n{BARE}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "glm": f"{EACH}\n<tool_call>{{{{ f.name }}}}\n{ARGUMENTS}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{BARE}"
    "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "minimax": f'\n<minimax:tool_call>\n{EACH}<invoke name="{{{{ f.name }}}}">\n{ARGUMENTS}<parameter '
    f'name="{{{{ key }}}}">{BARE}</parameter>\n{{% endfor %}}</invoke>\n{{% endfor %}}</minimax:tool_call>',
    "deepseek-dsml": f'\n<{dsml("function_calls")}>\n{EACH}<{dsml("invoke")} name="{{{{ f.name }}}}">\n{ARGUMENTS}'
    f'<{dsml("parameter")} name="{{{{ key }}}}" string="{{{{ "true" if value is string else "false" }}}}">{BARE}'
    f"</{dsml('parameter')}>\n{{% endfor %}}</{dsml('invoke')}>\n{{% endfor %}}</{dsml('function_calls')}>",
    "mistral": listed("[TOOL_CALLS] ", ""),
    "mistral-args": EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "deepseek-v3": f"<｜tool▁calls▁begin｜>{EACH}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{{{ f.name }}}}\n```json\n"
    "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek-v3.1": f"<｜tool▁calls▁begin｜>{EACH}<｜tool▁call▁begin｜>{{{{ f.name }}}}<｜tool▁sep｜>"
    "{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "kimi-k2": f"<|tool_calls_section_begin|>{EACH}<|tool_call_begin|>{{{{ call.id }}}}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "harmony": f"<|channel|>analysis<|message|>Hm.<|end|>{EACH}<|start|>assistant<|channel|>commentary "
    "to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}",
    "gemma4": marked("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": marked("<start_function_call>", "<escape>", "<end_function_call>\n"),
    "granite": listed("<|tool_call|>", ""),
    "json-list": listed("<tool_calls>", "</tool_calls>"),
    "internlm": EACH
    + '<|action_start|><|plugin|>\n{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|action_end|>\n'
    "{% endfor %}",
    "cohere": listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    "function-tags": EACH + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}",
    "apertus": "<|tools_prefix|>["
    + EACH
    + '{"{{ f.name }}": {{ f.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}]<|tools_suffix|>',
    "llama-json": EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{{ "; " if not loop.last }}'
    "{% endfor %}",
    "pythonic": f"[{EACH}{{{{ f.name }}}}({ARGUMENTS}{{{{ key }}}}={{{{ value | tojson }}}}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]",
}


def template(calls: str, turns: str = TURNS) -> ChatTemplate:
    return ChatTemplate(turns.replace("CALLS", calls), special_tokens={})
