"""Models of any shape with random weights, made where they are needed: no file, no download."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.engine.engine import Engine  # sets OpenMP's wait policy, so it stands before torch

import tokenizers  # isort: skip
import torch

from penstock.bench.work import LARGEST_WEIGHT, SHAPES
from penstock.config import EngineConfig, load_config
from penstock.engine.loading import LoadedModel, load_files
from penstock.models.files import resolve
from penstock.models.groups import grouped
from penstock.models.mxfp4 import BIAS, Mxfp4Matrices
from penstock.models.quantized import QuantizedRows


class RandomWeights:
    """Every tensor that is asked for, drawn on its own device."""

    names: frozenset[str] = frozenset()
    quantization = "BF16"

    def shape(self, name: str) -> tuple[int, ...]:
        raise AssertionError(f"{name} has the shape that it is asked for in")

    @torch.inference_mode()
    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        destination.uniform_(-LARGEST_WEIGHT, LARGEST_WEIGHT)

    def quantize_into(self, destination: QuantizedRows, name: str) -> None:
        values = torch.empty(destination.shape).uniform_(-LARGEST_WEIGHT, LARGEST_WEIGHT)
        destination.fill(0, grouped(values.numpy(), destination.kind))

    @torch.inference_mode()
    def codes_into(self, destination: Mxfp4Matrices, name: str) -> None:
        """Draws codes, and the power that makes the largest of them as large as other weights may be."""
        power = math.floor(math.log2(LARGEST_WEIGHT / 6)) + 127 + BIAS
        destination.words_EGOW.random_(-(2**15), 2**15)
        destination.factors_EGO.fill_(int.from_bytes([power] * 4, "little", signed=True))

    def stored_runs(self, name: str, destination: torch.Tensor) -> None:
        """Finds nothing: no file has them."""


def random_engine(model: Mapping[str, Any], **settings: Any) -> Engine:
    """Makes an engine; `model` is the config.json of a native architecture, and prompts are token ids."""
    return Engine(_load(model, load_config(settings), num_words=1))


def load_shape(name: str, settings: EngineConfig) -> LoadedModel:
    """Loads one of `SHAPES` as a server would load a model: each of its tokens is a word."""
    return _load(SHAPES[name], settings, num_words=SHAPES[name]["vocab_size"])


def _load(config: Mapping[str, Any], settings: EngineConfig, *, num_words: int) -> LoadedModel:
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        save_shape(config, folder, num_words)
        return load_files(resolve(folder, weights=False), settings, weights=RandomWeights())


def save_shape(config: Mapping[str, Any], folder: str, num_words: int) -> None:
    """Saves what a model of that shape has beside its weights."""
    Path(folder, "config.json").write_text(json.dumps(config))
    _save_tokenizer(folder, num_words)


def random_transformers_model(config: Mapping[str, Any], device: str) -> Any:
    """Makes the same of transformers, in bfloat16, with weights drawn alike."""
    import transformers

    made = transformers.AutoConfig.for_model(**config)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.uniform_(-LARGEST_WEIGHT, LARGEST_WEIGHT)
    return model


def save_random_model(config: Mapping[str, Any], folder: str) -> None:
    save_model(random_transformers_model(config, "cpu"), folder)


def save_model(model: Any, folder: str) -> None:
    """Saves a model of transformers as users have theirs."""
    model.save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: str, num_words: int = 1) -> None:
    """Saves one whose tokens are the words w0, w1, ...; of a single one where prompts are token ids."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{token}": token for token in range(num_words)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(f"{folder}/tokenizer.json")
