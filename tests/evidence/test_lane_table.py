"""What the transformers lanes make of each architecture: lane, self-check, logits by chunk size, tokens.

Tiny random models in float32 are saved and loaded as users do, and held to transformers' own generate on the whole
prompt: text, text with two images, or a source. A row is right when its logits are at most 1e-4 from those and its
tokens are the same: it is exact, or read whole and says so.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lane_ids import GENERIC_MULTIMODAL, GENERIC_TEXT
from logit_recorder import LogitRecorder
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

from penstock.engine.engine import Engine
from penstock.foreign.processor import MediaProcessor
from penstock.proof.images import check_picture
from penstock.request import Output

TOLERANCE = 1e-4
CHUNK_SIZES = (1, 3, 7, 64)
NUM_GENERATED = 32
PROMPT = prompt(150)
NUM_TOGETHER = 8
SETTINGS = {"dtype": "float32", "memory": "4GiB", "threads": 1}
HEAD = (
    f"transformers {transformers.__version__}, torch {torch.__version__}, float32; {len(PROMPT)} tokens of text or "
    f"source, two images among text; largest logit difference to the whole prompt, in chunks of {CHUNK_SIZES}"
)
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
        assert engine.lane.reads_images
        lane = engine.model.lane
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
        lane = engine.model.lane
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


def line(row: Row) -> str:
    kind = "read whole" if row.is_read_whole else "exact"
    gaps = " ".join(f"{value:>8.1e}" for value in row.difference_by_chunk_size.values())
    written = "equal" if row.is_greedy_equal else "DIFFERENT"
    return f"{row.name:<28} {row.lane:<36} {gaps}  {written:<9}  {kind if row.is_right else 'WRONG':<10}  {row.verdict}"


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_an_architecture_is_exact_in_chunks_or_read_whole_and_says_so(subject, tmp_path, head):
    row = row_of(subject, tmp_path)
    print(line(row), flush=True)
    assert row.is_right


def test_requests_that_share_calls_are_answered_as_alone_and_their_speed_is_told(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=199, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8
    )
    save_causal_model(config, tmp_path)
    prompts = [prompt(64 + index, seed=index) for index in range(NUM_TOGETHER)]
    with Engine.load(str(tmp_path), lane=GENERIC_TEXT, prefix_cache=False, **SETTINGS) as engine:
        engine.generate(prompts[0], max_tokens=4)
        started = time.perf_counter()
        alone = [engine.generate(tokens, max_tokens=NUM_GENERATED, ignore_eos=True).token_ids for tokens in prompts]
        between = time.perf_counter()
        together = engine.generate_batch(prompts, max_tokens=NUM_GENERATED, ignore_eos=True)
        ratio = (between - started) / (time.perf_counter() - between)
    print(f"\n{NUM_TOGETHER} requests packed against each alone: {ratio:.2f} times faster")
    assert [output.token_ids for output in together] == alone
