"""`FORMATS` and `REASONINGS`: how models mark calls and reasoning. A model's format is a row, chosen by `probe`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from penstock.answer.notations import JsonCall, JsonOrNamed, MarkedCall, NamedJson, Notation, PythonCall, XmlCall


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Says where calls stand in an answer. White space around them is part of none."""

    name: str
    notation: Notation
    openings: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()  # the same, but they are part of the call
    bare_start: str = ""  # a call without an opening may begin an answer, with one of these characters
    prefixes: tuple[str, ...] = ()  # between an opening and a call
    suffixes: tuple[str, ...] = ()  # behind a call
    separators: tuple[str, ...] = ()  # between a call and another that has no opening
    inner: tuple[str, ...] = ()  # markers within a call
    written: tuple[str, str, str] | None = None  # a call around its name and its arguments; None: elements
    id_length: int | None = None  # of the ids that templates of such models take; None: any

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openings, *self.starts, *self.prefixes, *self.suffixes, *self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    name: str
    opening: str
    closing: str
    is_anywhere: bool = False  # it may come behind a text too, because its markers are no text
    ignored: tuple[str, ...] = ()  # markers around texts, which say nothing
    answer_start: str = ""  # written before an answer that does without

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *self.ignored)


def _named(header: str) -> NamedJson:
    return NamedJson(header=re.compile(header.replace("NAME", r"(?P<name>[\w.-]+)"), flags=re.ASCII))


_JSON = JsonCall()
_SEPARATED: dict[str, Any] = {"prefixes": ("[",), "separators": (",",)}
_MISTRAL = JsonOrNamed(header=_named(r"NAME(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*").header)
_HARMONY = r"NAME\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>\s*"
_KIMI = r"(?P<id>(?:functions\.)?NAME(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
# fmt: off
_QWEN = XmlCall(
    name=("<function=", ">"), key=("<parameter=", ">"), value=("", "</parameter>"), end="</function>", padding="\n")
_GLM = XmlCall(
    name=("", ""), key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), end="</tool_call>")
_MINIMAX = XmlCall(
    name=('<invoke name="', '">'), key=('<parameter name="', '">'), value=("", "</parameter>"), end="</invoke>")
_DSML = XmlCall(
    name=('<｜DSML｜invoke name="', '">'), key=('<｜DSML｜parameter name="', '">'), value=("", "</｜DSML｜parameter>"),
    end="</｜DSML｜invoke>", type_mark='" string="')
_CALLS = (
    CallFormat(
        name="hermes", notation=_JSON, openings=("<tool_call>",), suffixes=("</tool_call>",),
        written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")),
    CallFormat(
        name="qwen-xml", notation=_QWEN, openings=("<tool_call>", "<seed:tool_call>"), starts=("<function=",),
        suffixes=("</tool_call>", "</seed:tool_call>")),
    CallFormat(name="glm", notation=_GLM, openings=("<tool_call>",), inner=("<arg_key>", "<arg_value>")),
    CallFormat(
        name="minimax", notation=_MINIMAX, openings=("<minimax:tool_call>",), starts=("<invoke name=",),
        suffixes=("</minimax:tool_call>",)),
    CallFormat(
        name="deepseek-dsml", notation=_DSML, openings=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        starts=("<｜DSML｜invoke name=",), suffixes=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        inner=("｜DSML｜",)),
    CallFormat(
        name="mistral", notation=_JSON, openings=("[TOOL_CALLS]",), suffixes=("]",), id_length=9, **_SEPARATED,
        written=('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]")),
    CallFormat(
        name="mistral-args", notation=_MISTRAL, openings=("[TOOL_CALLS]",), suffixes=("]",), id_length=9, **_SEPARATED,
        inner=("[ARGS]", "[CALL_ID]"), written=("[TOOL_CALLS]", "[ARGS]", "")),
    CallFormat(
        name="deepseek-v3", notation=_named(r"function<｜tool▁sep｜>NAME\s*```json\s*"),
        openings=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), prefixes=("<｜tool▁call▁begin｜>",),
        suffixes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), inner=("<｜tool▁sep｜>",),
        written=("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
                 "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
    CallFormat(
        name="deepseek-v3.1", notation=_named(r"NAME<｜tool▁sep｜>\s*"),
        openings=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), prefixes=("<｜tool▁call▁begin｜>",),
        suffixes=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), inner=("<｜tool▁sep｜>",),
        written=("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
                 "<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
    CallFormat(
        name="kimi-k2", notation=_named(_KIMI), openings=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        prefixes=("<|tool_call_begin|>",), suffixes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        inner=("<|tool_call_argument_begin|>",),
        written=("<|tool_calls_section_begin|><|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>",
                 "<|tool_call_end|><|tool_calls_section_end|>")),
    CallFormat(
        name="harmony", notation=_named(_HARMONY), openings=("to=functions.", "<|channel|>analysis to=functions."),
        suffixes=("<|call|>", "<|end|>"), inner=("<|channel|>", "<|constrain|>", "<|message|>"),
        written=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "")),
    CallFormat(
        name="gemma4", notation=MarkedCall(quote='<|"|>'), openings=("<|tool_call>",), suffixes=("<tool_call|>",),
        inner=('<|"|>',), written=("<|tool_call>call:", "{", "}<tool_call|>")),
    CallFormat(
        name="functiongemma", notation=MarkedCall(quote="<escape>"), openings=("<start_function_call>",),
        suffixes=("<end_function_call>",), inner=("<escape>",),
        written=("<start_function_call>call:", "{", "}<end_function_call>")),
    CallFormat(
        name="granite", notation=_JSON, openings=("<|tool_call|>", "<function_call>"), **_SEPARATED,
        suffixes=("]", "<|/tool_call|>"), written=('<|tool_call|>[{"name": "', '", "arguments": ', "}]")),
    CallFormat(
        name="json-list", notation=_JSON, openings=("<tool_calls>", "<TOOLCALL>"), bare_start="[", **_SEPARATED,
        suffixes=("]", "</tool_calls>", "</TOOLCALL>"),
        written=('<tool_calls>[{"name": "', '", "arguments": ', "}]</tool_calls>")),
    CallFormat(
        name="internlm", notation=_JSON, openings=("<|action_start|><|plugin|>",), suffixes=("<|action_end|>",),
        written=('<|action_start|><|plugin|>\n{"name": "', '", "parameters": ', "}<|action_end|>")),
    CallFormat(
        name="cohere", notation=_JSON, openings=("<|START_ACTION|>",), suffixes=("]", "<|END_ACTION|>"), **_SEPARATED,
        written=('<|START_ACTION|>[\n    {"tool_name": "', '", "parameters": ', "}\n]<|END_ACTION|>")),
    CallFormat(
        name="function-tags", notation=_named(r"NAME>\s*"), openings=("<function=",), suffixes=("</function>",),
        written=("<function=", ">", "</function>")),
    CallFormat(
        name="apertus", notation=JsonCall(is_keyed=True), openings=("<|tools_prefix|>",), **_SEPARATED,
        suffixes=("]", "<|tools_suffix|>"), written=('<|tools_prefix|>[{"', '": ', "}]<|tools_suffix|>")),
    CallFormat(
        name="llama-json", notation=_JSON, openings=("<|python_tag|>",), bare_start="{", separators=(";",),
        written=('{"name": "', '", "parameters": ', "}")),
    CallFormat(
        name="pythonic", notation=PythonCall(), openings=("<|python_start|>", "<|tool_call_start|>", "```tool_code"),
        bare_start="[", **_SEPARATED, suffixes=("]", "<|python_end|>", "<|tool_call_end|>", "```"),
        written=("[", "(", ")]")),
)
_REASONINGS = (
    ReasoningFormat(name="think", opening="<think>", closing="</think>"),
    ReasoningFormat(
        name="harmony", opening="<|channel|>analysis<|message|>", closing="<|end|>", is_anywhere=True,
        ignored=("<|start|>assistant", "<|channel|>commentary", "<|channel|>final", "<|message|>", "<|call|>"),
        answer_start="<|channel|>final<|message|>"),
    ReasoningFormat(name="gemma4", opening="<|channel>thought\n", closing="<channel|>", is_anywhere=True),
    ReasoningFormat(name="mistral", opening="[THINK]", closing="[/THINK]"),
    ReasoningFormat(name="seed", opening="<seed:think>", closing="</seed:think>"),
    ReasoningFormat(name="cohere", opening="<|START_THINKING|>", closing="<|END_THINKING|>"),
    ReasoningFormat(name="apertus", opening="<|inner_prefix|>", closing="<|inner_suffix|>"),
    ReasoningFormat(name="kimi-vl", opening="◁think▷", closing="◁/think▷"),
)
# fmt: on
FORMATS = {row.name: row for row in _CALLS}  # in the order in which a template is tried
REASONINGS = {row.name: row for row in _REASONINGS}
