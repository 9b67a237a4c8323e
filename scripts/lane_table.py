"""Prints what the transformers lanes make of each architecture: lane, self-check, logits by chunk size, tokens.

Tiny random models in float32 are saved and loaded as users do, and held to transformers' own generate on the whole
prompt: text, text with two images, or a source. A row is right when its logits are at most 1e-4 from those and its
tokens are the same: it is exact, or read whole and says so. Otherwise the script ends with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import transformers
from logit_recorder import LogitRecorder
from rich.console import Console
from rich.table import Table
from tiny_generic import MUST_SHOW, save_causal_model
from tiny_models import prompt
from tiny_seq2seq import SEQ2SEQ, save_tiny_seq2seq
from tiny_vision_models import (
    KINDS,
    TEXT,
    TensorProcessor,
    pictures,
    plain_inputs,
    save_tiny_vision_model,
)
from transformers.utils import logging as library

from penstock.engine.engine import Engine
from penstock.lanes.lane import GENERIC_MULTIMODAL, GENERIC_TEXT
from penstock.lanes.media_check import check_picture
from penstock.lanes.media_processor import MediaProcessor
from penstock.request import Output

TOLERANCE = 1e-4
CHUNK_SIZES = (1, 3, 7, 64)
NUM_GENERATED = 32
PROMPT = prompt(150)
NUM_TOGETHER = 8
SETTINGS = {"dtype": "float32", "memory": "4GiB", "threads": 1}
END = 2  # what the tiny models end with, and never do here


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model as its lane is tried with it: how it is saved, what plain transformers is given, how it is asked."""

    name: str
    save: Callable[[Path], Any]
    plain_inputs: Callable[[Any], Mapping[str, torch.Tensor]]
    ask: Callable[[Engine], Output]
    prepare: Callable[[Engine, Any], str]  # (engine, plain model) -> the self-check's words
    lane: str | None = None  # forced


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    lane: str
    verdict: str
    difference_by_chunk_size: dict[int, float]
    is_greedy_equal: bool
    is_read_whole: bool
    is_said: bool  # that the prompt was read in chunks, or was not

    @property
    def is_right(self) -> bool:
        is_exact = max(self.difference_by_chunk_size.values()) <= TOLERANCE
        return is_exact and self.is_greedy_equal and self.is_said


# --- three kinds of models ----------------------------------------------------------------------------------


def text_subject(name: str) -> Subject:
    """Through the transformers lane, also where there is a native decoder; so are images."""
    return Subject(
        name=name,
        save=lambda folder: save_causal_model(MUST_SHOW[name](), folder),
        plain_inputs=lambda model: {"input_ids": torch.tensor([PROMPT])},
        ask=lambda engine: engine.generate(PROMPT, max_tokens=NUM_GENERATED, ignore_eos=True),
        prepare=lambda engine, model: engine.lane.reason.split("; ")[-1],
        lane=GENERIC_TEXT,
    )


def image_subject(name: str) -> Subject:
    def prepare(engine: Engine, model: Any) -> str:
        """Where a processor needs torchvision, the tensors that it would make stand in for it."""
        assert engine.model.media is not None
        lane = engine.model.media.lane
        if lane.processor is None:
            lane.processor = MediaProcessor(TensorProcessor(plain_inputs(name, model)))
        picture = check_picture(lane)
        checked = lane.facts.reason.split("asked for by --lane; ")[-1].split(",")[0]
        return f"{checked}, {picture.reason if picture else 'no picture'}"

    return Subject(
        name=f"{name} (images)",
        save=lambda folder: save_tiny_vision_model(name, folder),
        plain_inputs=lambda model: plain_inputs(name, model),
        ask=lambda engine: engine.generate(TEXT, images=pictures(2), max_tokens=NUM_GENERATED, ignore_eos=True),
        prepare=prepare,
        lane=GENERIC_MULTIMODAL,
    )


def source_subject(name: str) -> Subject:
    def prepare(engine: Engine, model: Any) -> str:
        lane = engine.model.source
        assert lane is not None
        object.__setattr__(lane.rules, "never", (END,))  # as `generate` is told
        return engine.lane.reason

    return Subject(
        name=name,
        save=lambda folder: save_tiny_seq2seq(name, folder),
        plain_inputs=lambda model: {"input_ids": torch.tensor([PROMPT])},
        ask=lambda engine: engine.generate(PROMPT, max_tokens=NUM_GENERATED),
        prepare=prepare,
    )


SUBJECTS = (
    *(text_subject(name) for name in MUST_SHOW),
    *(image_subject(name) for name in KINDS),
    *(source_subject(name) for name in SEQ2SEQ),
)


# --- rows ---------------------------------------------------------------------------------------------------


def plain_answer(model: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    """(tokens, their logits) of transformers' own generate, without end."""
    length = {"max_new_tokens": NUM_GENERATED, "min_new_tokens": NUM_GENERATED, "pad_token_id": 0}
    result = model.generate(**inputs, **length, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return result.sequences[0, -NUM_GENERATED:].tolist(), torch.cat(result.logits).float()


@torch.no_grad()
def row_of(subject: Subject, folder: Path) -> Row:
    model = subject.save(folder)
    if subject.lane == GENERIC_TEXT:
        model.generation_config.eos_token_id = None
    written, expected = plain_answer(model, subject.plain_inputs(model))
    differences: dict[int, float] = {}
    is_equal = is_said = True
    lane, verdict, reads_whole = "", "", False
    for chunk_size in CHUNK_SIZES:
        with Engine.load(str(folder), chunk_size=chunk_size, lane=subject.lane, **SETTINGS) as engine:
            verdict = subject.prepare(engine, model)
            recorder = LogitRecorder(engine)
            output = subject.ask(engine)
            lane, reads_whole = engine.lane.id, engine.lane.reads_whole
            says_chunks = engine.lane.after_reading(output.num_prompt_chunks).applied
        is_due = chunk_size < output.num_prompt_tokens and not reads_whole
        is_said &= says_chunks == (output.num_prompt_chunks > 1) == is_due
        gaps = (recorder.all - expected).abs()[recorder.all != -torch.inf]  # of tokens that are never written
        differences[chunk_size] = gaps.max().item()
        is_equal &= list(output.token_ids) == written
    return Row(
        name=subject.name,
        lane=lane,
        verdict=verdict,
        difference_by_chunk_size=differences,
        is_greedy_equal=is_equal,
        is_read_whole=reads_whole,
        is_said=is_said,
    )


def packing_ratio(folder: Path) -> float:
    """How many times faster eight requests are together than one after another, on a packed model."""
    config = transformers.LlamaConfig(
        vocab_size=199, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8
    )
    save_causal_model(config, folder)
    prompts = [prompt(64 + index, seed=index) for index in range(NUM_TOGETHER)]
    times: dict[str, float] = {}
    with Engine.load(str(folder), lane=GENERIC_TEXT, prefix_cache=False, **SETTINGS) as engine:
        engine.generate(prompts[0], max_tokens=4)
        started = time.perf_counter()
        alone = [engine.generate(tokens, max_tokens=NUM_GENERATED, ignore_eos=True).token_ids for tokens in prompts]
        times["alone"] = time.perf_counter() - started
        started = time.perf_counter()
        together = engine.generate_batch(prompts, max_tokens=NUM_GENERATED, ignore_eos=True)
        times["together"] = time.perf_counter() - started
    assert [output.token_ids for output in together] == alone, "packed answers differ from single ones"
    return times["alone"] / times["together"]


def empty_table() -> Table:
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    lengths = f"{len(PROMPT)} tokens of text or source, two images among text"
    table = Table(title=f"{versions}; {lengths}; largest logit difference to the whole prompt")
    for column in ("model", "lane", "self-check", *(f"chunk {size}" for size in CHUNK_SIZES), "32 greedy", "row"):
        table.add_column(column, no_wrap=column not in ("self-check",))
    return table


def cells(row: Row) -> list[str]:
    kind = "read whole" if row.is_read_whole else "exact"
    return [
        *(row.name, row.lane, row.verdict),
        *(f"{value:.1e}" for value in row.difference_by_chunk_size.values()),
        *("equal" if row.is_greedy_equal else "DIFFERENT", kind if row.is_right else "WRONG"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all unless given")
    names = parser.parse_args().names
    library.set_verbosity_error()
    library.disable_progress_bar()
    console = Console(width=200, highlight=False)
    table = empty_table()
    is_right = True
    with tempfile.TemporaryDirectory() as base:
        os.environ["XDG_CACHE_HOME"] = f"{base}/cache"
        for subject in SUBJECTS:
            if names and subject.name.split()[0] not in names:
                continue
            (folder := Path(base) / subject.name).mkdir()
            row = row_of(subject, folder)
            is_right &= row.is_right
            table.add_row(*cells(row))
        console.print(table)
        (folder := Path(base) / "packed").mkdir()
        console.print(f"{NUM_TOGETHER} requests packed against each alone: {packing_ratio(folder):.2f} times faster")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
