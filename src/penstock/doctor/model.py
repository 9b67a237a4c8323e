"""A model before it is loaded: its files, its tokenizer, its lane, its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config import GB, EngineConfig, written_budget
from penstock.doctor.diagnosis import Diagnosis, Severity, good, note, refused
from penstock.doctor.examination import CpuKernels, Examination, examine
from penstock.engine.kept_folder import folder_of, listed
from penstock.engine.planning import plan_model
from penstock.engine.prompts import chat_template, load_tokenizer
from penstock.errors import PenstockError
from penstock.lanes.native_text_kind import NATIVE_TEXT
from penstock.models.adapter import read_adapter
from penstock.models.files import ModelFiles, resolve
from penstock.models.merging import AdaptedWeights
from penstock.models.spec import decoder_spec
from penstock.models.weights import open_weights
from penstock.prompt.tokens import Tokenizer
from penstock.proof.verdict import Finding

NO_COMPILER = "apt-get install gcc (or put another C compiler on the PATH)"


@dataclass(slots=True, kw_only=True)
class ModelFindings:
    """What is known of a model; None: something before it was in the way."""

    diagnoses: list[Diagnosis] = field(default_factory=list)
    examination: Examination | None = None
    can_load: bool = False  # its weights are here, and nothing known is in the way


def diagnose_model(model: str, config: EngineConfig, *, rerun: bool = False) -> ModelFindings:
    """Every part that can be looked at is, so that all that is to be mended is known at once."""
    found = ModelFindings()

    def look(topic: str, part: Callable[[], Iterable[Diagnosis]]) -> None:
        try:
            found.diagnoses += part()
        except PenstockError as error:
            found.diagnoses.append(refused(topic, error))

    def lane() -> Iterator[Diagnosis]:
        found.examination = examine(model, config, rerun=rerun)
        return _lane(found.examination)

    try:
        config_files = resolve(model, weights=False)
    except PenstockError as error:
        found.diagnoses.append(refused("files", error))
        return found
    is_local = config_files.gguf is not None or Path(model).expanduser().is_dir()
    look("lane", lane)
    look("files", lambda: [_files(resolve(model)) if is_local else _remote_files(model)])
    if config.adapter is not None and is_local:
        look("adapter", lambda: _adapter(resolve(model), config.adapter or "", found.examination))
    if is_local:
        look("tokenizer", lambda: _tokenizer(config_files))
    if config.cache_dir is not None:
        look("cache folder", lambda: [_folder(config)])
    if found.examination is not None:
        look("budget", lambda: _fit(model, config))
    is_refused = any(diagnosis.status is Severity.PROBLEM for diagnosis in found.diagnoses)
    found.can_load = is_local and not is_refused
    return found


def _remote_files(model: str) -> Diagnosis:
    finding = "the config is here; the weights are fetched from the hub when the model is first loaded"
    remedy = (
        f"penstock models download {model}, and pass the folder that it prints, for the checks of weights and speed"
    )
    return note("files", finding, remedy)


def _files(files: ModelFiles) -> Diagnosis:
    weights = open_weights(files)
    num_bytes = sum(path.stat().st_size for path in files.weight_files)
    names = "1 weight file" if len(files.weight_files) == 1 else f"{len(files.weight_files)} weight files"
    stored = f"{len(weights.names)} tensors, most of them {weights.quantization}"
    return good("files", f"config and {names}, {num_bytes / GB:.2f} GB: {stored}; every header is sound")


def _folder(config: EngineConfig) -> Diagnosis:
    path = folder_of(config)
    kept = listed(path) if (path / "kv").is_dir() else None
    held = "nothing yet" if kept is None else f"{kept.bytes / GB:.2f} GB of {len(kept.models)} models"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        remedy = "Give --cache-dir a folder that can be written"
        return note("cache folder", f"{path} holds {held} and cannot be written", remedy)
    return good("cache folder", f"{path} holds {held}, {config.disk_bytes / GB:.2f} GB at most")


def _adapter(files: ModelFiles, place: str, seen: Examination | None) -> Iterator[Diagnosis]:
    adapter = read_adapter(place)
    if (
        seen is not None and seen.lane.id == NATIVE_TEXT.id
    ):  # what another lane calls its weights shows when it is loaded
        AdaptedWeights.of(open_weights(files), adapter, decoder_spec(files.config))
    changed = f"{len(adapter.low_rank)} low rank changes and {len(adapter.replaced)} tensors in place of the model's"
    yield good("adapter", f"{adapter.name}, made for {adapter.base}: {changed}, merged into the weights")


def _tokenizer(files: ModelFiles) -> Iterator[Diagnosis]:
    parts = load_tokenizer(files)
    streaming = Tokenizer(parts.backend).streaming
    if streaming.cuttable:
        yield good("tokenizer", f"texts are encoded as they arrive; {streaming.reason}")
    else:
        remedy = "Nothing is wrong: a text is encoded before its first chunk. Split texts of many megabytes yourself"
        yield note("tokenizer", streaming.reason, remedy)
    template = chat_template(parts)
    if template is None:
        remedy = "Take the version of the model for chats, or give texts that it shall continue"
        yield note("template", "the model has no chat template: a text is continued as it is", remedy)


def _lane(found: Examination) -> Iterator[Diagnosis]:
    lane, verdict = found.lane, found.verdict
    if lane.reads_whole:
        remedy = "Raise --memory for long prompts; a newer transformers may read it in chunks (--rerun checks again)"
        yield note("lane", f"{lane.id}: prompts are read whole; {lane.reason}", remedy)
    else:
        yield good("lane", f"{lane.id}: {lane.reason}")
    if lane.why_text_only:
        yield note(
            "images", f"only text is read: {lane.why_text_only}", "Mend that for images; --text-only is for text"
        )
    if verdict is not None and not lane.reads_whole:
        kept = "as an earlier check found" if found.was_kept else "checked just now"
        yield good("exactness", f"{kept}; {verdict.reason}")
        yield from _part("pictures", verdict.picture)
        yield from _part("weights", verdict.real_weights)
    if found.kernels is not None:
        yield from _kernels(found.kernels, found.dtype)


def _part(name: str, finding: Finding | None) -> Iterator[Diagnosis]:
    if finding is not None and finding.exact:
        yield good("exactness", f"{name}: {finding.reason}")


def _kernels(kernels: CpuKernels, dtype: str) -> Iterator[Diagnosis]:
    if kernels.compiled:
        yield good("attention", f"C kernels, {kernels.reason}")
        return
    remedies = {
        "switched off": "Leave cpu_kernels out of the settings (PENSTOCK_CPU_KERNELS, penstock.toml)",
        "there is no C compiler": NO_COMPILER,
        "cannot compile": "Install a newer gcc or clang, or name one in CC",
        "cannot be kept": "Make the cache folder writable, or name another in XDG_CACHE_HOME",
    }
    remedy = next((way for words, way in remedies.items() if words in kernels.reason), None)
    if remedy is not None:
        finding = f"torch's kernels, which read at about half the speed; {kernels.reason}"
        yield note("attention", finding, remedy)
    elif dtype == "bfloat16":  # another processor or system: torch is what there is
        yield good("attention", f"torch's kernels; {kernels.reason}")


def _fit(model: str, config: EngineConfig) -> Iterator[Diagnosis]:
    first = plan_model(model, 1, config)
    if first.streaming is not None:
        remedy = "Free memory or raise --memory, so that layers stay; a GGUF in fewer bits reads less for each step"
        yield note("layers", first.streaming.summary(), remedy)
    yield _longest(model, max(1, first.max_context - 1), config)


def _longest(model: str, longest: int, config: EngineConfig) -> Diagnosis:
    """Plans the longest prompt that the model takes, and asks for more only where a budget was given."""
    prompt = plan_model(model, longest, config).prompt
    peak, budget = prompt.peak_bytes / GB, prompt.budget_bytes / GB
    if prompt.fits:
        finding = f"a prompt of {prompt.prompt_tokens:,} tokens takes {peak:.2f} GB; the budget is {budget:.2f}"
        return good("budget", finding)
    if config.memory is None:  # all that the machine has
        longest_takes = f"the {prompt.prompt_tokens:,} tokens that the model could read at most take {peak:.2f}"
        return good("budget", f"{budget:.2f} GB for prompts; {longest_takes}")
    finding = f"{budget:.2f} GB hold no prompt of {prompt.prompt_tokens:,} tokens, all that the model could read"
    remedy = f"Raise --memory to {written_budget(prompt.peak_bytes)} for those; shorter ones run"
    return note("budget", finding, remedy)
