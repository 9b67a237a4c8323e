"""Every value of every native family's config, changed one at a time: right, or of another lane with a reason.

A key that our decoder does not look at and the model's own class does would be wrong in silence; this finds it.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from logit_recorder import LogitRecorder
from tiny_models import CONFIGS, prompt, random_model, reference_logits, save_tokenizer
from transformers import PretrainedConfig

from penstock.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.lanes.table import pick_lane

MAX_PARAMETERS = 6_000_000
LENGTHS = (61, 90, 70)
SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 1, "memory": "6GiB", "chunk_size": 7, "context": 200}
# What no forward of a prompt looks at, or what is a kind of its own.
NOT_TRIED = {
    *("architectures", "transformers_version", "dtype", "model_type", "num_hidden_layers", "vocab_size", "use_cache"),
    *("max_position_embeddings", "is_encoder_decoder", "chunk_size_feed_forward", "id2label", "label2id"),
}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    YARN,
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 20, "beta_slow": 2},
    YARN | {"attention_factor": 1.3, "truncate": False},
    LLAMA3 | {"original_max_position_embeddings": 64},
)
# Values that mean nothing, whose result is nobody's promise: no group of experts, no shared expert of a given width.
MEANINGLESS = {("topk_group", 0), ("moe_shared_expert_intermediate_size", 0)}


def changes(name: str, value: Any) -> Iterator[Any]:
    """Other values of a key, of its own kind."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {value + 1, value * 2, value // 2, 0, 3} - {value}
    elif isinstance(value, float):
        yield value * 1.7 + 0.1
    elif name == "rope_parameters":
        yield from rotary_changes(value)
    elif name in ("hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act"):
        yield from (one for one in ACTIVATIONS if one != value)
    elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        yield from (value[::-1], value[1:] + value[:1], value[:1] * len(value))
    elif isinstance(value, list) and value and all(isinstance(one, (int, float)) for one in value):
        yield from (value[::-1], [one + 1 for one in value])
    elif value is None:
        yield from (8, True, 0.7)


def rotary_changes(value: Any) -> Iterator[dict[str, Any]]:
    is_flat = not isinstance(value, dict) or "rope_type" in value
    for scaling in SCALINGS:
        new = {"rope_theta": 10_000.0, **scaling}
        if is_flat:
            yield new
        else:
            yield from (copy.deepcopy(value) | {kind: new} for kind in value)


def changed(base: PretrainedConfig, name: str, value: Any) -> PretrainedConfig:
    """The class may follow the value in others, or take it as it is."""
    given = {key: one for key, one in base.to_dict().items() if key not in ("architectures", "transformers_version")}
    try:
        return type(base)(**copy.deepcopy(given) | {name: value})
    except Exception:
        config = copy.deepcopy(base)
        setattr(config, name, value)
        return config


def outcome(config: PretrainedConfig, folder: Path) -> str:
    """What becomes of a model with that config: exact, WRONG, of another lane, refused, or not made by its class."""
    try:
        with torch.device("meta"):
            plain = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
        if sum(parameter.numel() for parameter in plain.parameters()) > MAX_PARAMETERS:
            return "too large"
        model = random_model(config)
        prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
        whole = [reference_logits(model, tokens)[-1] for tokens in prompts]
        model.save_pretrained(folder)
    except Exception:
        return "not made"
    if not all(bool(logits.isfinite().all()) for logits in whole):
        return "not made"
    save_tokenizer(folder)
    try:
        if not pick_lane(json.loads((folder / "config.json").read_text()), None).id.startswith("optimized"):
            return "another lane"
        with Engine.load(str(folder), prefix_cache=False, **SETTINGS) as engine:
            return "exact" if is_right(engine, prompts, whole) else "WRONG"
    except PenstockError:
        return "refused"


def is_right(engine: Engine, prompts: list[list[int]], whole: list[torch.Tensor]) -> bool:
    num_wrong = 0  # near-tied routers flip on rounding: two of three decide
    for tokens, true_V in zip(prompts, whole, strict=True):
        recorder = LogitRecorder(engine)
        engine.generate(tokens, max_tokens=1, ignore_eos=True)
        recorder.remove()
        difference = float((recorder.all[-1] - true_V).abs().max())
        num_wrong += not difference <= 1e-4 * max(1.0, float(true_V.std()))
    return num_wrong < 2


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_no_value_of_a_config_is_wrong_in_silence(name, tmp_path):
    base, counts, wrong = CONFIGS[name](), Counter(), []
    for key, value in json.loads(base.to_json_string(use_diff=False)).items():
        if key in NOT_TRIED or key.endswith("token_id"):
            continue
        for number, new in enumerate(changes(key, value)):
            if (key, new) in MEANINGLESS if isinstance(new, (int, str)) else False:
                continue
            try:
                config = changed(base, key, new)
            except Exception:
                counts["not made"] += 1
                continue
            found = outcome(config, tmp_path / f"{key}-{number}")
            counts[found] += 1
            if found == "WRONG":
                wrong.append((key, value, new))
    print(f"{name:<28} {dict(counts)}", flush=True)
    assert counts["exact"]
    assert not wrong
