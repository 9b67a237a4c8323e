"""Every value of every native family's config, changed one at a time: right, or of another lane with a reason.

A key that our decoder does not look at and the model's own class does would be wrong in silence; this finds it. So are
configs tried as publishers wrote them, on whatever lane they get: only sizes are reduced, and lengths so that prompts
reach them.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from config_changes import MEANINGLESS, NOT_TRIED, changes
from logit_recorder import LogitRecorder
from tiny_models import CONFIGS, prompt, random_model, reference_logits, save_tokenizer
from transformers import AutoConfig, PretrainedConfig

from penstock.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.lanes.table import pick_lane

MAX_PARAMETERS = 6_000_000
LENGTHS = (61, 90, 70)
PUBLISHED = [json.loads(line) for line in (Path(__file__).parents[1] / "published_configs.jsonl").open()]
SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 1, "memory": "6GiB", "chunk_size": 7, "context": 200}


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


@pytest.mark.long
@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["name"])
def test_a_config_as_it_was_published_gives_the_logits_of_transformers(config, tmp_path):
    raw = json.dumps({key: value for key, value in config.items() if key != "name"})
    (tmp_path / "config.json").write_text(raw)
    random_model(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(raw)
    save_tokenizer(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = [prompt(length, seed) for seed, length in enumerate((61, 90, 150))]
    whole = [reference_logits(model, tokens)[-1] for tokens in prompts]
    with Engine.load(str(tmp_path), prefix_cache=False, **SETTINGS) as engine:
        print(f"{config['name']:<34} {engine.lane.id} {'whole' if engine.lane.reads_whole else 'chunks'}", flush=True)
        assert is_right(engine, prompts, whole)
