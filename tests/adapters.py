"""Adapters in the layout that PEFT publishes, with random values, and what a model becomes with one merged by hand."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

PREFIX = "base_model.model."
RANK, ALPHA = 3, 12.0


def modules_named(model: PreTrainedModel, *names: str) -> list[str]:
    return [path for path, _ in model.named_modules() if path.endswith(names)]


def low_rank(model: PreTrainedModel, modules: Iterable[str], rank: int = RANK, seed: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for path in modules:
        outputs, inputs = model.get_submodule(path).weight.shape
        found[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.2
        found[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.2
    return found


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "base_model_name_or_path": "a/base"}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    save_file(
        {f"{PREFIX}{name}": value.contiguous() for name, value in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


@torch.no_grad()
def merged(model: PreTrainedModel, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> PreTrainedModel:
    """A copy with every product added; `scales`: by a pattern of the module, the first that is found in it."""
    model = copy.deepcopy(model)
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        path = name.removesuffix(".lora_A.weight")
        scale = next(value for pattern, value in scales.items() if re.search(pattern, path))
        weight = model.get_submodule(path).weight
        weight += scale * tensors[f"{path}.lora_B.weight"] @ a
        if (lengths := tensors.get(f"{path}.lora_magnitude_vector")) is not None:
            weight *= lengths[:, None] / weight.norm(dim=1, keepdim=True)
    own = dict(model.named_parameters())
    for name, value in tensors.items():
        if ".lora_" not in name:
            own[name].copy_(value)
    return model
