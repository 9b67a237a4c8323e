"""The long matrix: prompts of 1 to 2,600 tokens in chunks of many sizes, beside transformers and the whole prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from float64_reference import float64_logits
from logit_recorder import LogitRecorder
from tiny_models import RECURRENT, prompt, save_tiny_model
from tiny_vision_models import (
    IMAGE_TOKEN,
    TEXT,
    VIDEO_TOKEN,
    TensorProcessor,
    pictures,
    processed_prompt,
    save_tiny_vision_model,
)
from transformers import PreTrainedModel

from penstock.engine.engine import Engine
from penstock.foreign.processor import MediaProcessor
from penstock.request import Output

LIMIT = 1e-4
NUM_GENERATED = 32
CHUNK_SIZES = (1, 2, 3, 5, 7, 8, 63, 64, 65, 511, 512)
TEXTS = (*sorted(RECURRENT), "gpt-oss", "mixtral", "qwen3-moe", "ministral3", "cohere2", "olmo3", "exaone4")
TEXT_LENGTHS = (1, 2, 63, 64, 65, 511, 1025, 2600)
IMAGES = ("gemma3", "llava", "qwen2.5-vl", "qwen3-vl", "smolvlm")
IMAGE_LENGTHS = (64, 511, 2600)  # with two images
# Without the prefix cache no block has to end with a chunk, and every size is read as it is.
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "memory": "4GiB", "threads": 1, "chunk_size": 0, "context": 4096, "prefix_cache": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """The largest distance between logits of the same rows, over all chunk sizes."""

    to_transformers: float  # both in float32
    to_whole: float
    to_float64: float  # transformers in float64
    of_transformers: float  # in float32, to itself in float64
    has_equal_tokens: bool  # transformers' greedy ones, at every chunk size

    @property
    def is_right(self) -> bool:
        return self.has_equal_tokens and max(self.to_transformers, self.to_whole, self.to_float64) <= LIMIT

    @classmethod
    def worst(cls, every: Iterable[Distances]) -> Distances:
        found = list(every)
        largest = {field.name: max(getattr(one, field.name) for one in found) for field in dataclasses.fields(cls)}
        return cls(**largest | {"has_equal_tokens": all(one.has_equal_tokens for one in found)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """What logits are compared with: those of the whole prompt, of transformers, and of transformers in float64."""

    whole: torch.Tensor
    reference: torch.Tensor
    truth: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A prompt: how the engine is asked to read it in chunks, and what transformers is given."""

    engine: Engine
    model: PreTrainedModel
    inputs: dict[str, torch.Tensor]
    ask: Callable[..., Output]
    widest_span: int = 1  # tokens that are read together whatever the chunk size is
    never_written: tuple[int, ...] = ()  # placeholders of images: behind a prompt, transformers looks for their images

    @property
    def num_tokens(self) -> int:
        return self.inputs["input_ids"].shape[1]

    def read(self, chunk_size: int) -> tuple[torch.Tensor, Output]:
        recorder = LogitRecorder(self.engine)
        try:
            bias = dict.fromkeys(self.never_written, -100.0)
            output = self.ask(chunk_size=chunk_size, max_tokens=NUM_GENERATED, ignore_eos=True, logit_bias=bias)
        finally:
            recorder.remove()
        return recorder.all, output

    def continued(self, written: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Transformers' inputs with the answer behind them, except its last token, which nothing follows."""
        num_prompt, more = self.num_tokens, torch.tensor([written[:-1]])
        filling = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        return {
            name: torch.cat([values, filling.get(name, torch.zeros_like(more))], dim=1)
            if values.shape[:2] == (1, num_prompt)
            else values
            for name, values in self.inputs.items()
        }

    def distances(self, logits: torch.Tensor, output: Output, others: Others) -> Distances:
        return Distances(
            to_transformers=_apart(logits, others.reference),
            to_whole=_apart(logits, others.whole),
            to_float64=_apart(logits, others.truth),
            of_transformers=_apart(others.reference, others.truth),
            has_equal_tokens=output.token_ids == self._greedy(others.reference) == self._greedy(others.truth),
        )

    def _greedy(self, logits: torch.Tensor) -> tuple[int, ...]:
        banned = torch.tensor(self.never_written, dtype=torch.long)
        return tuple(logits.index_fill(1, banned, -torch.inf).argmax(-1).tolist())


def distances(subject: Subject) -> Distances:
    whole, output = subject.read(chunk_size=0)
    assert len(output.chunks) == 1
    inputs = subject.continued(output.token_ids)
    with torch.no_grad():
        reference = subject.model(**inputs, use_cache=False).logits[0, -NUM_GENERATED:]
    others = Others(whole=whole, reference=reference, truth=float64_logits(subject.model, inputs)[-NUM_GENERATED:])
    found = [subject.distances(whole, output, others)]
    for chunk_size in CHUNK_SIZES:
        logits, output = subject.read(chunk_size)
        sizes = [chunk.end - chunk.start for chunk in output.chunks]
        if subject.widest_span == 1:
            assert set(sizes[:-1]) <= {chunk_size}
        assert max(sizes) <= max(chunk_size, subject.widest_span)
        found.append(subject.distances(logits, output, others))
    return Distances.worst(found)


def _apart(logits: torch.Tensor, others: torch.Tensor) -> float:
    return float((logits - others).abs().max())


def text_subjects(name: str, folder: Path) -> Iterator[Subject]:
    """One for each length; they share an engine."""
    model = save_tiny_model(name, folder)
    with Engine.load(str(folder), **SETTINGS) as engine:
        for length in TEXT_LENGTHS:
            tokens = prompt(length, seed=length)
            inputs = {"input_ids": torch.tensor([tokens])}
            yield Subject(engine=engine, model=model, inputs=inputs, ask=partial(engine.generate, tokens))


def image_subjects(name: str, folder: Path) -> Iterator[Subject]:
    model = save_tiny_vision_model(name, folder)
    with Engine.load(str(folder), **SETTINGS, text_only=False) as engine:
        assert engine.lane.reads_images
        for length in IMAGE_LENGTHS:
            longer = processed_prompt(name, model, num_text=(length // 4, 5, length))
            num_longer = longer["input_ids"].shape[1]
            inputs = {key: one[:, :length] if one.shape[:2] == (1, num_longer) else one for key, one in longer.items()}
            engine.model.lane.processor = MediaProcessor(TensorProcessor(inputs))
            ask = partial(engine.generate, TEXT, images=pictures(2))
            yield Subject(
                engine=engine,
                model=model,
                inputs=inputs,
                ask=ask,
                widest_span=16 if name == "gemma3" else 1,
                never_written=(IMAGE_TOKEN, VIDEO_TOKEN),
            )


SUBJECTS: dict[str, Callable[[Path], Iterator[Subject]]] = {
    **{name: partial(text_subjects, name) for name in TEXTS},
    **{f"{name} (images)": partial(image_subjects, name) for name in IMAGES},
}
