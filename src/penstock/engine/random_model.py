"""An engine for a model of any shape with random weights, made where they are needed: no file, no download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.engine.engine import Engine  # sets OpenMP's wait policy, so it stands before torch

import tokenizers  # isort: skip
import torch

from penstock.config import load_config
from penstock.engine.loading import load_native, prepare_process
from penstock.engine.planning import require_device
from penstock.lanes.lane import pick_lane
from penstock.models.files import resolve
from penstock.models.groups import grouped
from penstock.models.packed import PackedRows

# As vLLM draws its dummy weights, norms too: how fast a card multiplies depends on what it multiplies.
LARGEST = 1e-3
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}


class RandomWeights:
    """Every tensor that is asked for, drawn on its own device."""

    names: frozenset[str] = frozenset()
    quantization = "BF16"

    def shape(self, name: str) -> tuple[int, ...]:
        raise AssertionError(f"{name} has the shape that it is asked for in")

    @torch.inference_mode()
    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        destination.uniform_(-LARGEST, LARGEST)

    def pack_into(self, destination: PackedRows, name: str) -> None:
        values = torch.empty(destination.shape).uniform_(-LARGEST, LARGEST)
        destination.matrix.fill(destination.start, grouped(values.numpy(), destination.matrix.format))


def random_engine(config: Mapping[str, Any], **settings: Any) -> Engine:
    """`config` is the config.json of a native architecture; the tokenizer knows one word, so prompts are token ids."""
    asked = load_config(settings)
    device = torch.device(require_device(asked.device, has_cuda=torch.cuda.is_available()))
    asked = asked.on_device(device.type)
    prepare_process(asked)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"w0": 0}, unk_token="w0")).save(f"{folder}/tokenizer.json")
        files = resolve(folder, weights=False)
        model = load_native(files, pick_lane(files.config, None), asked, device, weights=RandomWeights())
    return Engine(model, asked)
