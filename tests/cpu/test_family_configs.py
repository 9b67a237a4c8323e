"""Every native family stays native, and what its config leaves out means what its class in transformers says."""

import copy
import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from config_changes import NOT_TRIED, changes
from family_sizes import MORE, SIZES
from tiny_models import CONFIGS
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.lanes.table import pick_lane, settle
from penstock.models.families import FAMILIES
from penstock.models.files import resolve
from penstock.models.media_spec import NATIVE_MEDIA
from penstock.models.shapes import native_shape
from penstock.models.spec import decoder_spec

INSIDE_OTHERS = {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}  # decoders that come only with images
NOT_TRIED_TINY = {"qwen2_moe"}
PUBLISHED = [json.loads(line) for line in (Path(__file__).parents[1] / "published_configs.jsonl").open()]
SIZES_THAT_STAY = {
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "max_position_embeddings"),
}
# Keys whose value follows from others where they are left out.
REFUSED = {"longchat-dynamic", "embedding-gemma", "stablelm-2-12b", "command-r-plus"}
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}  # which the class leaves open
FOLLOWING = {"layer_types", "no_rope_layers", "head_dim", "layers_block_type", "per_layer_config"}
NOT_COMPARED = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings"}
TABLE = Path(__file__).parents[2] / "docs" / "reference" / "families.json"


def stored(config):
    """As it lies in a config.json, with every value."""
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_runs_natively_with_the_config_that_its_class_has_by_itself(model_type):
    lane = pick_lane(stored(CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))), None)
    assert (lane.id, lane.reason) == ("optimized-native-text", f"{model_type} has a native decoder")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gemma3", {"use_bidirectional_attention": True}),
        ("qwen3-5", {"hidden_act": "gelu"}),
        ("lfm2", {"conv_L_cache": 1}),
        ("mistral-sliding", {"sliding_window": 0}),
        ("glm", {"head_dim": 6}),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}}),
    ],
)
def test_what_would_change_the_numbers_and_has_no_native_form_goes_to_another_lane(name, values):
    assert pick_lane(stored(CONFIGS[name]()) | values, None).id == "transformers-generic-text"


@pytest.mark.parametrize(("device", "lane"), [("cpu", "optimized-native-text"), ("cuda", "transformers-generic-text")])
def test_compressed_keys_have_their_own_lane_on_processors_alone(tmp_path, device, lane):
    (tmp_path / "config.json").write_text(json.dumps(stored(CONFIGS["deepseek-v3"]())))
    files = resolve(str(tmp_path), weights=False)
    assert settle(files, EngineConfig(device=device), has_cuda=True).lane.id == lane


def test_what_a_class_does_not_look_at_changes_nothing():
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    for name, num_rotated in (("llama", 16), ("glm", 12)):
        spec = decoder_spec(stored(CONFIGS[name]()) | {"rope_parameters": parameters})
        assert spec.rotaries["global"].num_dims == num_rotated


def test_every_native_family_is_in_the_table_of_the_documentation_and_still_native():
    rows = {row["model_type"]: row for row in json.loads(TABLE.read_text())}
    for model_type in set(FAMILIES) - INSIDE_OTHERS - NOT_TRIED_TINY:
        assert rows[model_type]["lane"] == "optimized-native-text"
        assert rows[model_type]["hit_tokens"] > 0
    for model_type in NATIVE_MEDIA:
        assert rows[model_type]["lane"] == "optimized-native-multimodal"
    for model_type, row in rows.items():
        if row["lane"].startswith("optimized"):
            assert row["is_exact"]
            assert row["applied"]
            assert row["kv_bytes_per_token"] == row["cache_bytes_per_token"]
            if "only the text part" not in row["reason"]:
                config = CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))
                assert pick_lane(stored(config), None).id == row["lane"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tiny_model_of_a_family_is_of_the_native_lane(name):
    assert pick_lane(stored(CONFIGS[name]()), None).id == "optimized-native-text"


def test_every_family_has_a_tiny_model():
    tried = {CONFIGS[name]().model_type for name in CONFIGS}
    assert tried == set(FAMILIES) - INSIDE_OTHERS - NOT_TRIED_TINY


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_means_what_its_class_says(model_type):
    sizes = SIZES | MORE.get(model_type, {})
    short = decoder_spec(sizes | {"model_type": model_type})
    whole = decoder_spec(stored(CONFIG_MAPPING[model_type](**sizes)))
    # Of a decoder inside another model, that model says whether its head is tied.
    not_alike = {"rotaries"} | ({"has_tied_embeddings"} if model_type in INSIDE_OTHERS else set())
    for field in dataclasses.fields(short):
        if field.name not in not_alike:
            assert getattr(short, field.name) == getattr(whole, field.name), field.name
    assert short.rotaries.keys() == whole.rotaries.keys()
    for name, rotary in short.rotaries.items():
        assert (rotary.type, rotary.theta, rotary.num_dims) == (
            whole.rotaries[name].type,
            whole.rotaries[name].theta,
            whole.rotaries[name].num_dims,
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_has_as_many_parameters_as_its_plan_counts(name):
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    named = dict(model.named_parameters())
    stored_only = {key: value for key, value in model.state_dict().items() if key not in named and "." in key}
    num_tied = sum(value.numel() for key, value in stored_only.items() if key == "lm_head.weight")
    expected = sum(value.numel() for value in [*named.values(), *stored_only.values()]) - num_tied
    assert native_shape(stored(config), "float32").num_parameters == expected


def parts(spec):
    """All that a spec says, its rotary tables without the names of what they were made of."""
    said = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    said["rotaries"] = {
        name: dataclasses.replace(
            rotary,
            parameters={
                key: value
                for key, value in rotary.parameters.items()
                if value is not None and key not in NOT_COMPARED | {"original_max_position_embeddings"}
            },
        )
        for name, rotary in spec.rotaries.items()
    }
    return said


def is_read_as_its_class_reads_it(raw, config_class):
    """True or False; None: the class refuses the config, or our decoder does, or that which its class makes of it."""
    try:
        given = {key: value for key, value in copy.deepcopy(raw).items() if key != "model_type"}
        completed = stored(config_class(**given))
    except Exception:
        return None
    try:
        read = decoder_spec(raw)
    except PenstockError:
        return None
    return parts(read) == parts(decoder_spec(completed))


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["name"])
def test_a_config_as_it_was_published_is_read_as_its_class_reads_it(config):
    raw = {key: value for key, value in config.items() if key != "name"}
    if raw["model_type"] in FAMILIES:
        read = is_read_as_its_class_reads_it(raw, CONFIG_MAPPING[raw["model_type"]])
        assert read is not False
        assert (read is None) == (config["name"] in REFUSED)


def in_an_older_spelling(values, draw):
    """As releases before the fifth wrote rotary parameters, and without some of the keys."""
    raw = dict(values)
    rotary = raw.get("rope_parameters")
    if isinstance(rotary, dict) and "rope_theta" in rotary and draw.random() < 0.6:
        rotary = dict(raw.pop("rope_parameters"))
        for name in ("rope_theta", "partial_rotary_factor"):
            raw |= {name: rotary.pop(name)} if name in rotary else {}
        kind = rotary.pop("rope_type", "default")
        raw["rope_scaling"] = {draw.choice(["type", "rope_type"]): kind, **rotary} if kind != "default" else None
    for name in ("rope_parameters", "sliding_window"):
        raw |= {name: None} if draw.random() < 0.05 else {}
    stay = {name: 0.4 if name in FOLLOWING else 0.75 for name in raw} | dict.fromkeys(SIZES_THAT_STAY, 1.0)
    return {name: value for name, value in raw.items() if draw.random() < stay[name]}


@pytest.mark.parametrize("num_drawn", [5, pytest.param(150, marks=pytest.mark.evidence)])
def test_keys_that_are_changed_together_and_left_out_are_read_as_the_class_reads_them(num_drawn):
    draw, num_read, wrong = random.Random(num_drawn), 0, []
    for name in CONFIGS:
        base = CONFIGS[name]()
        values = {key: value for key, value in stored(base).items() if key != "architectures"}
        keys = [key for key in values if key not in NOT_TRIED and not key.endswith("token_id")]
        for _ in range(num_drawn):
            new = copy.deepcopy(values)
            for key in draw.sample(keys, draw.choice([0, 1, 1, 2, 3])):
                choices = [one for one in changes(key, new[key]) if not (isinstance(one, int) and one == 0)]
                new[key] = draw.choice(choices or [new[key]])
            raw = in_an_older_spelling(new, draw)
            is_right = is_read_as_its_class_reads_it(raw, type(base))
            num_read += is_right is True
            if is_right is False:
                wrong.append((name, {key: one for key, one in raw.items() if one != values.get(key)}))
    assert not wrong
    assert num_read > num_drawn * len(CONFIGS) / 2
