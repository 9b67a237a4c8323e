"""Fills the generated parts of the reference when the site is built.

A page holds a marker such as `<!-- generated: commands -->`. Its text is made from the code, so that both agree.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import typer
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from pydantic import BaseModel

import penstock
from penstock import errors
from penstock.bench.ledger import BenchRun
from penstock.bench.samples import Measure, ProbeResult
from penstock.cli.main import app
from penstock.cli.report import PlanReport, RunReport
from penstock.config import CONFIG_FILE, EngineConfig
from penstock.lanes.lane import LaneFacts
from penstock.models.families import FAMILIES
from penstock.models.gguf_architectures import ARCHITECTURES
from penstock.models.media_spec import NATIVE_MEDIA, SEE_SPANS
from penstock.models.quantization import FLOATS, LANES, LAYOUTS, REGION, matrix_bytes
from penstock.request import Failed, Finished, Output, PrefillProgress, SamplingParams, Token
from penstock.trace.document import Trace
from penstock.trace.percentile import percentile

WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
MARKER = re.compile(r"<!-- generated: ([\w-]+) -->")
CHART = re.compile(r"<!-- chart: ([\w-]+): ([^>]+) -->")
IMAGES = Path(__file__).parent / "images"
MEASURED_FAMILIES = Path(__file__).parent / "reference" / "families.json"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return CHART.sub(_chart, MARKER.sub(lambda match: GENERATORS[match[1]](), markdown))


def _chart(match: re.Match[str]) -> str:
    """The picture that `penstock bench --plot` drew under that name, and its figures; nothing before one was drawn."""
    name, title = match.groups()
    measured = IMAGES / f"{name}.json"
    if not measured.exists():
        return ""
    run = BenchRun.model_validate_json(measured.read_text(encoding="utf-8"))
    versions = ", ".join(f"{library} {number}" for library, number in run.versions.items())
    source = f"Drawn by `{run.command} --plot docs/images` on {run.started_at[:10]} with {versions}."
    return f"![{title}](../images/{name}.png)\n\n{source}\n\n{_figures(run.probes[0])}"


def _figures(result: ProbeResult) -> str:
    """Medians along the probe's axis, or how long gaps are."""
    if gaps := [measure for measure in result.measures if measure.quantity == "gap_s"]:
        rows = [
            (gap.variant, *(f"{percentile(gap.samples, share) * 1e3:,.0f} ms" for share in (0.5, 0.99, 1.0)))
            for gap in gaps
        ]
        return _table(("gaps", "median", "99 of 100 are shorter", "longest"), rows)
    places = sorted({measure.x or 0 for measure in result.measures})
    rows = []
    for variant, quantity in dict.fromkeys((m.variant, m.quantity) for m in result.measures):
        amounts = {m.x or 0: _amount(m) for m in result.series(variant, quantity)}
        rows.append((f"{variant}, {quantity.split('_')[0]}", *(amounts.get(place, "") for place in places)))
    return _table((result.axis or "", *(f"{place:,}" if place else "whole" for place in places)), rows)


def _amount(measure: Measure) -> str:
    return f"{measure.median / 1e6:,.0f} MB" if measure.unit == "bytes" else f"{measure.median:,.2f} s"


def commands() -> str:
    return "\n\n".join(_command(name, command) for name, command in _leaves())


def engine_settings() -> str:
    return _settings_table(EngineConfig, "environment", lambda field: f"PENSTOCK_{field.name.upper()}")


def sampling_settings() -> str:
    return _settings_table(SamplingParams, "type", lambda field: str(field.type))


def _settings_table(kind: type, column: str, cell: Callable[[dataclasses.Field[Any]], str]) -> str:
    """The settings of a class with the flag of each, and one column of their own."""
    flags = {parameter.name: parameter for _, command in reversed(_leaves()) for parameter in command.params}
    comments = _comments(kind)
    rows = []
    for field in dataclasses.fields(kind):
        flag = flags.get(field.name)
        spelling, text = (_spellings(flag)[-1], flag.help or "") if flag else ("", "")
        meaning = _meaning(text, comments.get(field.name, ""))
        rows.append((_code(field.name), _code(spelling), _code(cell(field)), _default(field.default), meaning))
    return _table(("setting", "flag", column, "default", "meaning"), rows)


def families() -> str:
    gguf_names: dict[str, list[str]] = {}
    for name, family in ARCHITECTURES.items():
        for kind in filter(None, (family.model_type, family.with_window.get("model_type"))):
            gguf_names.setdefault(kind, []).append(name)
    gguf_names |= {"mixtral": ["llama"], "ministral3": ["mistral3"]}  # told by other metadata
    rows = [
        (_code(name), ", ".join(map(_code, gguf_names.get(name, []))) or "not read", WHAT_IS_SPECIAL[name])
        for name in FAMILIES
    ]
    return _table(("`model_type` of a folder", "architecture of a GGUF file", "what is special"), rows)


def measured_families() -> str:
    """What tests/evidence/test_family_table.py found of tiny models, where the library can make one."""
    rows = [
        (
            _code(row["model_type"]),
            _code(row["lane"]),
            "yes" if row["applied"] else "no",
            f"{row['hit_tokens']} of {row['prompt_tokens']}",
            f"{row['kv_bytes_per_token']:,}",
            f"{row['cache_bytes_per_token']:,}" if row["cache_bytes_per_token"] else "its own",
        )
        for row in json.loads(MEASURED_FAMILIES.read_text(encoding="utf-8"))
        if row["lane"]
    ]
    head = (
        "`model_type`",
        "lane",
        "in chunks",
        "tokens of a second request that are not read",
        "bytes of a token",
        "in transformers",
    )
    return _table(head, rows)


def gguf_types() -> str:
    rows = []
    for kind, (block_items, block_bytes) in GGML_QUANT_SIZES.items():
        if kind in FLOATS or not _is_read(kind, block_bytes):
            continue
        layout = LAYOUTS.get(kind)
        held = f"{8 * matrix_bytes(kind, LANES, REGION) / LANES / REGION:.4g}" if layout else "16"
        on_a_cpu = "kept, and multiplied as codes" if layout else "expanded to bfloat16"
        rows.append((_code(kind.name), f"{8 * block_bytes / block_items:.4g}", held, on_a_cpu))
    return _table(("type", "bits of a value in the file", "in memory", "on a CPU"), rows)


def gguf_architectures() -> str:
    """Says which matrices of an architecture stay in their types: all of them, so that types need no column each."""
    rows = []
    for name, family in ARCHITECTURES.items():
        stems = set(family.names)
        has = {
            "attention and MLPs": True,
            "experts": "expert_count" in {*family.integers.values(), *family.reads} or name == "llama",
            "recurrent layers": bool(stems & {"ssm_out", "shortconv.in_proj"} and family.kinds),
            "inputs of layers": "inp_gate" in stems,
        }
        rows.append(
            (_code(name), _code(family.model_type), ", ".join(part for part, is_there in has.items() if is_there))
        )
    return _table(("architecture", "`model_type`", "kept in each of the types above"), rows)


def _is_read(kind: GGMLQuantizationType, block_bytes: int) -> bool:
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def image_families() -> str:
    sights = {kind: "span" if kind in SEE_SPANS else "causal" for kind in NATIVE_MEDIA}
    rows = [(_code(kind), IMAGE_TEXT_NAMES[kind], SIGHT[sight]) for kind, sight in sights.items()]
    return _table(("`model_type`", "models", "chunks end"), rows)


def fields_of(kind: type) -> Callable[[], str]:
    def table() -> str:
        comments = _comments(kind)
        rows = []
        for field in dataclasses.fields(kind):
            default = "required" if field.default is dataclasses.MISSING else _default(field.default)
            rows.append((_code(field.name), _code(str(field.type)), default, _meaning(comments.get(field.name, ""))))
        return _table(("field", "type", "default", "meaning"), rows)

    return table


def calls_of(kind: type, *names: str) -> Callable[[], str]:
    """The methods and properties of a class, as it declares them: those named, or all that are public."""

    def table() -> str:
        public = names or [name for name in vars(kind) if not name.startswith("_")]
        members = [(name, vars(kind)[name]) for name in public]
        return _table(("call", "what it does"), [_call(kind.__name__, *member) for member in members])

    return table


def functions(*names: str) -> Callable[[], str]:
    def table() -> str:
        return _table(
            ("call", "what it does"),
            [(_code(f"{name}{_arguments(value)}"), _first_sentences(value)) for name, value in _public(names)],
        )

    return table


def error_kinds() -> str:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and kind.__module__ == errors.__name__]
    rows = [(_code(kind.__name__), _code(str(kind.status)), _first_sentences(kind)) for kind in kinds]
    return _table(("error", "HTTP status", "when"), rows)


def metrics() -> str:
    from penstock.server.metrics import Metrics

    rows = []
    for family in Metrics().registry.collect():
        name = family.name.removeprefix("penstock:") + ("_total" if family.type == "counter" else "")
        rows.append((_code(name), family.type, _meaning(family.documentation)))
    return _table(("metric", "kind", "meaning"), rows)


def document_of(kind: type[BaseModel]) -> Callable[[], str]:
    """A JSON document and the objects inside it, each in a table."""

    def tables() -> str:
        parts = [_document_table(kind)]
        for inner in _inner_documents(kind)[1:]:
            parts += [f"### {inner.__name__}", inspect.cleandoc(inner.__doc__ or ""), _document_table(inner)]
        return "\n\n".join(filter(None, parts))

    return tables


# Of each family; one that is not here stops the build.
WHAT_IS_SPECIAL = {
    "llama": "The plain form; SmolLM2 and many others. Linear, llama3 and yarn scaling.",
    "mistral": "Sliding windows.",
    "qwen2": "Biases on queries, keys and values; windows by layer.",
    "qwen3": "Norms on queries and keys.",
    "qwen2_5_vl_text": "The decoder of Qwen2.5-VL: rotary positions on three axes.",
    "qwen3_vl_text": "The decoder of Qwen3-VL: the same, interleaved, with features added in its first layers.",
    "qwen3_vl_moe_text": "The same with a mixture of experts.",
    "smollm3": "Layers without rotary positions.",
    "phi3": "Fused projections, longrope, partial rotary.",
    "olmo2": "Norms on outputs instead of inputs.",
    "qwen2_moe": "Mixture of experts beside a shared one.",
    "qwen3_moe": "Mixture of experts.",
    "qwen3_next": "Hybrid: gated delta rule and attention; mixture of experts.",
    "qwen3_5_text": "Hybrid: gated delta rule and attention.",
    "qwen3_5_moe_text": "The same with a mixture of experts.",
    "mixtral": "Mixture of experts.",
    "gpt_oss": "Mixture of experts, attention sinks; experts in MXFP4 stay so on a GPU and are expanded on a CPU.",
    "bamba": "Hybrid: Mamba 2 and attention.",
    "granitemoehybrid": "Hybrid: Mamba 2 and attention, with or without experts.",
    "gemma2": "Softcaps on attention scores and logits.",
    "gemma3_text": "Local and global layers with rotary tables of their own.",
    "gemma4_text": "Heads and keys by layer, inputs of layers, experts beside an MLP; not where text sees ahead.",
    "gemma4_unified_text": "The same without inputs of layers and experts (12B).",
    "ministral3": "Queries grow with their position; the text part of Ministral 3 and Devstral 2.",
    "olmo3": "The same as Olmo 2 with windows; only full layers have the scaled rotary table.",
    "granite": "Four multipliers: of embeddings, attention, what a layer adds, and logits.",
    "seed_oss": "Biases on queries, keys and values.",
    "ernie4_5": "Rotated pairs lie side by side.",
    "exaone4": "Norms on outputs, queries and keys; layers without windows have no positions.",
    "cohere": "Attention and MLP beside each other, layer norms without a bias; not with norms on queries and keys.",
    "cohere2": "The same with windows; layers without one have no positions.",
    "glm": "Half of a head is rotated, in pairs that lie side by side.",
    "glm4": "The same with norms on outputs too.",
    "hunyuan_v1_dense": "Queries and keys are normed after they are rotated; rotary scaling by alpha.",
    "arcee": "MLPs without a gate: squared ReLU.",
    "apertus": "MLPs without a gate: xIELU, whose shape is learnt.",
    "nemotron": "MLPs without a gate, layer norms with a bias, partial rotary.",
    "stablelm": "Layer norms with a bias, partial rotary; not with parallel residuals or norms on queries and keys.",
    "starcoder2": "MLPs without a gate, layer norms with a bias.",
    "lfm2": "Hybrid: gated short convolutions, whose state is two columns, and attention.",
    "lfm2_moe": "The same with a mixture of experts, each with a score of its own.",
    "glm4_moe": "GLM-4.5 to 4.7: a mixture, each expert with a score of its own; dense first layers, partial rotary.",
    "dots1": "The same with norms on queries and keys and all of a head rotated.",
    "deepseek_v2": "DeepSeek V2, on processors: pages keep compressed keys and values; a softmax chooses experts.",
    "deepseek_v3": "DeepSeek V3, R1 and V3.1, Moonlight, on processors: the same, each expert with a score of its own.",
    "glm4_moe_lite": "GLM-4.7-Flash, on processors: the same.",
    "minimax_m2": "Mixture of experts, each with a score of its own; norms on all queries and keys, partial rotary.",
    "ernie4_5_moe": "Ernie 4.5 with a mixture of experts, chosen by corrected scores, beside shared ones.",
    "nemotron_h": "Hybrid: each layer is Mamba 2, attention, an MLP or a mixture; not with latent experts.",
    "falcon_h1": "Hybrid: Mamba 2 and attention beside each other in every layer, with multipliers.",
}

# What image-text models are called, by the model_type of their config.
IMAGE_TEXT_NAMES = {
    "llava": "LLaVA",
    "llava_onevision": "LLaVA-OneVision",
    "smolvlm": "SmolVLM",
    "idefics3": "Idefics3",
    "mistral3": "Mistral Small 3, Ministral 3, Devstral 2",
    "internvl": "InternVL",
    "lfm2_vl": "LFM2-VL with a dense LFM2",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4 (of E2B and E4B at any token: their images do not see themselves)",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL with a mixture of experts",
    "qwen3_5": "Qwen3.5, Qwen3.6 and Qwen3.8",
    "qwen3_5_moe": "Qwen3.5 and Qwen3.6 with a mixture of experts",
}
SIGHT = {"causal": "at any token", "span": "at any token outside images"}

VOCABULARY = (
    "ChunkedPrefillConfig",
    "PrefillPriority",
    "PrefillChunk",
    "create_prefill_chunks",
    "PrefillScheduler",
    "Prefill",
    "YieldToDecode",
    "StartDecode",
    "ModelShape",
    "MemoryModel",
    "peak_memory_estimate",
    "PrefillMemoryEstimate",
)

GENERATORS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "engine-settings": engine_settings,
    "settings-file": lambda: _code(CONFIG_FILE),
    "families": families,
    "image-families": image_families,
    "measured-families": measured_families,
    "gguf-types": gguf_types,
    "gguf-architectures": gguf_architectures,
    "sampling-settings": sampling_settings,
    "prefill-progress": fields_of(PrefillProgress),
    "token": fields_of(Token),
    "finished": fields_of(Finished),
    "failed": fields_of(Failed),
    "output": fields_of(Output),
    "engine": calls_of(penstock.Engine),
    "async-engine": calls_of(penstock.AsyncEngine, "load", "stream", "generate", "call", "close"),
    "attach": functions("attach", "detach", "selfcheck"),
    "vocabulary": lambda: _table(
        ("name", "what it is"), [(_code(name), _first_sentences(value)) for name, value in _public(VOCABULARY)]
    ),
    "errors": error_kinds,
    "metrics": metrics,
    "run-document": document_of(RunReport),
    "plan-document": lambda: _document_table(PlanReport),
    "trace-document": document_of(Trace),
}


def _command(name: str, command: Any) -> str:
    parameters = inspect.signature(inspect.unwrap(command.callback), eval_str=True).parameters
    hints = {name: parameter.annotation for name, parameter in parameters.items()}
    rows = [
        (
            ", ".join(map(_code, _spellings(parameter))),
            _kind(hints[parameter.name]) + (", repeatable" if parameter.multiple else ""),
            _default(parameter.default),
            _meaning(parameter.help or ""),
        )
        for parameter in sorted(command.params, key=lambda parameter: parameter.param_type_name)
    ]
    return f"## penstock {name}\n\n{command.help}\n\n" + _table(("flag", "value", "default", "meaning"), rows)


def _public(names: Iterable[str]) -> list[tuple[str, Any]]:
    return [(name, getattr(penstock, name)) for name in names]


def _call(owner: str, name: str, member: Any) -> tuple[str, str]:
    if isinstance(member, property):
        return _code(f".{name}"), _first_sentences(member)
    if isinstance(member, classmethod):
        return _code(f"{owner}.{name}{_arguments(member.__func__)}"), _first_sentences(member.__func__)
    return _code(f".{name}{_arguments(member)}"), _first_sentences(member)


def _arguments(function: Any) -> str:
    """Names and defaults, without types: `(prompt, *, images=(), **sampling)`."""
    parameters = inspect.signature(function).parameters.values()
    plain = [part.replace(annotation=part.empty) for part in parameters if part.name not in ("self", "cls")]
    return str(inspect.Signature(plain))


def _first_sentences(value: Any) -> str:
    """The docstring up to its first empty line. What is public has one."""
    text = inspect.getdoc(value)
    if not text:
        raise ValueError(f"{value!r} is in the reference and has no docstring")
    return _cell(text.split("\n\n")[0])


def _inner_documents(kind: type[BaseModel]) -> list[type[BaseModel]]:
    """The document and the objects inside it, in the order in which they appear."""
    found = [kind]
    for outer in found:
        for hint in typing.get_type_hints(outer).values():
            found += [part for part in _parts(hint) if _is_document(part) and part not in found]
    return found


def _document_table(kind: type[BaseModel]) -> str:
    comments = _comments(
        LaneFacts if kind.__name__ == "TraceLane" else kind
    )  # a lane's document has the fields of its facts
    hints = typing.get_type_hints(kind)
    rows = [
        (_code(name), _words(hints[name]), _meaning(comments.get(name, "")).replace("None", "null"))
        for name in kind.model_fields
    ]
    return _table(("field", "type", "meaning"), rows)


def _is_document(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, BaseModel)


def _parts(hint: Any) -> list[Any]:
    """The hint and everything in its brackets."""
    return [hint, *(inner for part in typing.get_args(hint) for inner in _parts(part))]


def _words(hint: Any) -> str:
    """`tuple[Chunk, ...] | None` is a list of Chunk, or null."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        is_optional = types.NoneType in inner
        named = " or ".join(_words(part) for part in inner if part is not types.NoneType)
        return f"{named} or null" if is_optional else named
    if origin is typing.Literal:
        return " or ".join(_code(str(value)) for value in inner)
    if origin in (list, tuple):
        distinct = dict.fromkeys(_words(part) for part in inner if part is not Ellipsis)
        return f"list of {' and '.join(distinct)}"
    if origin is dict:
        return f"object of {_words(inner[1])}"
    if _is_document(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return WORDS[hint]


def _spellings(parameter: Any) -> list[str]:
    is_argument = parameter.param_type_name == "argument"
    return [parameter.metavar or parameter.name.upper()] if is_argument else sorted(parameter.opts, key=len)


def _leaves() -> list[tuple[str, Any]]:
    """Every command that does something, with its whole name: `bench schedule`, not `bench`."""
    found: list[tuple[str, Any]] = []
    pending = [("", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop(0)
        inner = getattr(command, "commands", None)
        if inner is None:
            found.append((name, command))
        else:
            pending += [(f"{name} {child}".strip(), value) for child, value in inner.items()]
    return found


def _kind(hint: Any) -> str:
    """`str | None`, annotated or not, is text."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is list:
        hint = typing.get_args(hint)[0]
    return {str: "text", int: "whole number", float: "number", bool: "switch", Path: "file"}[hint]


def _comments(kind: type) -> dict[str, str]:
    """The comment behind each field, as it stands in the source."""
    found = re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(kind), flags=re.MULTILINE)
    return dict(found)


def _meaning(*texts: str) -> str:
    """The texts as sentences, none of them twice. Help texts are sentences already, comments are not."""
    sentences = [text if text.endswith(".") else f"{text[:1].upper()}{text[1:]}." for text in texts if text]
    return _cell(" ".join(dict.fromkeys(sentences)))


def _default(value: object) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return _code(str(value))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""  # within backticks a bar ends no cell


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
