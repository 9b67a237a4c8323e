"""Models of any shape with random weights, made where they are needed: no file, no download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.engine.engine import Engine  # sets OpenMP's wait policy, so it stands before torch

import tokenizers  # isort: skip
import torch

from penstock.bench.work import LARGEST_WEIGHT
from penstock.config import load_config
from penstock.engine.loading import load_files
from penstock.models.files import resolve
from penstock.models.groups import grouped
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

    def stored_runs(self, name: str, destination: torch.Tensor) -> None:
        """Finds nothing: no file has them."""


def random_engine(config: Mapping[str, Any], **settings: Any) -> Engine:
    """Makes an engine; `config` is the config.json of a native architecture, and prompts are token ids."""
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        _save_tokenizer(folder)
        files = resolve(folder, weights=False)
        return Engine(load_files(files, load_config(settings), weights=RandomWeights()))


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


def _save_tokenizer(folder: str) -> None:
    """Saves one that knows a single word: prompts are token ids."""
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"w0": 0}, unk_token="w0")).save(f"{folder}/tokenizer.json")
